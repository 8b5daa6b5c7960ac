#!/usr/bin/env bash
# A tiny mixture of experts on two CPU processes with expert parallelism, in seconds. Knobs: examples/launch.sh.
#
#   bash examples/moe_cpu.sh
set -euo pipefail
GPUS_PER_NODE=2  # processes
VOCAB_SIZE=${VOCAB_SIZE:-1000}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# FLAGS is for launch.
# shellcheck disable=SC2034
FLAGS=(
    --model tiny-moe --seq-length 128 --device cpu
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --micro-batch-size 2 --global-batch-size 4
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 5 --train-iters 20
    --adam-beta2 0.95 --weight-decay 0.1
    --split "90,10,0" --num-workers 0 --log-interval 5
)
launch "$@"
