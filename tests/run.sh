#!/usr/bin/env bash
# Runs the tests in two workers; installs what they need into .venv. Arguments go to pytest:
#   bash tests/run.sh tests/data -x
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline
# A module stays in one worker: its fixtures are made once, and its ranks join once. Modules start in the order of their
# names: the default, by their number of tests, would leave the few long ones to the end, where one worker has no work.
run() { python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"; }
status=0
run "$@" || status=$?
if [[ " $* " == *" --slow "* || " $* " == *" --whole-matrix "* ]]; then
    echo "The tests that compare seconds, with nothing beside them:"
    alone=0
    python -m pytest -m alone "$@" || alone=$?
    echo "The default tests of several ranks once more, over gloo instead of shared memory:"
    over_gloo=0
    run --transport gloo "$@" || over_gloo=$?
    for code in $alone $over_gloo; do
        if [[ $status == 0 && $code != 5 ]]; then status=$code; fi  # 5: none of the tests named
    done
fi
exit $status
