"""Every refusal is reached, names flags that exist, and says what to do; good combinations pass."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType

import pytest

import megatron
from megatron.config.command_line import parse_command_line
from megatron.config.flag_names import flag_names
from megatron.config.megatron_flags import NO_EFFECT, NOT_SUPPORTED
from megatron.config.model import preset
from megatron.errors import ConfigError
from megatron.schedules.registry import SCHEDULES
from tests.config import expert_flags
from tests.messages import assert_helpful, assert_names

GOOD = "--model tiny --mock-data --vocab-size 1000 --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
CORPUS = GOOD.replace("--mock-data", "--tokenizer-type NullTokenizer")
SAMPLES = GOOD.replace("--train-iters 10", "--train-samples 1000")
STAGES = f"{GOOD} --num-layers 8 --pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full"
UNIFORM = f"{FULL} --recompute-method uniform --recompute-num-layers"
UNSIZED = GOOD.replace("--model tiny ", "")
UNKNOWN = f"{UNSIZED} --load run --use-checkpoint-args"
MUON = f"{GOOD} --optimizer muon"
YARN = (
    f"{GOOD} --position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64"
)
SAVES = "--save run --save-interval 10"
ENGINE = f"{GOOD} --transformer-impl transformer_engine"
OVERLAP = f"{ENGINE} --tp-comm-overlap --sequence-parallel"

Row = tuple[str, int, str]
"""Arguments, number of processes, and the flags, values and figures that the message must name, comma-separated."""

AT_LEAST_ONE = [
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--num-query-groups",
    "--kv-channels",
    "--max-position-embeddings",
    "--rope-scaling-original-length",
    "--yarn-rotary-scaling-factor",
    "--yarn-original-max-position-embeddings",
    "--make-vocab-size-divisible-by",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--moe-ffn-hidden-size",
    "--moe-router-topk",
    "--moe-router-num-groups",
    "--moe-router-group-topk",
    "--moe-shared-expert-intermediate-size",
    "--num-distributed-optimizer-instances",
    "--ddp-bucket-size",
    "--num-dataset-builder-threads",
    "--ddp-num-buckets",
    "--recompute-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--micro-batch-size",
    "--global-batch-size",
    "--train-iters",
    "--train-samples",
    "--exit-interval",
    "--eval-interval",
    "--save-retain-last",
    "--save-retain-interval",
    "--async-save-timeout",
    "--log-interval",
    "--tensorboard-log-interval",
    "--profile-pipeline-iteration",
    "--eval-global-batch-size",
    "--num-gpus",
    "--loss-scale-window",
    "--hysteresis",
    "--seq-length",
    "--vocab-size",
    "--fp8-amax-history-len",
    "--muon-num-ns-steps",
    "--lr-decay-iters",
    "--lr-decay-samples",
    "--lr-wsd-decay-iters",
    "--lr-wsd-decay-samples",
]
NOT_NEGATIVE = [
    "--weight-decay",
    "--start-weight-decay",
    "--end-weight-decay",
    "--decoupled-lr",
    "--decoupled-min-lr",
    "--profile-step-start",
    "--clip-grad",
    "--adam-eps",
    "--num-workers",
    "--dataloader-timeout",
    "--max-failed-saves",
    "--mid-level-dataset-surplus",
    "--eval-iters",
    "--lr",
    "--lr-warmup-init",
    "--lr-warmup-iters",
    "--lr-warmup-samples",
    "--num-experts",
    "--moe-aux-loss-coeff",
    "--moe-z-loss-coeff",
    "--norm-epsilon",
    "--init-method-std",
    "--seed",
    "--manual-gc-interval",
    "--tiktoken-num-special-tokens",
    "--cpu-offloading-num-layers",
    "--fp8-margin",
    "--dry-run-rank",
    "--num-layers-at-start-in-bf16",
    "--num-layers-at-end-in-bf16",
]
POSITIVE = [
    "--rotary-base",
    "--rope-scaling-factor",
    "--yarn-beta-fast",
    "--yarn-beta-slow",
    "--yarn-mscale",
    "--yarn-mscale-all-dim",
    "--yarn-attention-factor",
    "--rope-scaling-low-freq-factor",
    "--rope-scaling-high-freq-factor",
    "--moe-router-topk-scaling-factor",
    "--dry-run-expert-load",
    "--moe-router-bias-update-rate",
    "--peak-tflops",
    "--gpu-memory-gb",
    "--exit-duration-in-mins",
    "--z-loss-multiplier",
    "--distributed-timeout-minutes",
    "--muon-extra-scale-factor",
    "--loss-scale",
    "--initial-loss-scale",
    "--min-loss-scale",
]
BELOW_ONE = ["--ema-decay", "--adam-beta1", "--adam-beta2", "--sgd-momentum", "--muon-momentum", "--lr-warmup-fraction"]

FP8 = f"{GOOD} --bf16 --fp8-format hybrid"

BAD: list[Row] = [
    (f"{GOOD} --straggler-threshold 1.0", 1, "use a number above 1, or 0"),
    *((f"{GOOD} {flag} 0", 1, f"{flag} 0, 1") for flag in AT_LEAST_ONE),
    *((f"{GOOD} {flag} -1", 1, f"{flag} -1") for flag in NOT_NEGATIVE),
    *((f"{GOOD} {flag} 0", 1, f"{flag} 0.0") for flag in POSITIVE),
    *((f"{GOOD} {flag} nan", 1, f"{flag} nan") for flag in ("--weight-decay", "--clip-grad", "--lr", "--rotary-base")),
    *((f"{GOOD} {flag} 1.0", 1, f"{flag} 1.0, 0, 1") for flag in BELOW_ONE),
    *((f"{GOOD} {flag} -0.1", 1, f"{flag} -0.1, 0, 1") for flag in BELOW_ONE),
    (f"{GOOD} --eval-ema", 1, "--eval-ema, --ema-decay"),
    (f"{GOOD} --eval-ema --skip-train", 1, "--eval-ema, --skip-train, --load"),
    (f"{GOOD} --memory-snapshot-path a", 1, "--memory-snapshot-path, --record-memory-history"),
    # The command line itself.
    (f"{GOOD} --lr fast", 1, "--lr, 'fast', 3e-4"),
    (f"{GOOD} --model huge", 1, "--model 'huge', llama3-8b"),
    (f"{GOOD} --sequence-length 3", 1, "--sequence-length, --seq-length"),
    # The loader.
    (f"{GOOD} --num-workers 0 --dataloader-timeout 30", 1, "--dataloader-timeout 30, --num-workers 1"),
    (
        f"{GOOD} --dataloader-timeout 120 --distributed-timeout-minutes 2",
        2,
        "--dataloader-timeout 120, --distributed-timeout-minutes 2",
    ),
    # The dry run.
    (f"{GOOD} --num-gpus 8", 1, "--num-gpus, --dry-run"),
    (f"{GOOD} --gpu-memory-gb 40", 1, "--gpu-memory-gb, --dry-run"),
    (f"{GOOD} --dry-run-whole", 1, "--dry-run-whole, --dry-run"),
    (f"{GOOD} --gpus-per-node 4", 1, "--gpus-per-node, --dry-run"),
    (f"{GOOD} --plan-cluster h200", 1, "--plan-cluster, --plan"),
    (f"{GOOD} --plan-json plan.json", 1, "--plan-json, --plan"),
    (f"{GOOD} --plan-html plan.html", 1, "--plan-html, --plan"),
    (f"{GOOD} --plan-tokens 1e9", 1, "--plan-tokens, --plan"),
    (f"{GOOD} --plan-price-per-gpu-hour 2", 1, "--plan-price-per-gpu-hour, --plan"),
    (f"{GOOD} --plan-measured run.jsonl", 1, "--plan-measured, --plan"),
    (f"{GOOD} --plan --plan-tokens 0", 1, "--plan-tokens 0.0"),
    (f"{GOOD} --plan --plan-price-per-gpu-hour -1", 1, "--plan-price-per-gpu-hour -1.0"),
    (f"{GOOD} --dry-run --num-gpus 8 --gpus-per-node 0", 8, "--gpus-per-node 0"),
    (f"{GOOD} --dry-run", 1, "--dry-run, --num-gpus"),
    (f"{GOOD} --dry-run --num-gpus 8 --dry-run-rank 8", 8, "--dry-run-rank 8, 8"),
    (f"{UNKNOWN} --dry-run --num-gpus 8", 8, "--use-checkpoint-args, --dry-run"),
    (f"{GOOD} --load run --skip-train --dry-run --num-gpus 8", 8, "--skip-train, --dry-run"),
    (f"{GOOD} --cpu-offloading-num-layers 1 --dry-run --num-gpus 8", 8, "--cpu-offloading-num-layers, --dry-run"),
    # What is kept for the backward pass.
    (
        f"{GOOD} --recompute-activations --recompute-granularity full",
        1,
        "--recompute-activations, --recompute-granularity selective",
    ),
    (f"{GOOD} {FULL} --recompute-num-layers 1", 1, "--recompute-granularity full, --recompute-method"),
    (f"{GOOD} {FULL} --recompute-method block", 1, "--recompute-granularity full, --recompute-num-layers"),
    (f"{GOOD} --recompute-modules mlp", 1, "--recompute-modules, --recompute-granularity selective"),
    (f"{GOOD} {UNIFORM} 1 --recompute-modules mlp", 1, "--recompute-modules, --recompute-granularity selective"),
    (f"{GOOD} --recompute-activations --recompute-modules", 1, "--recompute-modules"),
    (f"{GOOD} --recompute-method block", 1, "--recompute-method, --recompute-granularity full"),
    (
        f"{GOOD} --recompute-activations --recompute-num-layers 1",
        1,
        "--recompute-num-layers, --recompute-granularity full",
    ),
    (f"{GOOD} --distribute-saved-activations", 1, "--distribute-saved-activations, --recompute-granularity full"),
    (f"{GOOD} --recompute-activations --recompute-modules mlp mlp_act", 1, "--recompute-modules mlp, mlp_act"),
    (
        f"{GOOD} --recompute-activations --recompute-modules attention",
        1,
        "--recompute-modules 'attention', core_attn",
    ),
    (f"{GOOD} {UNIFORM} 5", 1, "--recompute-num-layers 5, 4"),
    (f"{STAGES} --cpu-offloading-num-layers 5", 2, "--cpu-offloading-num-layers 5, 4"),
    (
        f"{GOOD} {UNIFORM} 1 --distribute-saved-activations",
        1,
        "--distribute-saved-activations, --tensor-model-parallel-size",
    ),
    (
        f"{GOOD} {UNIFORM} 1 --distribute-saved-activations --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--distribute-saved-activations, --sequence-parallel",
    ),
    (
        f"{GOOD} {UNIFORM} 1 --distribute-saved-activations --tensor-model-parallel-size 2 --hidden-size 129 "
        "--kv-channels 16",
        2,
        "--distribute-saved-activations, --hidden-size 129, --tensor-model-parallel-size 2",
    ),
    # Kernels.
    (f"{GOOD} --cuda-graph-impl local", 1, "--cuda-graph-impl 'local', none"),
    (f"{GOOD} --kernel norm=eager", 1, "--kernel norm=eager, rms_norm"),
    (f"{GOOD} --kernel rope=apex", 1, "--kernel rope=apex, eager, compiled"),
    (f"{GOOD} --kernel rope", 1, "--kernel rope, eager, compiled"),
    (f"{GOOD} --kernel rope=compiled --no-rope-fusion", 1, "--no-rope-fusion, --kernel rope=compiled"),
    (f"{GOOD} --kernel adam=te adam=apex", 1, "--kernel adam=te, --kernel adam=apex"),
    (
        f"{GOOD} --kernel attention=sdpa --attention-backend flash",
        1,
        "--kernel attention=sdpa, --attention-backend flash",
    ),
    (f"{GOOD} --kernel adam=apex --optimizer sgd", 1, "--kernel adam=apex, --optimizer sgd"),
    (
        f"{GOOD} --kernel adam=te --use-precision-aware-optimizer",
        1,
        "--kernel adam=te, --use-precision-aware-optimizer",
    ),
    (f"{GOOD} --bf16 --kernel adam=te --grad-reduce-in-bf16", 1, "--kernel adam=te, --grad-reduce-in-bf16"),
    (f"{ENGINE} --kernel weight_gradient=apex", 1, "--kernel weight_gradient=apex, --transformer-impl"),
    (f"{GOOD} --bf16 --kernel fp8_quantization=eager", 1, "--kernel fp8_quantization=eager, --fp8-format"),
    (f"{GOOD} --bf16 --kernel fp8_weight_gradient=triton", 1, "--kernel fp8_weight_gradient=triton, --fp8-format"),
    (
        f"{ENGINE} --bf16 --fp8-format hybrid --kernel fp8_quantization=triton",
        1,
        "--kernel fp8_quantization=triton, --transformer-impl transformer_engine, --transformer-impl local",
    ),
    # What is not a Llama.
    (f"{GOOD} --no-swiglu", 1, "--no-swiglu"),
    (f"{GOOD} --no-disable-bias-linear", 1, "--no-disable-bias-linear"),
    (f"{GOOD} --hidden-dropout 0.1", 1, "--hidden-dropout 0.1"),
    (f"{GOOD} --attention-dropout 0.1", 1, "--attention-dropout 0.1"),
    (
        f"{GOOD} --rope-scaling-low-freq-factor 5",
        1,
        "--rope-scaling-low-freq-factor 5, --rope-scaling-high-freq-factor 4",
    ),
    (f"{GOOD} --yarn-beta-fast 9", 1, "--yarn-beta-fast, --position-embedding-type yarn"),
    (
        f"{GOOD} --position-embedding-type yarn --yarn-rotary-scaling-factor 4",
        1,
        "--position-embedding-type yarn, --yarn-original-max-position-embeddings",
    ),
    (f"{YARN} --use-rope-scaling", 1, "--use-rope-scaling, --position-embedding-type yarn, --no-use-rope-scaling"),
    (f"{YARN} --yarn-mscale 0.7", 1, "--yarn-mscale, --yarn-mscale-all-dim"),
    (
        f"{YARN} --yarn-mscale 0.7 --yarn-mscale-all-dim 1 --yarn-attention-factor 1.1",
        1,
        "--yarn-attention-factor, --yarn-mscale",
    ),
    (f"{YARN} --yarn-beta-fast 0.5", 1, "--yarn-beta-fast 0.5, --yarn-beta-slow 1"),
    (f"{YARN} --rotary-base 1", 1, "--rotary-base 1, --position-embedding-type yarn"),
    (
        f"{YARN} --yarn-original-max-position-embeddings 6",
        1,
        "--yarn-beta-slow 1, --yarn-original-max-position-embeddings 6",
    ),
    (f"{GOOD} --rotary-percent 0.5", 1, "--rotary-percent 0.5"),
    (f"{GOOD} --no-cross-entropy-loss-fusion", 1, "--no-cross-entropy-loss-fusion"),
    (f"{GOOD} --no-use-flash-attn", 1, "--no-use-flash-attn, --attention-backend local"),
    (f"{GOOD} --no-use-mcore-models", 1, "--no-use-mcore-models"),
    (f"{ENGINE} --fp64", 1, "--fp64, --transformer-impl transformer_engine, --transformer-impl local"),
    *(
        (
            f"{STAGES} --transformer-impl transformer_engine --pipeline-schedule {name}",
            2,
            f"--pipeline-schedule {name}, --transformer-impl transformer_engine, 1f1b",
        )
        for name in ("zb-h1", "zb-v")
    ),
    (f"{ENGINE} --cpu-offloading-num-layers 1", 1, "--cpu-offloading-num-layers, --transformer-impl local"),
    (
        f"{ENGINE} --recompute-granularity selective --recompute-modules layernorm mlp",
        1,
        "--recompute-modules layernorm, --transformer-impl transformer_engine",
    ),
    (
        f"{ENGINE} --bf16 --fp8-format hybrid --recompute-activations",
        1,
        "--recompute-granularity selective, --fp8-recipe delayed",
    ),
    (
        f"{ENGINE} --bf16 --fp8-format hybrid --use-torch-fsdp2",
        1,
        "--fp8-format, --data-parallel-sharding-strategy optim_grads_params, optim_grads",
    ),
    # Sizes of the architecture.
    (f"{GOOD} --kv-channels 3", 1, "3, --kv-channels"),
    (f"{GOOD} --hidden-size 40", 1, "5, --kv-channels, --hidden-size"),
    (f"{UNSIZED} --hidden-size 8 --num-attention-heads 2", 1, "--num-layers, --model llama3-8b"),
    (f"{UNSIZED} --num-layers 8 --num-attention-heads 2", 1, "--hidden-size, --model llama3-8b"),
    (f"{UNSIZED} --num-layers 8 --hidden-size 8", 1, "--num-attention-heads, --model llama3-8b"),
    (f"{GOOD} --hidden-size 130", 1, "--hidden-size 130, --num-attention-heads 8, --kv-channels"),
    (f"{GOOD} --num-query-groups 3", 1, "--num-attention-heads 8, --num-query-groups 3"),
    (f"{GOOD} --no-group-query-attention", 1, "--no-group-query-attention, --num-query-groups 4"),
    (f"{GOOD} --max-position-embeddings 32", 1, "--max-position-embeddings 32, --seq-length 64"),
    # The parallel layout.
    (f"{GOOD} --context-parallel-size 2", 3, "3, --context-parallel-size 2"),
    (f"{GOOD} --context-parallel-size 3", 3, "--seq-length 64, 6, --context-parallel-size 3"),
    (
        f"{GOOD.replace('64', '36')} --context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel",
        8,
        "--seq-length 36, 8, --context-parallel-size 2, --sequence-parallel",
    ),
    (
        f"{GOOD} --context-parallel-size 8 --cp-comm-type a2a",
        8,
        "--cp-comm-type a2a, 4, --context-parallel-size 8, p2p",
    ),
    (f"{GOOD} --num-layers 4 --context-parallel-size 2 --cp-comm-type p2p a2a", 2, "--cp-comm-type p2p a2a, 2, 4"),
    (
        f"{GOOD} --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        4,
        "--hierarchical-context-parallel-sizes 2 2, --cp-comm-type a2a+p2p",
    ),
    (
        f"{GOOD} --context-parallel-size 4 --cp-comm-type a2a+p2p",
        4,
        "--cp-comm-type a2a+p2p, --hierarchical-context-parallel-sizes, 2, --context-parallel-size 4",
    ),
    *(
        (
            f"{GOOD} --context-parallel-size {size} --cp-comm-type a2a+p2p "
            f"--hierarchical-context-parallel-sizes {sizes}",
            size,
            f"--hierarchical-context-parallel-sizes {sizes}, --context-parallel-size {size}, a2a+p2p",
        )
        for size, sizes in ((4, "2 4"), (4, "4 1"), (4, "4"), (8, "2 2 2"), (1, "2 2"))
    ),
    (
        f"{GOOD} --context-parallel-size 16 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 2",
        16,
        "--cp-comm-type a2a+p2p, 4, --hierarchical-context-parallel-sizes 8 2, p2p",
    ),
    (f"{GOOD} --tensor-model-parallel-size 2", 3, "3, --tensor-model-parallel-size 2"),
    (
        f"{GOOD} --use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
        1,
        "--use-distributed-optimizer, --data-parallel-sharding-strategy no_shard",
    ),
    (
        f"{GOOD} --use-torch-fsdp2 --data-parallel-sharding-strategy optim",
        1,
        "--use-torch-fsdp2, --data-parallel-sharding-strategy optim",
    ),
    (f"{GOOD} --use-torch-fsdp2 --use-distributed-optimizer", 1, "--use-torch-fsdp2, --use-distributed-optimizer"),
    *(
        (f"{GOOD} {strategy} {flag}", 1, f"{flag}, --use-torch-fsdp2")
        for flag in ("--no-torch-fsdp2-reshard-after-forward", "--defer-grad-reduce")
        for strategy in ("", "--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads")
    ),
    (f"{GOOD} --use-torch-fsdp2 --ddp-bucket-size 9", 1, "--ddp-bucket-size 9, optim_grads_params"),
    *(
        (
            f"{STAGES} --use-torch-fsdp2 --no-untie-embeddings-and-output-weights --pipeline-schedule {schedule}",
            4,
            f"--pipeline-schedule {schedule}, optim_grads_params, --untie-embeddings-and-output-weights",
        )
        for schedule in ("zb-v", "dualpipe-v")
    ),
    *(
        (f"{GOOD} --rank-order {order}", 1, f"--rank-order {order}")
        for order in ("tp-cp-ep-pp", "tp-cp-ep-pp-dp-dp", "tp-cp-ep-pp-xp", "tp,cp,ep,pp,dp")
    ),
    (
        f"{GOOD} --num-attention-heads 6 --hidden-size 96 --num-query-groups 2 --tensor-model-parallel-size 4",
        4,
        "--num-attention-heads 6, --tensor-model-parallel-size 4, 6",
    ),
    (f"{GOOD} --tensor-model-parallel-size 8", 8, "--num-query-groups 4, --tensor-model-parallel-size 8"),
    (
        f"{GOOD} --ffn-hidden-size 99 --tensor-model-parallel-size 2",
        2,
        "--ffn-hidden-size 99, --tensor-model-parallel-size 2, 99",
    ),
    (
        f"{GOOD} --seq-length 63 --sequence-parallel --tensor-model-parallel-size 2",
        2,
        "--sequence-parallel, --seq-length 63, --tensor-model-parallel-size 2",
    ),
    (
        f"{GOOD} --tp-comm-overlap --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap, --tensor-model-parallel-size 2, --sequence-parallel",
    ),
    (
        f"{ENGINE} --bf16 --tp-comm-overlap --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap, --tensor-model-parallel-size 2, --sequence-parallel",
    ),
    (
        f"{OVERLAP} --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap, --transformer-impl transformer_engine, --bf16",
    ),
    (
        f"{OVERLAP} --bf16 --num-attention-heads 16 --num-query-groups 16 --tensor-model-parallel-size 16",
        16,
        "--tp-comm-overlap, 2, 4, 8, --tensor-model-parallel-size 16",
    ),
    (
        f"{OVERLAP} --bf16 --tensor-model-parallel-size 2 --rank-order pp-tp-cp-ep-dp",
        2,
        "--tp-comm-overlap, --rank-order pp-tp-cp-ep-dp",
    ),
    (
        f"{OVERLAP} --bf16 --fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap, --fp8-recipe blockwise",
    ),
    (
        f"{OVERLAP} --bf16 --hidden-size 144 --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap, 32, --hidden-size, 144",
    ),
    (
        f"{OVERLAP} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap, 128, --micro-batch-size, 64",
    ),
    (
        f"{GOOD} --num-distributed-optimizer-instances 2",
        2,
        "--num-distributed-optimizer-instances 2, --use-distributed-optimizer",
    ),
    (
        f"{GOOD} --use-distributed-optimizer --num-distributed-optimizer-instances 4",
        6,
        "--num-distributed-optimizer-instances 4, 6",
    ),
    # The pipeline: flags that need one, and flags that exclude each other.
    *(
        (f"{GOOD} {flag}", 1, f"{flag.split()[0]}, --pipeline-model-parallel-size, 2")
        for flag in (
            "--num-layers-per-virtual-pipeline-stage 1",
            "--num-virtual-stages-per-pipeline-rank 2",
            "--microbatch-group-size-per-virtual-pipeline-stage 2 --pipeline-schedule interleaved",
            "--decoder-first-pipeline-num-layers 2",
            "--decoder-last-pipeline-num-layers 2",
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
            "--pipeline-model-parallel-layout EttttL",
        )
    ),
    *(
        (
            f"{STAGES} --pipeline-model-parallel-layout Ettt|tttttL {flag}",
            2,
            f"--pipeline-model-parallel-layout, {flag.split()[0]}",
        )
        for flag in (
            "--num-layers-per-virtual-pipeline-stage 4",
            "--num-virtual-stages-per-pipeline-rank 1",
            "--decoder-first-pipeline-num-layers 3",
            "--decoder-last-pipeline-num-layers 5",
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        )
    ),
    *(
        (f"{STAGES} --{end} 3 --{account}", 2, f"--{end}, --{account}")
        for end in ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
        for account in ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    ),
    (
        f"{STAGES} --decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 2",
        2,
        "--decoder-first-pipeline-num-layers, --num-layers-per-virtual-pipeline-stage, "
        "--num-virtual-stages-per-pipeline-rank",
    ),
    *(
        (
            f"{STAGES} --decoder-{end}-pipeline-num-layers 2 --pipeline-schedule {schedule}",
            2,
            f"--decoder-{end}-pipeline-num-layers, --pipeline-schedule {schedule}, "
            "--account-for-embedding-in-pipeline-split, --pipeline-model-parallel-layout",
        )
        for end in ("first", "last")
        for schedule in ("zb-v", "dualpipe-v")
    ),
    # The pipeline: schedules and chunks.
    (
        f"{STAGES} --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 4",
        2,
        "--num-layers-per-virtual-pipeline-stage 2, 2, --num-virtual-stages-per-pipeline-rank, 4",
    ),
    (
        f"{STAGES} --pipeline-schedule interleaved",
        2,
        "--pipeline-schedule interleaved, 1, --num-virtual-stages-per-pipeline-rank 2",
    ),
    (
        f"{STAGES} --pipeline-schedule interleaved --pipeline-model-parallel-layout Etttt|ttttL",
        2,
        "--pipeline-schedule interleaved, 1, --pipeline-model-parallel-layout",
    ),
    *(
        (
            f"{STAGES} --pipeline-schedule {schedule} {flag}",
            2,
            f"--pipeline-schedule {schedule}, 2, {flag.split()[0]}, --pipeline-schedule interleaved",
        )
        for schedule in ("gpipe", "1f1b", "zb-h1")
        for flag in (
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-layers-per-virtual-pipeline-stage 2",
            "--pipeline-model-parallel-layout Et|tttt|tt|tL",
        )
    ),
    *(
        (
            f"{STAGES} --pipeline-schedule {schedule} --num-virtual-stages-per-pipeline-rank {chunks}",
            2,
            f"--pipeline-schedule {schedule}, {chunks}, --num-virtual-stages-per-pipeline-rank",
        )
        for schedule in ("zb-v", "dualpipe-v")
        for chunks in (1, 4)
    ),
    *(
        (
            f"{STAGES} --microbatch-group-size-per-virtual-pipeline-stage 4 {schedule}",
            2,
            "--microbatch-group-size-per-virtual-pipeline-stage 4, interleaved, --num-virtual-stages-per-pipeline-rank",
        )
        for schedule in ("", "--pipeline-schedule zb-v")
    ),
    (
        f"{GOOD} --num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3",
        4,
        "--microbatch-group-size-per-virtual-pipeline-stage 3, --pipeline-model-parallel-size 4, 4",
    ),
    # The pipeline: splits that do not come out even.
    (f"{GOOD} --pipeline-model-parallel-size 8", 8, "8, --num-layers 4, --pipeline-model-parallel-size"),
    (
        f"{STAGES} --num-virtual-stages-per-pipeline-rank 6 --account-for-loss-in-pipeline-split",
        2,
        "12, 2, 6, --num-layers 8, 9",
    ),
    (
        f"{GOOD} --model llama3.1-405b --pipeline-model-parallel-size 16",
        16,
        "--num-layers 126, 16, --account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split, "
        "128, --pipeline-model-parallel-size, --decoder-first-pipeline-num-layers, --pipeline-model-parallel-layout",
    ),
    (
        f"{GOOD} --num-layers 10 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split",
        4,
        "--num-layers 10, 11, --account-for-loss-in-pipeline-split, 12",
    ),
    (
        f"{GOOD} --num-layers 9 --pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 2",
        3,
        "--num-layers 9, --num-layers-per-virtual-pipeline-stage 2, 3, --pipeline-model-parallel-size, "
        "--pipeline-model-parallel-layout",
    ),
    (
        f"{STAGES} --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
        2,
        "--decoder-first-pipeline-num-layers 3, --decoder-last-pipeline-num-layers 4, --num-layers 8",
    ),
    *(
        (
            f"{GOOD} --num-layers 8 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers {first}",
            4,
            f"--decoder-first-pipeline-num-layers {first}, {rest}, --num-layers 8, 3",
        )
        for first, rest in ((3, 5), (8, 0), (9, 0))
    ),
    *(
        (
            f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 --decoder-{end}-pipeline-num-layers 3",
            2,
            f"--decoder-{end}-pipeline-num-layers 3, {count}, 0, --num-virtual-stages-per-pipeline-rank 2, 2",
        )
        for end, count in (("first", 3), ("last", 5))
    ),
    # The pipeline: layout strings.
    *(
        (
            f"{STAGES} --pipeline-model-parallel-layout {layout}",
            2,
            f"--pipeline-model-parallel-layout {layout!r}, {problem}",
        )
        for layout, problem in (
            ("tttt|ttttL", "E"),
            ("|Etttt|ttttL|", "E"),
            ("Etttt|Ettttt", "E"),
            ("Etttt|tttt", "L"),
            ("EttttL|ttttL", "L"),
            ("EtEttt|ttttL", "E"),
            ("Etttt|ttttL|", "L"),
            ("Etttt|tttL", "7, --num-layers, 8"),
            (
                "Ettt|ttt|ttL",
                "3, --pipeline-model-parallel-size 2",
            ),
            ("Etttt|ttttmL", "m"),
            ("Etttt|xtttL", "'x'"),
            ("Etttt|tttt*L", "'*'"),
            ("*3Etttt|tttL", "'*3'"),
            ("Etttt|(tt)2L", "'2'"),
            ("Etttt|tt)*2L", "')'"),
            ("Etttt|((tt)*2L", "')'"),
            ("Et*999999|L", "100000"),
            ("E(((t*999)*999)*999)*999|L", "100000"),
            ("Et*4|(t*4L", "')'"),
            ("EtttttttttL", "9, --num-layers, 8"),
            ("Et*8L||", "L"),
            ("Et*8L", "1, --pipeline-model-parallel-size 2"),
        )
    ),
    (
        f"{GOOD} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et||t|t|||t|L",
        4,
        "--pipeline-model-parallel-layout 'Et||t|t|||t|L', 1, 2, 6, 8, --pipeline-model-parallel-size",
    ),
    (
        f"{GOOD} --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|t|||t|L "
        "--pipeline-schedule zb-v",
        3,
        "--pipeline-model-parallel-layout 'Ett|t|||t|L', 2, 3, 4, 6",
    ),
    # The training loop.
    (f"{GOOD} --train-samples 10", 1, "--train-iters, --train-samples"),
    (f"{GOOD} --no-calculate-per-token-loss", 1, "--no-calculate-per-token-loss"),
    (f"{GOOD} --manual-gc-interval 10", 1, "--manual-gc-interval, --manual-gc"),
    # The learning rate.
    (f"{GOOD} --min-lr 2e-3", 1, "--min-lr 0.002, --lr 0.001"),
    (f"{GOOD} --min-lr -1", 1, "--min-lr -1.0, 0, --lr 0.001"),
    (f"{GOOD} --lr-warmup-fraction 0.1 --lr-warmup-iters 1", 1, "--lr-warmup-fraction, --lr-warmup-iters"),
    (f"{SAMPLES} --lr-warmup-fraction 0.1 --lr-warmup-samples 1", 1, "--lr-warmup-fraction, --lr-warmup-samples"),
    (f"{GOOD} --lr-wsd-decay-iters 3", 1, "--lr-wsd-decay-iters, --lr-decay-style WSD"),
    (f"{GOOD} --lr-decay-style WSD", 1, "--lr-decay-style WSD, --lr-wsd-decay-iters"),
    (
        f"{GOOD} --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        1,
        "--override-opt-param-scheduler, --use-checkpoint-opt-param-scheduler",
    ),
    *(
        (
            f"{SAMPLES} {style} --lr-{part}-iters 1",
            1,
            f"--lr-{part}-iters, --train-samples, --lr-{part}-samples",
        )
        for part, style in (("decay", ""), ("warmup", ""), ("wsd-decay", "--lr-decay-style WSD"))
    ),
    *(
        (f"{GOOD} {style} --lr-{part}-samples 1", 1, f"--lr-{part}-samples, --train-iters, --lr-{part}-iters")
        for part, style in (("decay", ""), ("warmup", ""), ("wsd-decay", "--lr-decay-style WSD"))
    ),
    # Precision.
    (f"{GOOD} --bf16 --fp64", 1, "--bf16, --fp64"),
    (f"{GOOD} --bf16 --fp16", 1, "--bf16, --fp16"),
    (f"{GOOD} --fp16 --fp64", 1, "--fp16, --fp64"),
    *(
        (f"{GOOD} --bf16 {flag} 8", 1, f"{flag}, --fp16")
        for flag in ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis")
    ),
    (f"{GOOD} --fp16 --loss-scale 8 --hysteresis 3", 1, "--hysteresis, --loss-scale 8.0"),
    (f"{GOOD} --fp16 --initial-loss-scale 8 --min-loss-scale 16", 1, "--min-loss-scale 16.0, --initial-loss-scale 8.0"),
    (f"{GOOD} --fp64 --grad-reduce-in-bf16", 1, "--fp64, --grad-reduce-in-bf16"),
    (f"{GOOD} --fp64 --use-precision-aware-optimizer", 1, "--fp64, --use-precision-aware-optimizer"),
    (f"{GOOD} --optimizer sgd --use-precision-aware-optimizer", 1, "--use-precision-aware-optimizer, --optimizer sgd"),
    *(
        (f"{GOOD} {flag} bf16", 1, f"{flag}, --use-precision-aware-optimizer")
        for flag in ("--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
    ),
    *(
        (
            f"{GOOD} --use-precision-aware-optimizer {flag} bf16 {beta} 0.999",
            1,
            f"{flag} bf16, {beta} 0.999, 0.992, fp32",
        )
        for flag, beta in (("--exp-avg-dtype", "--adam-beta1"), ("--exp-avg-sq-dtype", "--adam-beta2"))
    ),
    # Muon.
    (f"{MUON} --use-precision-aware-optimizer", 1, "--use-precision-aware-optimizer, --optimizer muon"),
    (f"{GOOD} --muon-nesterov", 1, "--muon-nesterov, --optimizer muon"),
    (f"{GOOD} --optimizer sgd --muon-num-ns-steps 3", 1, "--muon-num-ns-steps, --optimizer muon"),
    (f"{GOOD} --no-accumulate-allreduce-grads-in-fp32", 1, "--no-accumulate-allreduce-grads-in-fp32"),
    # FP8.
    (f"{GOOD} --bf16 --fp8-param-gather", 1, "--fp8-param-gather, --fp8-format"),
    (f"{FP8} --fp8-param-gather", 1, "--fp8-param-gather, no_shard, --use-distributed-optimizer"),
    (
        f"{FP8} --fp8-param-gather --use-distributed-optimizer --freeze-parameters layers.0.*",
        1,
        "--fp8-param-gather, --freeze-parameters",
    ),
    (f"{FP8} --fp8-param-gather --use-torch-fsdp2", 1, "--fp8-param-gather, optim_grads_params, optim_grads"),
    (
        f"{FP8} --fp8-param-gather --use-distributed-optimizer --transformer-impl transformer_engine",
        1,
        "--fp8-param-gather, --transformer-impl transformer_engine",
    ),
    (f"{GOOD} --fp8-format e4m3", 1, "--fp8-format e4m3, --bf16"),
    (f"{GOOD} --fp16 --fp8-format e4m3", 1, "--fp8-format e4m3, --bf16, --fp16"),
    (f"{FP8} --fp64", 1, "--bf16, --fp64"),
    (
        f"{FP8} --fp8-recipe blockwise",
        1,
        "--fp8-recipe blockwise, Hopper, delayed, tensorwise, --transformer-impl transformer_engine",
    ),
    (
        f"{FP8} --fp8-recipe mxfp8",
        1,
        "--fp8-recipe mxfp8, Blackwell, delayed, tensorwise, --transformer-impl transformer_engine",
    ),
    *(
        (f"{GOOD} --bf16 {flag}", 1, f"{flag.split()[0]}, --fp8-format")
        for flag in ("--fp8-recipe tensorwise", "--fp8-margin 1", "--first-last-layers-bf16")
    ),
    *(
        (f"{FP8} --fp8-recipe tensorwise {flag}", 1, f"{flag.split()[0]}, --fp8-recipe delayed")
        for flag in ("--fp8-margin 1", "--fp8-amax-history-len 16", "--fp8-amax-compute-algo max")
    ),
    *(
        (f"{FP8} --num-layers-at-{end}-in-bf16 2", 1, f"--num-layers-at-{end}-in-bf16, --first-last-layers-bf16")
        for end in ("start", "end")
    ),
    *(
        (
            f"{FP8} --first-last-layers-bf16 --num-layers-at-{end}-in-bf16 3",
            1,
            "--first-last-layers-bf16, 4",
        )
        for end in ("start", "end")
    ),
    (f"{FP8} --hidden-size 136 --kv-channels 16", 1, "16, --hidden-size, 136"),
    (f"{FP8} --tensor-model-parallel-size 4 --ffn-hidden-size 416", 4, "--ffn-hidden-size, 104"),
    (f"{FP8} --tensor-model-parallel-size 4 --kv-channels 4", 4, "--num-attention-heads, --kv-channels, 8"),
    (f"{FP8} --tensor-model-parallel-size 2 --kv-channels 4 --num-query-groups 2", 2, "--num-query-groups, 24"),
    (f"{FP8} --micro-batch-size 1 --seq-length 72", 1, "--micro-batch-size, --seq-length, 72"),
    (f"{FP8} --context-parallel-size 4 --micro-batch-size 1 --seq-length 96", 4, "--context-parallel-size, 24"),
    # Data and tokenizer.
    (f"{GOOD} --data-path corpus", 1, "--mock-data, --data-path"),
    (f"{GOOD} --valid-data-path corpus", 1, "--mock-data, --valid-data-path"),
    (f"{CORPUS} --data-path a --data-args-path b", 1, "--data-path, --data-args-path"),
    (f"{CORPUS} --train-data-path a --per-split-data-args-path b", 1, "--per-split-data-args-path, --train-data-path"),
    (f"{CORPUS} --train-data-path a --valid-data-path b --split 9,1", 1, "--split '9,1'"),
    (f"{CORPUS} --valid-data-path b", 1, "--valid-data-path, --train-data-path"),
    (
        f"{GOOD} --sample-order best-fit",
        1,
        "--sample-order best-fit, --mock-data",
    ),
    (
        f"{GOOD} --sample-order extendable --dataloader-type cyclic",
        1,
        "--sample-order extendable, --dataloader-type cyclic",
    ),
    (f"{GOOD} --data-cache-path s3://bucket/cache", 1, "--data-cache-path s3://bucket/cache"),
    (f"{GOOD} --object-storage-cache-path s3://b/c", 1, "--object-storage-cache-path s3://b/c, --data-path"),
    (f"{GOOD} --new-data-stage a/b", 1, "--new-data-stage 'a/b', 64"),
    (f"{GOOD} --new-data-stage long --skip-train", 1, "--new-data-stage long, --skip-train"),
    (f"{GOOD} --full-validation", 1, "--full-validation, --mock-data"),
    (f"{GOOD} --validation-set-names a", 1, "--validation-set-names, --multiple-validation-sets"),
    (f"{CORPUS} --data-path c --multiple-validation-sets --validation-set-names a a", 1, "--validation-set-names"),
    (
        f"{GOOD} --create-attention-mask-in-dataloader",
        1,
        "--create-attention-mask-in-dataloader",
    ),
    (f"{GOOD} --trust-remote-code", 1, "--trust-remote-code, --tokenizer-model"),
    (
        GOOD.replace("--vocab-size 1000", "--tokenizer-type NullTokenizer"),
        1,
        "--tokenizer-type NullTokenizer, --vocab-size",
    ),
    (f"{GOOD} --tokenizer-type TikTokenizer", 1, "--tokenizer-type TikTokenizer, --tokenizer-model"),
    (f"{GOOD} --tokenizer-type GPT2BPETokenizer --merge-file m", 1, "--tokenizer-type GPT2BPETokenizer, --vocab-file"),
    (
        f"{GOOD} --tokenizer-type GPT2BPETokenizer --merge-file m --vocab-file v --tokenizer-model t",
        1,
        "--tokenizer-model t, --tokenizer-type GPT2BPETokenizer",
    ),
    (
        f"{GOOD} --tokenizer-type HuggingFaceTokenizer --tokenizer-model t --vocab-file v",
        1,
        "--vocab-file, --tokenizer-type HuggingFaceTokenizer",
    ),
    (GOOD.replace("--mock-data", ""), 1, "--data-path, --mock-data"),
    (GOOD.replace("--mock-data", "--data-path corpus"), 1, "--tokenizer-type, --data-path"),
    (GOOD.replace("--vocab-size 1000", ""), 1, "--mock-data, --vocab-size, --model"),
    # What training needs.
    (GOOD.replace("--seq-length 64", ""), 1, "--seq-length"),
    (GOOD.replace("--micro-batch-size 2", ""), 1, "--micro-batch-size"),
    (GOOD.replace("--lr 1e-3", ""), 1, "--lr"),
    (GOOD.replace("--train-iters 10", ""), 1, "--train-iters, --train-samples"),
    # Checkpoints and logging.
    *(
        (f"{GOOD} --{flag} 10", 1, f"--{flag}, --save")
        for flag in ("save-interval", "save-retain-last", "save-retain-interval", "redundant-save")
    ),
    (f"{GOOD} --async-save", 1, "--async-save, --save"),
    (f"{GOOD} --save run --redundant-save run", 1, "--redundant-save run, --save"),
    (f"{GOOD} --save run --redundant-save s3://b/c s3://b/c/", 1, "--redundant-save s3://b/c/"),
    (f"{GOOD} --save s3://b/run", 1, "--save s3://b/run, --redundant-save"),
    (f"{GOOD} --load s3:/b/run", 1, "--load s3:/b/run"),
    (f"{GOOD} --load ftp://me:secret@host/run", 1, "--load ftp://***@host/run"),
    *(
        (
            f"{GOOD} --save run --save-interval {wrong}",
            1,
            f"--save-interval {wrong}",
        )
        for wrong in ("0", "often", "5@1", "5@0,6@0", "5@0,6@9,7@8", "0@0", "5@0,", "@", "1.5")
    ),
    (f"{GOOD} --ckpt-step 10", 1, "--ckpt-step, --load"),
    (f"{GOOD} --finetune", 1, "--finetune, --load"),
    (f"{GOOD} --use-checkpoint-args", 1, "--use-checkpoint-args, --load"),
    (f"{UNKNOWN} --tensor-model-parallel-size 2", 3, "3, --tensor-model-parallel-size 2"),
    (f"{UNKNOWN} --hidden-size 0", 1, "--hidden-size 0, 1"),
    (f"{GOOD} --no-checkpoint-fallback", 1, "--no-checkpoint-fallback, --load"),
    (f"{GOOD} --start-weight-decay 0.1", 1, "--start-weight-decay, --weight-decay-incr-style"),
    (
        f"{GOOD} --weight-decay-incr-style linear --start-weight-decay 0",
        1,
        "--weight-decay-incr-style linear, --end-weight-decay",
    ),
    (f"{GOOD} --decoupled-min-lr 1e-4", 1, "--decoupled-min-lr, --decoupled-lr"),
    (f"{GOOD} --min-lr 1e-4 --decoupled-lr 1e-5", 1, "--decoupled-lr 1e-05, 0.0001"),
    (f"{GOOD} --no-te-rng-tracker", 1, "--no-te-rng-tracker"),
    (f"{GOOD} --no-use-cpu-initialization", 1, "--no-use-cpu-initialization"),
    (f"{GOOD} --no-attention-softmax-in-fp32", 1, "--no-attention-softmax-in-fp32"),
    (f"{GOOD} --ddp-bucket-size 9 --ddp-num-buckets 2", 1, "--ddp-bucket-size 9, --ddp-num-buckets 2"),
    (f"{GOOD} --use-torch-fsdp2 --ddp-num-buckets 2", 1, "--ddp-num-buckets 2"),
    (f"{GOOD} --position-embedding", 1, "--position-embedding"),
    (f"{GOOD} --no-use-rotary-position-embeddings", 1, "--no-use-rotary-position-embeddings"),
    (f"{GOOD} --iterations-to-skip 3 0", 1, "--iterations-to-skip 0, 1"),
    # Spikes, and numbers that are not finite.
    (f"{GOOD} --spike-window 9", 1, "--spike-window 9, 10"),
    (f"{GOOD} --spike-policy rollback --max-rollbacks 0 {SAVES}", 1, "--max-rollbacks 0, 1"),
    (f"{GOOD} --spike-policy rollback --rollback-margin -1 {SAVES}", 1, "--rollback-margin -1"),
    *(
        (f"{GOOD} --spike-policy skip {flag} 2", 1, f"{flag}, --spike-policy rollback, --nan-policy rollback")
        for flag in ("--max-rollbacks", "--rollback-margin")
    ),
    (f"{GOOD} --spike-policy rollback --save run", 1, "--spike-policy rollback, --save-interval"),
    (f"{GOOD} --nan-policy rollback", 1, "--nan-policy rollback, --save, --save-interval"),
    *(
        (f"{GOOD} --nan-policy rollback {SAVES} {flag}", 1, f"--nan-policy rollback, {flag}")
        for flag in ("--no-save-optim", "--no-save-rng")
    ),
    (
        f"{GOOD} --nan-policy skip --no-check-for-nan-in-loss-and-grad",
        1,
        "--nan-policy skip, --no-check-for-nan-in-loss-and-grad",
    ),
    (f"{GOOD} --no-dist-ckpt-optim-fully-reshardable", 1, "--no-dist-ckpt-optim-fully-reshardable"),
    (f"{GOOD} --no-verify-integrity", 1, "--no-verify-integrity"),
    (
        f"{GOOD} --use-tp-pp-dp-mapping --rank-order tp-cp-ep-dp-pp",
        1,
        "--use-tp-pp-dp-mapping, --rank-order tp-cp-ep-dp-pp",
    ),
    (f"{GOOD} --no-disable-gloo-process-groups", 1, "--no-disable-gloo-process-groups"),
    (f"{GOOD} --tokenizer-type TikTokenizer --tokenizer-model t --tiktoken-pattern v2", 1, "--tiktoken-pattern v2"),
    (f"{GOOD} --no-log-timers-to-tensorboard", 1, "--no-log-timers-to-tensorboard"),
    (f"{GOOD} --no-log-validation-ppl-to-tensorboard", 1, "--no-log-validation-ppl-to-tensorboard"),
    (f"{GOOD} --profile-step-start 5", 1, "--profile-step-start, --profile"),
    (f"{GOOD} --profile-ranks 0", 1, "--profile-ranks, --profile"),
    (f"{GOOD} --profile --profile-step-start 12", 1, "--profile-step-end 12, --profile-step-start 12"),
    (f"{GOOD} --profile --profile-ranks 0 2", 2, "--profile-ranks 2, 0, 1"),
    (f"{GOOD} --profile --use-pytorch-profiler", 1, "--use-pytorch-profiler, --tensorboard-dir, --save"),
    (f"{GOOD} --exit-on-missing-checkpoint", 1, "--exit-on-missing-checkpoint, --load"),
    (f"{GOOD} --load run --pretrained-checkpoint base --load-hf hf", 1, "--pretrained-checkpoint, --load-hf"),
    (f"{GOOD} --load-hf-text-only", 1, "--load-hf-text-only, --load-hf"),
    (
        f"{GOOD} --load run --pretrained-checkpoint base --exit-on-missing-checkpoint",
        1,
        "--pretrained-checkpoint, --exit-on-missing-checkpoint",
    ),
    (f"{GOOD} --overlap-param-gather", 1, "--overlap-param-gather, --use-distributed-optimizer"),
    (
        f"{GOOD} --profile-pipeline trace.json --profile-pipeline-iteration 11",
        1,
        "--profile-pipeline, 11, --train-iters 10",
    ),
    (f"{GOOD} --profile-pipeline trace.json --skip-train --eval-interval 5", 1, "--profile-pipeline, --skip-train"),
    (GOOD.replace("10", "4") + " --profile-pipeline trace.json", 1, "--profile-pipeline, 5, --train-iters 4"),
    (f"{GOOD} --eval-global-batch-size 3", 2, "--eval-global-batch-size 3, 2, 4"),
    (f"{GOOD} --wandb-entity team", 1, "--wandb-entity, --wandb-project"),
    (f"{GOOD} --wandb-save-dir there", 1, "--wandb-save-dir, --wandb-project"),
    (f"{GOOD} --wandb-exp-name run", 1, "--wandb-exp-name, --wandb-project"),
    (f"{GOOD} --attention-chunk-size 0", 1, "--attention-chunk-size 0"),
    (f"{GOOD} --attention-chunk-size 8 --no-rope-freq 1", 1, "--attention-chunk-size, --no-rope-freq 1"),
    (f"{GOOD} --qk-l2-norm --no-rope-freq 1", 1, "--qk-l2-norm, --no-rope-freq 1"),
    (f"{GOOD} --qk-l2-norm --qk-layernorm", 1, "--qk-l2-norm, --qk-layernorm"),
    (f"{GOOD} --mup-base-hidden-size 32", 1, "--mup-base-hidden-size, --use-mup"),
    (f"{GOOD} --use-mup --mup-base-hidden-size 32 --mup-output-mult 1", 1, "--mup-output-mult"),
    (f"{GOOD} --use-mup --no-rope-freq 2", 1, "--use-mup, --no-rope-freq"),
    (f"{GOOD} --use-mup --optimizer muon", 1, "--use-mup, --muon-scale-mode spectral, unit_rms_norm"),
    (f"{GOOD} --use-mup --optimizer sgd --qk-layernorm", 1, "--use-mup, --optimizer sgd, --qk-layernorm"),
    (f"{GOOD} --no-rope-freq [0]*3", 1, "--no-rope-freq [0]*3, 3, 4"),
    (f"{GOOD} --no-rope-freq -1", 1, "--no-rope-freq -1"),
    (f"{GOOD} --attention-temperature-tuning", 1, "--attention-temperature-tuning, --no-rope-freq"),
    (f"{GOOD} --attention-temperature-floor 4", 1, "--attention-temperature-floor, --attention-temperature-tuning"),
    (f"{GOOD} --attention-temperature-scale 1", 1, "--attention-temperature-scale, --attention-temperature-tuning"),
    (
        f"{GOOD} --no-rope-freq 2 --attention-temperature-tuning --attention-temperature-floor 0",
        1,
        "--attention-temperature-floor 0",
    ),
    (
        f"{GOOD} --no-rope-freq 2 --attention-temperature-tuning --attention-temperature-scale 0",
        1,
        "--attention-temperature-scale 0",
    ),
    (f"{GOOD} --use-rope-scaling --rope-scaling-low-freq-factor 0", 1, "--rope-scaling-low-freq-factor 0"),
    (f"{GOOD} --use-rope-scaling --rope-scaling-high-freq-factor 0", 1, "--rope-scaling-high-freq-factor 0"),
    (f"--config a --config b {GOOD}", 1, "--config"),
    (f"--config {GOOD}", 1, "--config"),
    # Words that are no flags and no values.
    (f"{GOOD} --explain-edit", 1, "--explain-edit, --explain-flags"),
    (f"{GOOD} '--lr 1e-3'", 1, "--lr 1e-3"),
    (f"{GOOD} --explain-run-script", 1, "--explain-run-script, --explain-flags"),
    (f"{GOOD} --tokenizer-type GPT2BPETokenizer --merge-file m", 1, "--tokenizer-type GPT2BPETokenizer, --vocab-file"),
    (
        f"{GOOD} --tokenizer-type GPT2BPETokenizer --merge-file m --vocab-file v --tokenizer-model t",
        1,
        "--tokenizer-model t, --tokenizer-type GPT2BPETokenizer",
    ),
    (
        f"{GOOD} --tokenizer-type HuggingFaceTokenizer --tokenizer-model t --vocab-file v",
        1,
        "--vocab-file, --tokenizer-type HuggingFaceTokenizer",
    ),
    ("--help nothing", 1, "--help nothing"),
    (f"stray {GOOD}", 1, "'stray'"),
    (f"{GOOD} --swiglu True", 1, "--swiglu True"),
    (f"{GOOD} --swiglu 2", 1, "'2'"),
    (f"{GOOD} --lr 1 2", 1, "'2'"),
    (f"{GOOD} --rampup-batch-size 1 2", 1, "--rampup-batch-size, 3, 2"),
    (f"{GOOD} --rampup-batch-size 1 2 3 4", 1, "'4'"),
    (f"{GOOD} --seq-length", 1, "--seq-length"),
    (f"{GOOD} --seq-length 8k", 1, "--seq-length, '8k', 8192"),
    (f"{GOOD} --train-iters 1e3", 1, "--train-iters, '1e3', 1000"),
    (f"{GOOD} --seq-length long", 1, "--seq-length, 'long'"),
    (f"{GOOD} --use-persistent-ckpt-worker yes", 1, "'yes'"),
    (f"{GOOD} --async-strategy", 1, "--async-strategy"),
    (f"{GOOD} --megatron-fsdp-main-params-dtype fp16", 1, "--megatron-fsdp-main-params-dtype fp16, fp32"),
    (f"{GOOD} --learning-rate 1", 1, "--learning-rate, --lr"),
    (f"{GOOD} --spec a b", 1, "--spec"),
    (f"{GOOD} --moe-token-dispatcher-type flex", 1, "--moe-token-dispatcher-type flex, alltoall"),
    (f"{GOOD} --use-megatron-fsdp", 1, "--use-megatron-fsdp, --data-parallel-sharding-strategy"),
    *expert_flags.REFUSED,
]


@cache
def refuse(arguments: str, world_size: int) -> ConfigError:
    """The refusal; the flag that comes last in ``arguments`` counts."""
    with pytest.raises(ConfigError) as raised:
        parse_command_line(shlex.split(arguments)).check(world_size)
    return raised.value


@pytest.mark.parametrize(("arguments", "world_size", "named"), BAD)
def test_a_bad_combination_is_refused_by_a_sentence_that_helps(arguments: str, world_size: int, named: str) -> None:
    message = str(refuse(arguments, world_size))
    assert_helpful(message, named)
    known = {*flag_names(), *("--no-" + name[2:] for name in flag_names()), "--sequence-length"}
    known |= {*NO_EFFECT, *NOT_SUPPORTED, "--learning-rate", "--help"}
    assert set(re.findall(r"--[a-z][a-z0-9-]*", message)) <= known, "the message names a flag that does not exist"


@pytest.mark.parametrize(
    "message",
    [
        "--lr 3 is wrong: lower it.",  # another value
        "--lr-decay 2 is wrong: lower it.",  # another flag
        "--lr 2 is wrong.",  # no remedy
        "--lr 2 is wrong: it is high.",
        "--lr 2 is wrong. It is high: lower it.",
        "--lr 2 is wrong: lower it",
    ],
)
def test_a_message_that_does_not_help_is_noticed(message: str) -> None:
    assert_helpful("--lr 2 is wrong: lower it.", "--lr 2")
    with pytest.raises(AssertionError):
        assert_helpful(message, "--lr 2")


def test_following_the_sentence_on_wsd_helps_a_run_counted_in_samples() -> None:
    assert_names(str(refuse(f"{SAMPLES} --lr-decay-style WSD", 1)), "--lr-wsd-decay-samples")


def places_of(error: ConfigError) -> Iterator[tuple[Path, int]]:
    """Where the error, or those that it collects, were raised."""
    for one in error.causes or [error]:
        yield raised_at(one.__traceback__)


def raised_at(traceback: TracebackType | None) -> tuple[Path, int]:
    """(file, line) of the innermost frame."""
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return Path(traceback.tb_frame.f_code.co_filename), traceback.tb_lineno


def test_every_refusal_of_the_flag_groups_is_in_the_table() -> None:
    (package,) = megatron.__path__
    modules = [
        Path(package, name) for name in ("urls.py", "flags.py", "intervals.py", "ranges.py", "schedules/stages.py")
    ]
    modules += Path(package, "update_rules").glob("[!r]*.py")
    # test_fault_grammar.py has the table of --inject-fault, test_run_yaml.py, test_megatron_recipes.py and
    # test_bash_scripts.py of files;
    # tests/inference of the flags of tools that use a model.
    others: tuple[str, ...] = ("faults.py", "run_yaml.py", "recipes.py", "generation.py", "loaded_model.py")
    others += tuple(file.name for file in Path(package, "config/bash").iterdir())
    modules += (file for file in sorted(Path(package, "config").rglob("*.py")) if file.name not in others)
    trees = {file: ast.parse(file.read_text()) for file in modules}
    # Of a writer's file, the check of its flags; what it raises when it opens depends on files and packages.
    trees |= {
        file: ast.Module([node for node in ast.walk(tree) if getattr(node, "name", "") == "check"], [])  # type: ignore[misc]
        for file in sorted(Path(package, "metrics").glob("*.py"))
        for tree in [ast.parse(file.read_text())]
    }
    reached = {place for arguments, world_size, _ in BAD for place in places_of(refuse(arguments, world_size))}
    missed = [
        f"{file.name}:{node.lineno}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        # An error that collects others, and the end of --help.
        and ast.unparse(node.exc).partition("(")[0] not in ("ConfigError.of", "SystemExit")
        and not any((file, line) in reached for line in range(node.lineno, (node.end_lineno or 0) + 1))
    ]
    assert not missed, f"no row of the table reaches {missed}"


@pytest.mark.parametrize(
    ("arguments", "world_size"),
    [
        (GOOD, 1),
        *expert_flags.ACCEPTED,
        (GOOD, 7),
        (f"{GOOD} --tensor-model-parallel-size 4 --sequence-parallel", 8),
        (f"{GOOD} --sequence-parallel --seq-length 63", 1),
        (f"{GOOD} --sequence-parallel --tp-comm-overlap --tensor-model-parallel-size 4", 4),
        (f"{GOOD} --tp-comm-overlap", 1),
        (f"{ENGINE} --tp-comm-overlap", 1),
        (f"{ENGINE} --kernel weight_gradient=in_place", 1),
        (f"{ENGINE} --no-gradient-accumulation-fusion", 1),
        (f"{GOOD} --expert-tensor-parallel-size 2", 1),
        (f"{OVERLAP} --bf16 --tensor-model-parallel-size 4 --fp8-format hybrid --first-last-layers-bf16", 8),
        (f"{OVERLAP} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --tensor-model-parallel-size 2 --seq-length 128", 2),
        (f"{GOOD} --use-distributed-optimizer --num-distributed-optimizer-instances 2", 4),
        (f"{GOOD} --data-parallel-sharding-strategy optim --use-distributed-optimizer", 4),
        (f"{GOOD} --use-torch-fsdp2 --no-torch-fsdp2-reshard-after-forward --defer-grad-reduce", 4),
        (f"{GOOD} --use-torch-fsdp2 --data-parallel-sharding-strategy optim_grads_params", 1),
        (f"{STAGES} --use-torch-fsdp2 --no-untie-embeddings-and-output-weights", 4),
        (f"{STAGES} --use-torch-fsdp2 --pipeline-schedule zb-v", 4),
        (f"{GOOD} --context-parallel-size 4 --cp-comm-type a2a", 8),
        (f"{GOOD} --context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2", 8),
        (f"{GOOD} --cp-comm-type a2a+p2p", 1),
        (
            f"{GOOD.replace('64', '36')} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            4,
        ),
        (f"{GOOD} --num-layers 3 --context-parallel-size 2 --cp-comm-type p2p a2a allgather", 2),
        (f"{GOOD} --cp-comm-type a2a --reset-attention-mask --reset-position-ids", 1),
        (f"{GOOD} --fp16 --initial-loss-scale 65536 --min-loss-scale 0.5 --loss-scale-window 200 --hysteresis 1", 1),
        (f"{GOOD} --fp16 --loss-scale 4096 --grad-reduce-in-bf16", 2),
        (f"{GOOD} --loss-scale 4096", 1),
        (f"{GOOD} --bf16 --use-precision-aware-optimizer --exp-avg-sq-dtype bf16 --adam-beta2 0.95", 1),
        (f"{FP8} --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2", 1),
        (f"{ENGINE} --bf16 --fp8-format e4m3 --fp8-recipe blockwise --recompute-activations", 1),
        (f"{ENGINE} --bf16 --fp8-format hybrid --first-last-layers-bf16 --use-distributed-optimizer", 1),
        (f"{ENGINE} --bf16 --use-torch-fsdp2 {UNIFORM} 1", 2),
        (f"{FP8} --fp8-margin 1 --fp8-amax-history-len 1024 --fp8-amax-compute-algo max", 1),
        (f"{FP8} --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", 4),
        (f"{GOOD} --pipeline-model-parallel-size 2", 2),
        (f"{GOOD} --recompute-activations --recompute-granularity selective --cpu-offloading-num-layers 4", 1),
        (f"{GOOD} {UNIFORM} 4 --distribute-saved-activations --tensor-model-parallel-size 2", 2),
        (f"{STAGES} {UNIFORM} 3 --sequence-parallel --tensor-model-parallel-size 2", 4),
        (f"{GOOD} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 8),
        *((f"{GOOD} --pipeline-schedule {schedule} --no-overlap-p2p-communication", 1) for schedule in SCHEDULES),
        *((f"{STAGES} --pipeline-schedule {schedule}", 2) for schedule in SCHEDULES if schedule != "interleaved"),
        (f"{STAGES} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 4", 2),
        (f"{STAGES} --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        (f"{STAGES} --num-layers-per-virtual-pipeline-stage 4 --pipeline-schedule gpipe", 2),
        (f"{STAGES} --num-layers-per-virtual-pipeline-stage 2 --pipeline-schedule dualpipe-v", 2),
        (f"{STAGES} --num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-virtual-pipeline-stage 2", 2),
        (f"{STAGES} --decoder-first-pipeline-num-layers 3", 2),
        (f"{STAGES} --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5", 2),
        (f"{STAGES} --decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        (f"{STAGES} --pipeline-model-parallel-layout Et*7|tL", 2),
        # The same empty stages leave a rank idle in one shape and not in the other.
        (f"{GOOD} --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|t|||t|L", 3),
        (
            f"{GOOD} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et||t|t|||t|L "
            "--pipeline-schedule zb-v",
            4,
        ),
        (f"{GOOD} --profile-pipeline trace.json --profile-pipeline-iteration 10", 1),
        (f"{GOOD} --profile-pipeline-iteration 11", 1),
        (f"{SAMPLES} --profile-pipeline trace.json", 1),
        (f"{UNSIZED} --num-layers 1 --hidden-size 9 --num-attention-heads 2 --kv-channels 4", 1),
        (f"{GOOD} --num-query-groups 8 --no-group-query-attention", 1),
        (f"{GOOD} --max-position-embeddings 64", 1),
        (YARN, 1),
        (f"{YARN} --yarn-mscale 0.7 --yarn-mscale-all-dim 1 --no-yarn-correction-range-round-to-int", 1),
        (f"{GOOD} --use-rope-scaling --rope-scaling-low-freq-factor 4", 1),
        (f"{GOOD} --min-lr 1e-3 --clip-grad 0 --weight-decay 0 --adam-beta1 0", 1),
        (f"{GOOD} --lr-warmup-fraction 0", 1),
        (f"{GOOD} --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2 --lr-decay-iters 8", 1),
        (f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 3 --lr-warmup-samples 2", 1),
        (f"{GOOD.replace('--lr 1e-3', '')} --skip-train --load run", 1),
        (f"{GOOD} --save run --save-interval 5 --load run --ckpt-step 5 --finetune", 1),
        # What depends on the architecture is checked when the checkpoint has told it.
        (UNKNOWN, 1),
        (f"{UNKNOWN} --num-attention-heads 6 --tensor-model-parallel-size 4", 8),
        (f"{UNKNOWN} --pipeline-model-parallel-size 3 --cp-comm-type p2p a2a", 3),
        (f"{GOOD} --save run --save-interval 2@0,5@4 --save-retain-last 2 --save-retain-interval 5", 1),
        (GOOD.replace("--mock-data", "--data-path corpus --tokenizer-type NullTokenizer"), 1),
        (
            GOOD.replace(
                "--mock-data --vocab-size 1000", "--data-path c --tokenizer-type TikTokenizer --tokenizer-model t"
            ),
            1,
        ),
    ],
)
def test_a_good_combination_passes(arguments: str, world_size: int) -> None:
    parse_command_line(arguments.split()).check(world_size)


def test_an_architecture_that_came_later_is_checked_like_one_of_the_flags() -> None:
    arguments = f"{UNKNOWN} --tensor-model-parallel-size 8".split()
    for defaults, named in (
        (replace(preset("tiny"), num_layers=None), "--num-layers"),
        (preset("tiny"), "--num-query-groups 4, --tensor-model-parallel-size 8"),
    ):
        config = parse_command_line(arguments, defaults)
        config.check(8)
        with pytest.raises(ConfigError) as raised:
            config.check_architecture(8)
        assert_helpful(str(raised.value), named)
    parse_command_line(arguments, preset("llama3-8b")).check_architecture(8)


def test_the_layout_follows_from_the_flags() -> None:
    config = parse_command_line(f"{GOOD} --tensor-model-parallel-size 2".split())
    assert [config.data_parallel_size(world) for world in (2, 4, 16384)] == [1, 2, 8192]
    assert config.parallel.sharding_strategy == "no_shard"
    assert parse_command_line(["--use-distributed-optimizer"]).parallel.sharding_strategy == "optim"
    strategy = parse_command_line(["--data-parallel-sharding-strategy", "optim"]).parallel.sharding_strategy
    assert strategy == "optim"


def test_buckets_are_cut_where_the_reduction_overlaps_or_where_asked() -> None:
    def sizes(*arguments: str) -> list[int | None]:
        return [parse_command_line(arguments).parallel.bucket_size(ranks, 1000) for ranks in (1, 40, 64)]

    assert sizes() == [None, None, None]
    assert sizes("--overlap-grad-reduce") == [40_000_000, 40_000_000, 64_000_000]
    assert sizes("--ddp-bucket-size", "1000") == [1000, 1000, 1000]
    assert sizes("--ddp-num-buckets", "3") == [334, 334, 334]
    assert sizes("--ddp-bucket-size", "1000", "--overlap-grad-reduce") == [1000, 1000, 1000]


def test_sizes_left_out_follow_from_the_others() -> None:
    config = parse_command_line(f"{UNSIZED} --num-layers 2 --hidden-size 4096 --num-attention-heads 32".split())
    model = config.model.resolve(vocab_size=1000, tensor_parallel_size=2, seq_length=64)
    assert model.ffn_hidden_size == int(4096 * 4 * 2 / 3 / 64) * 64 == 10880
    assert (model.num_query_groups, model.kv_channels, model.max_position_embeddings) == (32, 128, 64)
    assert (model.vocab_size, model.padded_vocab_size) == (1000, 1024)
    assert (model.query_size, model.key_value_size) == (4096, 4096)
