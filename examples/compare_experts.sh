#!/usr/bin/env bash
# Trains tiny, and tiny-moe with three kinds of balance, on the quickstart's data: the load of the experts without any
# rule, with the balancing loss of sequences, and with the expert bias, and what experts do to the loss. It takes half an
# hour on two CPU cores. It can be interrupted and restarted: finished runs with the same flags are kept.
#
#   bash examples/compare_experts.sh
#   ITERATIONS=50 RUN=runs/short bash examples/compare_experts.sh --lr 1e-3
#
# Arguments are flags for every run, and override the flags here.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh plots,tensorboard

RUN=${RUN:-runs/experts}           # curves, logs and the drawing
ITERATIONS=${ITERATIONS:-900}
DATA=${DATA:-runs/quickstart}      # corpus, tokenizer and tokens, made if missing
source examples/quickstart_recipe.sh

# In a few hundred steps a bias that changes by 1e-3 (DeepSeek-V3) would not balance.
BIAS="--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
declare -A FLAGS=(
    [dense]="--model tiny"
    [unbalanced]="--model tiny-moe --moe-router-load-balancing-type none"
    [seq_aux_loss]="--model tiny-moe --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
    [bias]="--model tiny-moe --moe-router-load-balancing-type none $BIAS"
)
NAMES=(dense unbalanced seq_aux_loss bias)

mkdir -p "$RUN"
PROCESSES=$(count_processes)
CURVES=()
for name in "${NAMES[@]}"; do
    metrics=$RUN/$name.jsonl
    CURVES+=("$metrics")
    # shellcheck disable=SC2086
    flags=$(printf '%s\n' ${FLAGS[$name]} \
        --seq-length 256 --micro-batch-size 8 --global-batch-size 16 --use-distributed-optimizer \
        --train-iters "$ITERATIONS" --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine \
        --lr-warmup-iters $((ITERATIONS / 12)) --adam-beta2 0.95 --weight-decay 0.1 \
        --data-path "$DATA/corpus_text_document" --split 95,5,0 --num-workers 1 "${TOKENIZER[@]}" \
        --eval-interval "$ITERATIONS" --eval-iters 8 "$@")
    train "$name" "$flags"
done

step "Curves: $RUN/experts.png"
python tools/plot_metrics.py --metrics "${CURVES[@]}" --smooth 20 --output "$RUN/experts.png"
step "Load of the busiest expert over the mean (worst layer, mean of the last 50 iterations), and validation loss"
python - "${CURVES[@]}" <<'PYTHON'
import json
import sys
from pathlib import Path

print(f"{'run':14}{'load':>8}{'validation loss':>18}")
for path in map(Path, sys.argv[1:]):
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    loads = [record["expert_load_max"] for record in records if "expert_load_max" in record][-50:]
    load = f"{sum(loads) / len(loads):.3f}" if loads else "-"
    loss = next(record["validation_loss"] for record in reversed(records) if "validation_loss" in record)
    print(f"{path.stem:14}{load:>8}{loss:>18.4f}")
PYTHON
