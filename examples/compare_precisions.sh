#!/usr/bin/env bash
# Trains the quickstart's model in every precision, from the same weights and on the same samples, and compares the
# losses with fp32. Exits with an error if a curve leaves its band. It took 53 minutes on two CPU cores that were also
# used by others. It can be interrupted and restarted: finished runs with the same flags are kept.
#
#   bash examples/compare_precisions.sh
#   PRECISIONS="fp32 bf16" ITERATIONS=50 RUN=runs/short bash examples/compare_precisions.sh --lr 1e-3
#
# Arguments are flags for every run, and override the flags here.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh plots,tensorboard

RUN=${RUN:-runs/precisions}        # curves, logs and the drawing
ITERATIONS=${ITERATIONS:-200}
DATA=${DATA:-runs/quickstart}      # corpus, tokenizer and tokens, made if missing
source examples/quickstart_recipe.sh
WINDOW=$((ITERATIONS < 20 ? ITERATIONS : 20))

HYBRID="--bf16 --fp8-format hybrid"
declare -A FLAGS=(
    [fp32]=""
    [fp32-other-seed]="--seed 4321"                 # the effect of chance
    [bf16]="--bf16"
    [fp16]="--fp16 --initial-loss-scale 65536"      # from 2^32, the default, the first steps would be skipped
    [fp8-delayed]="$HYBRID --fp8-amax-history-len 16 --fp8-amax-compute-algo max"
    [fp8-delayed-default]="$HYBRID"                 # history 1
    [fp8-tensorwise]="$HYBRID --fp8-recipe tensorwise"
)
# Percent by which the mean loss may differ from fp32, and by which the smoothed loss may be higher: docs/precision.md.
declare -A BANDS=(
    [fp32-other-seed]=inf
    [bf16]=0.5 [fp16]=0.5 [fp8-delayed]=1 [fp8-delayed-default]=1 [fp8-tensorwise]=1
)
read -r -a NAMES <<< "${PRECISIONS:-fp32 bf16 fp8-delayed fp8-tensorwise fp16 fp8-delayed-default fp32-other-seed}"

for name in "${NAMES[@]}"; do
    if [ -z "${FLAGS[$name]+set}" ]; then
        echo "ERROR: PRECISIONS has no $name: choose from ${!FLAGS[*]}." >&2
        exit 1
    fi
done
if [ "${NAMES[0]:-}" != fp32 ] || [ "${#NAMES[@]}" -lt 2 ]; then
    echo "ERROR: PRECISIONS must name fp32, with which the others are compared, and then others." >&2
    exit 1
fi

mkdir -p "$RUN"
PROCESSES=$(count_processes)
CURVES=()
CHOSEN=()
for name in "${NAMES[@]}"; do
    metrics=$RUN/$name.jsonl
    if [ "$name" != fp32 ]; then
        CURVES+=("$metrics")
        CHOSEN+=("${BANDS[$name]}")
    fi
    # shellcheck disable=SC2086
    flags=$(recipe "$ITERATIONS"; printf '%s\n' ${FLAGS[$name]} --eval-interval "$ITERATIONS" --eval-iters 8 "$@")
    train "$name" "$flags"
done

step "Loss curves: $RUN/precisions.png"
python tools/plot_metrics.py --metrics "$RUN/fp32.jsonl" "${CURVES[@]}" --smooth "$WINDOW" \
    --output "$RUN/precisions.png"
step "Compared with fp32"
python tools/compare_losses.py --reference "$RUN/fp32.jsonl" --metrics "${CURVES[@]}" --bands "${CHOSEN[@]}" \
    --window "$WINDOW"
