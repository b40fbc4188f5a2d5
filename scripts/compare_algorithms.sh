#!/usr/bin/env bash
# The same 100 rows and the same model by four methods, then all of them on one page.
# usage: bash scripts/compare_algorithms.sh [section.key=value ...]      settings for all four runs
# Writes outputs/compare/{ppo,grpo,dpo,kto} and outputs/compare/compare.{html,png}; METHODS="dpo simpo" runs others.
# About 4 minutes with the bundled model on 2 CPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/install.sh
quickstart_install
methods="${METHODS:-ppo grpo dpo kto}"
runs=()
for method in $methods; do
  .venv/bin/python -m quickstart.run --config configs/ppo_min.yaml \
    rl.rl_type="$method" training.output_dir="outputs/compare/$method" "$@"
  runs+=("outputs/compare/$method")
done
.venv/bin/python -m quickstart compare "${runs[@]}" --out outputs/compare
