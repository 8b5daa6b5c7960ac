#!/usr/bin/env bash
# Runs the tests; installs what they need into .venv. Arguments go to pytest: bash tests/run.sh tests/data -x
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline
exec python -m pytest "$@"
