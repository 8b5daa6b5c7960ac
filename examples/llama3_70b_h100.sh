#!/usr/bin/env bash
# Llama 3 70B on 8 nodes of 8 H100s (80 GB), or more (NODES). Knobs: examples/launch.sh, and
#
#   PRECISION=fp8      linear layers in FP8 (default: bf16, as in the paper)
#
# "The paper": The Llama 3 Herd of Models, arXiv 2407.21783. It describes the 405B; "we use similar recipes to pre-train
# the 8B and 70B models" (section 3.4). Not run on H100s yet.
#
#   DRY_RUN=1 NODES=64 PRECISION=fp8 bash examples/llama3_70b_h100.sh
set -euo pipefail
NODES=${NODES:-${SLURM_NNODES:-8}}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

FLAGS=(
    --model llama3-70b   # 80 layers of 8,192, MLP 28,672, 64 heads, 8 of keys and values, RoPE base 500,000: table 3
    --seq-length 8192    # section 3.4.1. Without the 405B's first 252M tokens (0.002 %) with 4,096
    --reset-attention-mask   # no attention between documents of one sequence: section 3.2

    # Layout: our choice, by the planner's search on 64 H100s (docs/planner.md): with TP4 a step of 512 sequences takes
    # 56.4 s, with TP8 61.2 s, because a layer's GEMMs are larger and half as many bytes are gathered. Collectives
    # overlap with the GEMMs beside them. What needs no GEMM is recomputed: without that the first stage does not fit.
    --tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap
    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5   # 5 chunks of 4 layers on each stage
    --recompute-granularity selective --recompute-modules layernorm mlp_act
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1
    --bf16 --accumulate-allreduce-grads-in-fp32   # gradients accumulated and reduced in fp32: section 3.3.2

    # Batch: 4M, 8M and 16M tokens from the same numbers of tokens on as for the 405B (section 3.4.1), in sequences of
    # 8,192.
    --step-batch-size-schedule "0:512 252M:1024 2.87T:2048"

    --lr 1.5e-4          # table 3
    --lr-decay-style cosine
    --min-lr 1.5e-6      # 1 % of the peak, as the 405B's: section 3.4.1
    # The 405B's 8,000 and 1,200,000 steps (section 3.4.1) as samples of these batches. Schedules count samples, as in
    # Megatron-LM, so the cosine decreases half as fast per step while batches are half as large.
    --lr-warmup-samples 8160768 --lr-decay-samples 2107194880
    --train-samples 1904296875   # 15.6T tokens: section 1
    --optimizer adam     # AdamW: section 3.4.1
    # Section 3.2.1, for the runs of its scaling laws: "0.1 times the learning rate", as AdamW applies it.
    --weight-decay 0.1
    # The paper does not say; Llama 2's values (arXiv 2307.09288, section 2.2).
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --clip-grad 1.0

    # The rest is our choice.
    --split "9990,10,0" --num-workers 4 --eval-interval 1000 --eval-iters 4
    --save-interval 250 --async-save --save-retain-last 3 --save-retain-interval 10000
    --log-interval 10 --manual-gc --manual-gc-interval 100
)
if [ "${PRECISION:-bf16}" = fp8 ]; then
    # Our choice: scales from the largest amax of the last 1,024 steps; docs/precision.md. Weights are kept and gathered in
    # FP8 alone: on 64 GPUs both copies would not fit.
    FLAGS+=(
        --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
        --fp8-param-gather
    )
fi
launch "$@"
