#!/usr/bin/env bash
# Llama 4 Scout, the text model, on 16 nodes of 8 H100s (80 GB), or more (NODES). Knobs: examples/launch.sh, and
#
#   STAGE=main         sequences of 8,192, 10T tokens (default)
#   STAGE=mid          sequences of 32,768, 100B tokens
#   STAGE=long         sequences of 131,072, 50B tokens, with temperature tuning
#
# The stages are one run in one OUTPUT: start each when the previous one is complete. --new-data-stage begins the data of
# a stage at their first sample, at its first start only. Each stage may have its own DATA_PATH.
#
# Meta published the model's sizes, and that contexts grew to 256K in later stages of pre-training; the rest of its
# training is not published, so tokens, batches, schedule and losses are our choice. Not run on H100s yet.
#
#   DRY_RUN=1 STAGE=long bash examples/llama4_scout_h100.sh
set -euo pipefail
STAGE=${STAGE:-main}
NODES=${NODES:-${SLURM_NNODES:-16}}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-HuggingFaceTokenizer}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-tokenizer.json}
VOCAB_SIZE=${VOCAB_SIZE:-202048}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

FLAGS=(
    # config.json: 48 layers of 5,120, 40 heads of 128, 8 of keys and values; in every layer 16 experts of 8,192, one for
    # each token, and a shared one. Three layers with RoPE and attention inside chunks of 8,192, then one without RoPE.
    --model llama4-scout
    --reset-attention-mask   # no attention between documents of one sequence

    # Attention: tensor-parallel size 2. Experts: the 32 ranks of a stage are 16 expert-parallel ranks, each with one whole
    # expert of every layer, times 2. The rank order keeps them on neighbouring nodes: docs/moe.md. 8 expert-parallel ranks
    # were 3 % faster in a plan, but hold two experts of every layer, for which the memory is short.
    --tensor-model-parallel-size 2 --sequence-parallel
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
    --rank-order tp-cp-ep-dp-pp
    # The output layer takes as long as three layers: with nine layers in the last stage the planner predicts 7 % less time
    # than with twelve in each. Every stage has three layers without RoPE.
    --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 9
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1
    --bf16 --accumulate-allreduce-grads-in-fp32

    # The balancing loss of every sequence does not depend on the layout; the z-loss bounds the router's logits.
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3

    # Samples of the batches of STAGE=main. In the later stages the learning rate stays at its minimum.
    --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine --lr-warmup-samples 2048000 --lr-decay-samples 1228800000
    --optimizer adam --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0

    --split "9990,10,0" --num-workers 4 --eval-interval 1000 --eval-iters 4
    --save-interval 250 --async-save --save-retain-last 3 --save-retain-interval 10000
    --log-interval 10 --manual-gc --manual-gc-interval 100
)
# A batch has 8.4M tokens in every stage, and with context parallelism a rank has 8,192 positions of a sequence: the
# layers with chunks compute as much as in STAGE=main, and every stage fits with the same recompute.
# --train-samples counts all samples of the run, including earlier stages.
case $STAGE in
    main)
        # Below 8,191 positions temperature tuning changes nothing.
        FLAGS+=(--seq-length 8192 --global-batch-size 1024 --train-samples 1228800000 --no-attention-temperature-tuning)
        ;;
    mid)
        FLAGS+=(
            --seq-length 32768 --context-parallel-size 4 --cp-comm-type a2a --global-batch-size 256
            --train-samples 1231872000 --no-attention-temperature-tuning
        )
        ;;
    long)
        # Meta tunes the temperature of the layers without RoPE for long contexts; the preset has it on.
        FLAGS+=(
            --seq-length 131072 --context-parallel-size 16 --cp-comm-type a2a+p2p
            --hierarchical-context-parallel-sizes 4 4 --global-batch-size 64 --train-samples 1232256000
            --attention-temperature-tuning
        )
        ;;
    *)
        echo "STAGE=$STAGE is none of main, mid and long." >&2
        exit 1
        ;;
esac
FLAGS+=(--new-data-stage "$STAGE")
launch "$@"
