#!/usr/bin/env bash
# From a fresh clone to a trained model: installs what is missing, then runs the main job.
# usage: bash scripts/run.sh [--config FILE] [section.key=value ...]      as `python -m quickstart.run`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh
quickstart_install
exec .venv/bin/python -m quickstart.run "$@"
