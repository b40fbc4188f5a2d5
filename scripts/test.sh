#!/usr/bin/env bash
# From a fresh clone to a tested one: installs what is missing, then runs the linter, the type checker and the tests.
# usage: bash scripts/test.sh [pytest arguments ...]
set -euo pipefail
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}  # torch's threads sleep while they wait: see trainers/environment.py
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh
quickstart_install test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
