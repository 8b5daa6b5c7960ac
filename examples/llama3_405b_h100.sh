#!/usr/bin/env bash
# Llama 3 405B on 2,048 nodes of 8 H100s (80 GB), as "the paper" describes it: The Llama 3 Herd of Models,
# arXiv 2407.21783. Knobs: examples/launch.sh, and
#
#   STAGE=start        the first 252M tokens, in sequences of 4,096
#   STAGE=main         sequences of 8,192 up to 14.8T tokens (default)
#   STAGE=long         sequences of 131,072, 800B tokens
#   STAGE=anneal       the last 40M tokens, of the same length: the learning rate falls to 0
#
# The stages are one run in one OUTPUT: start each when the previous one is complete. --new-data-stage begins the data of
# a stage at their first sample, at its first start only. Each stage may have its own DATA_PATH.
#
# The number of GPUs must be a multiple of 128 (long and anneal: of 2,048) that divides the batch; the paper also uses
# NODES=1024.
# Not run on H100s yet.
#
#   DRY_RUN=1 STAGE=long bash examples/llama3_405b_h100.sh
set -euo pipefail
STAGE=${STAGE:-main}
NODES=${NODES:-${SLURM_NNODES:-2048}}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

FLAGS=(
    # Table 3: 126 layers of 16,384, MLP 53,248, 128 heads, 8 of keys and values, RoPE base 500,000. Rotary frequencies
    # are scaled as in the published model, here from the start; the paper does not mention it.
    --model llama3.1-405b
    --reset-attention-mask   # no attention between documents of one sequence: section 3.2

    # Table 4: tensor-parallel size 8, pipeline-parallel size 16. Embedding and output layer count as a layer each, so the
    # first chunk is only the embedding and the last one the output layer (section 3.3.2): 128 chunks of one, 8 per stage.
    --tensor-model-parallel-size 8 --sequence-parallel
    --tp-comm-overlap   # our choice: at TP8 collectives are an estimated sixth of a layer's time, of which GEMMs hide a part
    --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 8
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    # The paper's FSDP shards gradients and optimizer state, and does not free the weights between forward and backward,
    # which is ZeRO-2. ZeRO-1 is our choice: it reduces gradients once per step and communicates less.
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1
    # The paper trains without recompute, and shards gradients. Here SwiGLU is recomputed, which needs no GEMM. In the dry
    # run the stage with the highest peak needs 86 GiB without it, and 73 with it.
    --recompute-granularity selective --recompute-modules mlp_act
    --bf16 --accumulate-allreduce-grads-in-fp32   # gradients accumulated and reduced in fp32: section 3.3.2

    --optimizer adam         # AdamW: section 3.4.1
    # Section 3.2.1, for the runs of its scaling laws: "0.1 times the learning rate", as AdamW applies it.
    --weight-decay 0.1
    # The paper does not say; Llama 2's values (arXiv 2307.09288, section 2.2).
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --clip-grad 1.0

    # The rest is our choice. Saves are frequent: an interruption every three hours (section 3.3.4: 466 in 54 days).
    --split "9999,1,0" --num-workers 4 --eval-interval 1000 --eval-iters 1
    --save-interval 100 --async-save --save-retain-last 3 --save-retain-interval 10000
    --log-interval 1 --manual-gc --manual-gc-interval 100
)
# Section 3.4.1: 8,000 steps of warm-up, then a cosine from 8e-5 to 8e-7 over 1,200,000 steps. Here they are samples of
# the batches of STAGE=main: schedules count samples, as in Megatron-LM, so the cosine decreases half as fast per step
# while batches are half as large.
SCHEDULE=(
    --lr 8e-5 --min-lr 8e-7 --lr-decay-style cosine --lr-warmup-samples 8192000 --lr-decay-samples 2107257856
)
# Table 4: context-parallel size 16 with an all-gather of keys and values (section 3.3.2); 16M tokens per batch.
LONG=(--seq-length 131072 --context-parallel-size 16 --cp-comm-type allgather --global-batch-size 128)
# --train-samples counts all samples of the run, including earlier stages. A remainder that is no whole batch is
# omitted: main ends at 1,806,640,128 and long at 1,812,743,552.
case $STAGE in
    start)  # section 3.4.1: 60 batches of 4M tokens
        FLAGS+=(--seq-length 4096 --global-batch-size 1024 --train-samples 61440 "${SCHEDULE[@]}")
        ;;
    main)   # section 3.4.1: batches of 8M tokens, 16M after 2.87T tokens; 15.6T in total (section 1) minus 0.8T of long
        FLAGS+=(--seq-length 8192 --step-batch-size-schedule "0:1024 2.87T:2048" --train-samples 1806640625 "${SCHEDULE[@]}")
        ;;
    long)
        # Section 3.4.2: about 800B tokens, in six stages of increasing length. This is the last one; for the others add
        # for example --seq-length 32768 --context-parallel-size 4 --global-batch-size 512 --new-data-stage 32k, and the
        # --train-samples at which each ends. The paper does not give the learning rate. Here the cosine continues in
        # samples, and these are few: from 4.74e-6 to 4.59e-6.
        FLAGS+=("${LONG[@]}" --train-samples 1812743643 "${SCHEDULE[@]}")
        ;;
    anneal)
        # Section 3.4.3: linearly to 0 over 40M tokens, which are 305 samples: three batches, at 4.59e-6, 2.66e-6 and
        # 0.74e-6.
        FLAGS+=(
            "${LONG[@]}" --train-samples 1812743936 --override-opt-param-scheduler
            --lr 4.59e-6 --min-lr 0 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-samples 305
            --lr-decay-samples 1812743857
        )
        ;;
    *)
        echo "STAGE=$STAGE is none of start, main, long and anneal." >&2
        exit 1
        ;;
esac
FLAGS+=(--new-data-stage "$STAGE")
launch "$@"
