#!/usr/bin/env bash
# Runs the tests in two workers; installs what they need into .venv. Arguments go to pytest:
#   bash tests/run.sh tests/data -x
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline
# A module stays in one worker: its fixtures are made once, and its ranks join once. Modules start in the order of their
# names: the default, by their number of tests, would leave the few long ones to the end, where one worker has no work.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
