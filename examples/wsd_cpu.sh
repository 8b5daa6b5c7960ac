#!/usr/bin/env bash
# Warm-up, stable phase, decay (WSD) with a tiny model on one CPU process, in minutes: one stable run, decays that
# branch off two of its checkpoints, and averages of its checkpoints, which need no decay. All are evaluated on the same
# validation samples. It can be interrupted and restarted: it skips finished steps.
#
#   bash examples/wsd_cpu.sh            RUN=my_dir STABLE=400 DECAY=80 EVERY=20 bash examples/wsd_cpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v torchrun > /dev/null; then  # no environment with torch is active
    source tools/environment.sh plots,tensorboard
fi

RUN=${RUN:-runs/wsd}       # everything is written here
STABLE=${STABLE:-200}      # iterations of the warm-up and the stable phase; a multiple of 2 x EVERY
DECAY=${DECAY:-40}         # iterations of a decay: 10 to 20 % of all are usual
EVERY=${EVERY:-20}         # iterations between checkpoints; an average is of the last three

train() {
    python pretrain_llama.py --model tiny --mock-data --vocab-size 500 --seq-length 64 --micro-batch-size 8 \
        --lr 3e-3 --lr-warmup-iters 10 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt \
        --lr-wsd-decay-iters "$DECAY" --adam-beta2 0.95 --weight-decay 0.1 \
        --eval-iters 16 --num-workers 0 --device cpu --log-interval "$EVERY" "$@"
}

is_complete() { # DIRECTORY ITERATION
    [ -d "$1/iter_$(printf %07d "$2")" ]
}

evaluate() { # NAME DIRECTORY ITERATION
    [ -f "$RUN/$1.evaluation.jsonl" ] && return
    train --load "$2" --ckpt-step "$3" --finetune --skip-train --train-iters 1 --lr-decay-iters "$((DECAY + 11))" \
        --metrics-jsonl "$RUN/$1.partial.jsonl" > "$RUN/evaluation.log"
    mv "$RUN/$1.partial.jsonl" "$RUN/$1.evaluation.jsonl"
}

mkdir -p "$RUN"
if ! is_complete "$RUN/stable" "$STABLE"; then
    echo "== Stable run: $STABLE iterations"
    # The decay would begin after the last of them.
    train --train-iters "$STABLE" --lr-decay-iters "$((STABLE + DECAY))" --save-interval "$EVERY" \
        --save "$RUN/stable" --load "$RUN/stable" --metrics-jsonl "$RUN/stable.jsonl"
fi

for at in "$((STABLE / 2))" "$STABLE"; do
    end=$((at + DECAY))
    if ! is_complete "$RUN/decay_$at" "$end"; then
        echo "== Decay from iteration $at to $end"
        # Weights, optimizer state and data continue; only the schedule is another one.
        train --load "$RUN/stable" --ckpt-step "$at" --override-opt-param-scheduler \
            --train-iters "$end" --lr-decay-iters "$end" --save "$RUN/decay_$at" --metrics-jsonl "$RUN/decay_$at.jsonl"
    fi
    if ! is_complete "$RUN/average_$at" "$at"; then
        python tools/average_checkpoints.py --load "$RUN/stable" --save "$RUN/average_$at" \
            --iterations "$((at - 2 * EVERY))" "$((at - EVERY))" "$at"
    fi
    evaluate "stable_$at" "$RUN/stable" "$at"
    evaluate "average_$at" "$RUN/average_$at" "$at"
    evaluate "decay_$at" "$RUN/decay_$at" "$end"
done

echo "== Validation loss"
python - "$RUN" "$((STABLE / 2))" "$STABLE" "$DECAY" <<'PYTHON'
import json
import sys

run, *points, decay = sys.argv[1:]
print(f"{'iteration':>9}  {'stable':>8}  {'average':>8}  {'after ' + decay + ' of decay':>18}")
for at in points:
    losses = [
        json.loads(open(f"{run}/{kind}_{at}.evaluation.jsonl").readline())["validation_loss"]
        for kind in ("stable", "average", "decay")
    ]
    print(f"{at:>9}  {losses[0]:8.4f}  {losses[1]:8.4f}  {losses[2]:18.4f}")
PYTHON
