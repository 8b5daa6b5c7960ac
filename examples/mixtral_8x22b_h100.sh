#!/usr/bin/env bash
# Mixtral 8x22B on 16 nodes of 8 H100s (80 GB), or more (NODES). Knobs: examples/launch.sh.
#
# Mistral published the model's sizes and nothing about its training, so the batch, the schedule and the optimizer are our
# choice. Not run on H100s yet.
#
#   DRY_RUN=1 bash examples/mixtral_8x22b_h100.sh
set -euo pipefail
NODES=${NODES:-${SLURM_NNODES:-16}}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-SentencePieceTokenizer}
VOCAB_SIZE=${VOCAB_SIZE:-32768}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

FLAGS=(
    --model mixtral-8x22b   # 56 layers of 6,144, 8 experts of 16,384, 2 for each token: config.json of v0.3
    --seq-length 4096
    --reset-attention-mask   # no attention between documents of one sequence

    # Attention: tensor-parallel size 4. Experts: the same 16 ranks of a stage are 8 expert-parallel ranks, each with one
    # whole expert of every layer, times 2. The rank order keeps both on one node: docs/moe.md.
    --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --rank-order tp-cp-ep-dp-pp
    --pipeline-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --global-batch-size 1024
    --bf16 --accumulate-allreduce-grads-in-fp32

    # The balancing loss of every sequence does not depend on the layout; the z-loss bounds the router's logits.
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3

    --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --train-iters 500000
    --optimizer adam --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0

    --split "9990,10,0" --num-workers 4 --eval-interval 1000 --eval-iters 4
    --save-interval 250 --async-save --save-retain-last 3 --save-retain-interval 10000
    --log-interval 10 --manual-gc --manual-gc-interval 100
)
launch "$@"
