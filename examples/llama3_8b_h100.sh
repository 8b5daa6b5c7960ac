#!/usr/bin/env bash
# Llama 3 8B on one node of 8 H100s (80 GB), or more (NODES). Knobs: examples/launch.sh. Not run on H100s yet.
#
# "The paper": The Llama 3 Herd of Models, arXiv 2407.21783. It describes the 405B; "we use similar recipes to pre-train
# the 8B and 70B models" (section 3.4).
#
#   DATA_PATH=data/corpus_text_document TOKENIZER_MODEL=tokenizer.model bash examples/llama3_8b_h100.sh
#   DRY_RUN=1 bash examples/llama3_8b_h100.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

FLAGS=(
    --model llama3-8b   # 32 layers of 4,096, MLP 14,336, 32 heads, 8 of keys and values, RoPE base 500,000: table 3
    --seq-length 8192   # section 3.4.1. Without the 405B's first 252M tokens (0.002 %) with 4,096
    --reset-attention-mask   # no attention between documents of one sequence: section 3.2

    # Layout: our choice. With tensor-parallel size 2, 8,192 tokens fit without recompute.
    --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1
    --bf16 --accumulate-allreduce-grads-in-fp32   # gradients accumulated and reduced in fp32: section 3.3.2

    # Batch: our choice, the initial 4M tokens of the 405B (512 x 8,192).
    --global-batch-size 512

    --lr 3e-4           # table 3
    --lr-decay-style cosine
    --lr-warmup-iters 8000   # section 3.4.1, also for the next two: decay to 1 % of the peak
    --min-lr 3e-6
    --train-iters 1200000    # 5.0T tokens in batches of 4M; the paper's 15T need larger batches or three times as many
    --optimizer adam    # AdamW: section 3.4.1
    # Section 3.2.1, for the runs of its scaling laws: "0.1 times the learning rate", as AdamW applies it.
    --weight-decay 0.1
    # The paper does not say; Llama 2's values (arXiv 2307.09288, section 2.2).
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --clip-grad 1.0

    # The rest is our choice.
    --split "9990,10,0" --num-workers 4 --eval-interval 1000 --eval-iters 16
    --save-interval 500 --async-save --save-retain-last 3 --save-retain-interval 25000
    --log-interval 10 --manual-gc --manual-gc-interval 100
)
launch "$@"
