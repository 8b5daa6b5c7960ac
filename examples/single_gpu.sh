#!/usr/bin/env bash
# Llama 3.2 1B on one GPU, for a first measurement. Knobs: examples/launch.sh.
# The published model's sizes; the training settings are our choice.
#
#   bash examples/single_gpu.sh --train-iters 20
set -euo pipefail
GPUS_PER_NODE=1
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# FLAGS is for launch.
# shellcheck disable=SC2034
FLAGS=(
    --model llama3.2-1b --seq-length 4096 --bf16
    --micro-batch-size 1 --global-batch-size 16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100 --train-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --weight-decay 0.1 --clip-grad 1.0
    --split "990,10,0" --eval-interval 500 --eval-iters 8
    --save-interval 500 --save-retain-last 1 --log-interval 10
)
launch "$@"
