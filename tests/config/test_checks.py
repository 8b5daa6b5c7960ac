"""Every refusal is reached, names flags that exist, and says what to do; good combinations pass."""

import ast
import re
from functools import cache
from pathlib import Path
from types import TracebackType

import pytest

import megatron.config
from megatron.config.command_line import flag_names, parse_command_line
from megatron.config.errors import ConfigError
from megatron.config.model import ModelConfig, preset
from megatron.config.pipeline import SCHEDULES

GOOD = "--model tiny --mock-data --vocab-size 1000 --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
CORPUS = GOOD.replace("--mock-data", "--tokenizer-type NullTokenizer")
SAMPLES = GOOD.replace("--train-iters 10", "--train-samples 1000")
STAGES = f"{GOOD} --num-layers 8 --pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full"
UNIFORM = f"{FULL} --recompute-method uniform --recompute-num-layers"
UNSIZED = GOOD.replace("--model tiny ", "")
UNKNOWN = f"{UNSIZED} --load run --use-checkpoint-args"
ENGINE = f"{GOOD} --transformer-impl transformer_engine"
OVERLAP = f"{ENGINE} --tp-comm-overlap --sequence-parallel"

Row = tuple[str, int, str]
"""Arguments, number of processes, and what the sentence must say (fragments separated by `` ... ``)."""

AT_LEAST_ONE = [
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--num-query-groups",
    "--kv-channels",
    "--max-position-embeddings",
    "--rope-scaling-original-length",
    "--make-vocab-size-divisible-by",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
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
    "--mid-level-dataset-surplus",
    "--eval-iters",
    "--lr",
    "--lr-warmup-init",
    "--lr-warmup-iters",
    "--lr-warmup-samples",
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
    "--peak-tflops",
    "--gpu-memory-gb",
    "--exit-duration-in-mins",
    "--distributed-timeout-minutes",
    "--loss-scale",
    "--initial-loss-scale",
    "--min-loss-scale",
]
BELOW_ONE = ["--adam-beta1", "--adam-beta2", "--sgd-momentum", "--lr-warmup-fraction"]

FP8 = f"{GOOD} --bf16 --fp8-format hybrid"

BAD: list[Row] = [
    *((f"{GOOD} {flag} 0", 1, f"{flag} 0 must be at least 1") for flag in AT_LEAST_ONE),
    *((f"{GOOD} {flag} -1", 1, f"{flag} -1 ... must be finite and not negative") for flag in NOT_NEGATIVE),
    *((f"{GOOD} {flag} 0", 1, f"{flag} 0.0 must be positive and finite") for flag in POSITIVE),
    *(
        (f"{GOOD} {flag} nan", 1, f"{flag} nan must")
        for flag in ("--weight-decay", "--clip-grad", "--lr", "--rotary-base")
    ),
    *((f"{GOOD} {flag} 1.0", 1, f"{flag} 1.0 must be at least 0 and below 1") for flag in BELOW_ONE),
    *((f"{GOOD} {flag} -0.1", 1, f"{flag} -0.1 must be at least 0 and below 1") for flag in BELOW_ONE),
    # The command line itself.
    (f"{GOOD} --lr fast", 1, "Error parsing --lr ... 'fast' ... see --help."),
    (f"{GOOD} --model huge", 1, "'huge' ... --model ... llama3-8b ... see --help."),
    (f"{GOOD} --sequence-length 3", 1, "--sequence-length is not a flag ... did you mean --seq-length?"),
    # The dry run.
    (f"{GOOD} --num-gpus 8", 1, "--num-gpus belongs to --dry-run: add that, or remove --num-gpus"),
    (f"{GOOD} --gpu-memory-gb 40", 1, "--gpu-memory-gb belongs to --dry-run"),
    (f"{GOOD} --dry-run", 1, "--dry-run needs --num-gpus: add the number"),
    (f"{GOOD} --dry-run --num-gpus 8 --dry-run-rank 8", 8, "--dry-run-rank 8 is not among the 8 ranks"),
    (f"{UNKNOWN} --dry-run --num-gpus 8", 8, "--use-checkpoint-args does not go with --dry-run ... reads no"),
    (f"{GOOD} --load run --skip-train --dry-run --num-gpus 8", 8, "--skip-train does not go with --dry-run"),
    (
        f"{GOOD} --cpu-offloading-num-layers 1 --dry-run --num-gpus 8",
        8,
        "--cpu-offloading-num-layers does not go with --dry-run ... remove one",
    ),
    # What is kept for the backward pass.
    (
        f"{GOOD} --recompute-activations --recompute-granularity full",
        1,
        "--recompute-activations means --recompute-granularity selective ... remove one",
    ),
    (f"{GOOD} {FULL} --recompute-num-layers 1", 1, "full needs --recompute-method: add it, uniform or block"),
    (f"{GOOD} {FULL} --recompute-method block", 1, "full needs --recompute-num-layers: add it"),
    (f"{GOOD} --recompute-modules mlp", 1, "--recompute-modules belongs to --recompute-granularity selective"),
    (f"{GOOD} {UNIFORM} 1 --recompute-modules mlp", 1, "--recompute-modules belongs to ... selective ... or remove"),
    (f"{GOOD} --recompute-activations --recompute-modules", 1, "--recompute-modules names no module: name one"),
    (f"{GOOD} --recompute-method block", 1, "--recompute-method belongs to --recompute-granularity full: add that"),
    (f"{GOOD} --recompute-activations --recompute-num-layers 1", 1, "--recompute-num-layers belongs to ... full"),
    (f"{GOOD} --distribute-saved-activations", 1, "--distribute-saved-activations belongs to ... full"),
    (f"{GOOD} --recompute-activations --recompute-modules mlp mlp_act", 1, "mlp recomputes ... remove mlp_act"),
    (f"{GOOD} --recompute-activations --recompute-modules attention", 1, "'attention' ... core_attn ... see --help."),
    (f"{GOOD} {UNIFORM} 5", 1, "--recompute-num-layers 5 is more than the 4 layers of a pipeline chunk: lower it"),
    (f"{STAGES} --cpu-offloading-num-layers 5", 2, "--cpu-offloading-num-layers 5 is more than the 4 layers"),
    (
        f"{GOOD} {UNIFORM} 1 --distribute-saved-activations",
        1,
        "--distribute-saved-activations has nobody to divide with under --tensor-model-parallel-size 1: remove it",
    ),
    (
        f"{GOOD} {UNIFORM} 1 --distribute-saved-activations --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--distribute-saved-activations divides what --sequence-parallel has divided already: remove it",
    ),
    (
        f"{GOOD} {UNIFORM} 1 --distribute-saved-activations --tensor-model-parallel-size 2 --hidden-size 129 "
        "--kv-channels 16",
        2,
        "divides --hidden-size 129 over --tensor-model-parallel-size 2, which does not go: change one",
    ),
    # Kernels.
    (f"{GOOD} --cuda-graph-impl local", 1, "--cuda-graph-impl local is not supported ... use none"),
    (f"{GOOD} --kernel norm=eager", 1, "--kernel norm=eager names no operation: use one of attention, rms_norm"),
    (f"{GOOD} --kernel rope=apex", 1, "--kernel rope=apex names no implementation of rope: use eager or compiled"),
    (f"{GOOD} --kernel rope", 1, "--kernel rope names no implementation of rope: use eager or compiled"),
    (f"{GOOD} --kernel rope=compiled --no-rope-fusion", 1, "--no-rope-fusion and --kernel rope=compiled contradict"),
    (f"{GOOD} --kernel adam=te adam=apex", 1, "--kernel adam=te and --kernel adam=apex contradict each other: remove"),
    (
        f"{GOOD} --kernel attention=sdpa --attention-backend flash",
        1,
        "--attention-backend flash choose the same kernel",
    ),
    (f"{GOOD} --kernel adam=apex --optimizer sgd", 1, "--kernel adam=apex does not go with --optimizer sgd ... remove"),
    (
        f"{GOOD} --kernel adam=te --use-precision-aware-optimizer",
        1,
        "--kernel adam=te does not go with --use-precision-aware-optimizer ... remove one",
    ),
    *(
        (f"{ENGINE} {flag}", 1, f"{flag} does not reach the layers of --transformer-impl transformer_engine ... remove")
        for flag in ("--no-gradient-accumulation-fusion", "--kernel weight_gradient=apex")
    ),
    # What is not a Llama.
    (f"{GOOD} --no-swiglu", 1, "--no-swiglu ... --swiglu True ... remove"),
    (f"{GOOD} --no-disable-bias-linear", 1, "--no-disable-bias-linear ... --disable-bias-linear True ... remove"),
    (f"{GOOD} --hidden-dropout 0.1", 1, "--hidden-dropout 0.1 ... --hidden-dropout 0.0 ... remove"),
    (f"{GOOD} --attention-dropout 0.1", 1, "--attention-dropout 0.1 ... --attention-dropout 0.0 ... remove"),
    (f"{GOOD} --rotary-percent 0.5", 1, "--rotary-percent 0.5 ... --rotary-percent 1.0 ... remove"),
    (f"{GOOD} --no-cross-entropy-loss-fusion", 1, "--no-cross-entropy-loss-fusion ... remove it"),
    (f"{GOOD} --no-use-flash-attn", 1, "--no-use-flash-attn ... choose the kernel with --attention-backend local"),
    (f"{GOOD} --no-use-mcore-models", 1, "--no-use-mcore-models ... remove it"),
    (f"{ENGINE} --fp64", 1, "--fp64 ... --transformer-impl transformer_engine ... use --transformer-impl local"),
    *(
        (f"{STAGES} --transformer-impl transformer_engine --pipeline-schedule {name}", 2, f"{name} ... use 1f1b")
        for name in ("zb-h1", "zb-v")
    ),
    (f"{ENGINE} --cpu-offloading-num-layers 1", 1, "--cpu-offloading-num-layers ... remove it, or use --transformer"),
    (
        f"{ENGINE} --recompute-granularity selective --recompute-modules layernorm mlp",
        1,
        "--recompute-modules layernorm ... remove layernorm",
    ),
    (
        f"{ENGINE} --bf16 --fp8-format hybrid --recompute-activations",
        1,
        "--recompute-granularity selective ... --fp8-recipe delayed ... use another recipe",
    ),
    (f"{ENGINE} --bf16 --fp8-format hybrid --use-torch-fsdp2", 1, "--fp8-format ... optim_grads_params ... use"),
    # Sizes of the architecture.
    (f"{GOOD} --kv-channels 3", 1, "head size 3 is odd ... change --kv-channels"),
    (f"{GOOD} --hidden-size 40", 1, "head size 5 is odd ... change --kv-channels, or --hidden-size"),
    (f"{UNSIZED} --hidden-size 8 --num-attention-heads 2", 1, "--num-layers is missing ... --model llama3-8b"),
    (f"{UNSIZED} --num-layers 8 --num-attention-heads 2", 1, "--hidden-size is missing ... --model llama3-8b"),
    (f"{UNSIZED} --num-layers 8 --hidden-size 8", 1, "--num-attention-heads is missing ... --model llama3-8b"),
    (f"{GOOD} --hidden-size 130", 1, "--hidden-size 130 ... --num-attention-heads 8 ... --kv-channels"),
    (f"{GOOD} --num-query-groups 3", 1, "--num-attention-heads 8 ... --num-query-groups 3 ... change one"),
    (f"{GOOD} --no-group-query-attention", 1, "--no-group-query-attention ... --num-query-groups 4 ... remove one"),
    (f"{GOOD} --max-position-embeddings 32", 1, "--max-position-embeddings 32 ... --seq-length 64 ... raise"),
    # The parallel layout.
    (f"{GOOD} --expert-model-parallel-size 2", 2, "--expert-model-parallel-size 2 ... use tensor, context, pipeline"),
    (f"{GOOD} --context-parallel-size 2", 3, "3 processes ... --context-parallel-size 2 ... multiple"),
    (
        f"{GOOD} --context-parallel-size 3",
        3,
        "--seq-length 64 is not divisible by 6, into which --context-parallel-size 3 cut it",
    ),
    (
        f"{GOOD.replace('64', '36')} --context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel",
        8,
        "--seq-length 36 is not divisible by 8 ... --context-parallel-size 2 and --sequence-parallel cut it",
    ),
    (
        f"{GOOD} --context-parallel-size 8 --cp-comm-type a2a",
        8,
        "--cp-comm-type a2a divides the 4 key-value heads of a rank over --context-parallel-size 8 ... p2p",
    ),
    (
        f"{GOOD} --num-layers 4 --context-parallel-size 2 --cp-comm-type p2p a2a",
        2,
        "--cp-comm-type p2p a2a names 2 types for 4 layers",
    ),
    (f"{GOOD} --tensor-model-parallel-size 2", 3, "3 processes ... --tensor-model-parallel-size 2 ... multiple"),
    (
        f"{GOOD} --use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
        1,
        "--use-distributed-optimizer ... --data-parallel-sharding-strategy no_shard ... remove one",
    ),
    (
        f"{GOOD} --use-torch-fsdp2 --data-parallel-sharding-strategy optim",
        1,
        "--use-torch-fsdp2 contradicts --data-parallel-sharding-strategy optim: remove one",
    ),
    (f"{GOOD} --use-torch-fsdp2 --use-distributed-optimizer", 1, "--use-torch-fsdp2 and ... remove the latter"),
    *(
        (f"{GOOD} {strategy} {flag}", 1, f"{flag} belongs to --use-torch-fsdp2 ... remove {flag}")
        for flag in ("--no-torch-fsdp2-reshard-after-forward", "--defer-grad-reduce")
        for strategy in ("", "--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads")
    ),
    (f"{GOOD} --use-torch-fsdp2 --ddp-bucket-size 9", 1, "--ddp-bucket-size 9 ... a layer at a time: remove it"),
    *(
        (
            f"{STAGES} --use-torch-fsdp2 --no-untie-embeddings-and-output-weights --pipeline-schedule {schedule}",
            4,
            f"--pipeline-schedule {schedule} ... tied ... optim_grads_params ... another schedule",
        )
        for schedule in ("zb-v", "dualpipe-v")
    ),
    *(
        (f"{GOOD} --rank-order {order}", 1, f"--rank-order {order} must name each of tp, cp, ep, pp, dp once")
        for order in ("tp-cp-ep-pp", "tp-cp-ep-pp-dp-dp", "tp-cp-ep-pp-xp", "tp,cp,ep,pp,dp")
    ),
    (
        f"{GOOD} --num-attention-heads 6 --hidden-size 96 --num-query-groups 2 --tensor-model-parallel-size 4",
        4,
        "--num-attention-heads 6 ... --tensor-model-parallel-size 4 ... divisor of 6",
    ),
    (f"{GOOD} --tensor-model-parallel-size 8", 8, "--num-query-groups 4 ... --tensor-model-parallel-size 8 ... lower"),
    (
        f"{GOOD} --ffn-hidden-size 99 --tensor-model-parallel-size 2",
        2,
        "--ffn-hidden-size 99 ... --tensor-model-parallel-size 2 ... divisor of 99",
    ),
    (
        f"{GOOD} --seq-length 63 --sequence-parallel --tensor-model-parallel-size 2",
        2,
        "--sequence-parallel ... --seq-length 63 ... --tensor-model-parallel-size 2 ... change one",
    ),
    (
        f"{GOOD} --tp-comm-overlap --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap ... --tensor-model-parallel-size 2 ... add --sequence-parallel",
    ),
    (
        f"{ENGINE} --bf16 --tp-comm-overlap --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap ... --tensor-model-parallel-size 2 ... add --sequence-parallel",
    ),
    (f"{OVERLAP} --tensor-model-parallel-size 2", 2, "--tp-comm-overlap ... bf16 and nothing else: add --bf16, use"),
    (
        f"{OVERLAP} --bf16 --num-query-groups 8 --tensor-model-parallel-size 16",
        16,
        "--tp-comm-overlap ... 2, 4 or 8 ranks, not --tensor-model-parallel-size 16: use one of these",
    ),
    (
        f"{OVERLAP} --bf16 --tensor-model-parallel-size 2 --rank-order pp-tp-cp-ep-dp",
        2,
        "--tp-comm-overlap ... --rank-order pp-tp-cp-ep-dp ... begin it with tp",
    ),
    (
        f"{OVERLAP} --bf16 --fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap ... --fp8-recipe blockwise ... use another recipe",
    ),
    (
        f"{OVERLAP} --bf16 --hidden-size 144 --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap ... multiples of 32, but --hidden-size is 144",
    ),
    (
        f"{OVERLAP} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap ... multiples of 128, but --micro-batch-size ... is 64: change one",
    ),
    (
        f"{GOOD} --num-distributed-optimizer-instances 2",
        2,
        "--num-distributed-optimizer-instances 2 ... --use-distributed-optimizer ... add it",
    ),
    (
        f"{GOOD} --use-distributed-optimizer --num-distributed-optimizer-instances 4",
        6,
        "--num-distributed-optimizer-instances 4 ... 6 ... divisors",
    ),
    # The pipeline: flags that need one, and flags that exclude each other.
    *(
        (f"{GOOD} {flag}", 1, f"{flag.split()[0]} needs --pipeline-model-parallel-size of 2 or more: add ... or remove")
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
            f"--pipeline-model-parallel-layout and {flag.split()[0]} exclude each other ... remove the other",
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
        (f"{STAGES} --{end} 3 --{account}", 2, f"--{end} and --{account} exclude each other ... keep one")
        for end in ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
        for account in ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    ),
    (
        f"{STAGES} --decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 2",
        2,
        "--decoder-first-pipeline-num-layers and --num-layers-per-virtual-pipeline-stage exclude each other ... give "
        "... --num-virtual-stages-per-pipeline-rank instead",
    ),
    *(
        (
            f"{STAGES} --decoder-{end}-pipeline-num-layers 2 --pipeline-schedule {schedule}",
            2,
            f"--decoder-{end}-pipeline-num-layers ... --pipeline-schedule {schedule} ... both ends ... use "
            "--account-for-embedding-in-pipeline-split ... --pipeline-model-parallel-layout",
        )
        for end in ("first", "last")
        for schedule in ("zb-v", "dualpipe-v")
    ),
    # The pipeline: schedules and chunks.
    (
        f"{STAGES} --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 4",
        2,
        "--num-layers-per-virtual-pipeline-stage 2 makes 2 chunks ... --num-virtual-stages-per-pipeline-rank is 4 ... "
        "remove one",
    ),
    (
        f"{STAGES} --pipeline-schedule interleaved",
        2,
        "interleaved runs several chunks ... not 1: add --num-virtual-stages-per-pipeline-rank 2, or more",
    ),
    (
        f"{STAGES} --pipeline-schedule interleaved --pipeline-model-parallel-layout Etttt|ttttL",
        2,
        "interleaved runs several chunks ... not 1: change --pipeline-model-parallel-layout, or choose another",
    ),
    *(
        (
            f"{STAGES} --pipeline-schedule {schedule} {flag}",
            2,
            f"{schedule} runs one chunk ... not 2: change {flag.split()[0]}, or use --pipeline-schedule interleaved",
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
            f"{schedule} runs two chunks ... not {chunks}: change --num-virtual-stages-per-pipeline-rank, or choose",
        )
        for schedule in ("zb-v", "dualpipe-v")
        for chunks in (1, 4)
    ),
    *(
        (
            f"{STAGES} --microbatch-group-size-per-virtual-pipeline-stage 4 {schedule}",
            2,
            "--microbatch-group-size-per-virtual-pipeline-stage 4 ... interleaved ... remove it, or ... "
            "--num-virtual-stages-per-pipeline-rank",
        )
        for schedule in ("", "--pipeline-schedule zb-v")
    ),
    (
        f"{GOOD} --num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3",
        4,
        "--microbatch-group-size-per-virtual-pipeline-stage 3 ... --pipeline-model-parallel-size 4 ... use 4 or more",
    ),
    # The pipeline: splits that do not come out even.
    (
        f"{GOOD} --pipeline-model-parallel-size 8",
        8,
        "8 pipeline stages are too many for --num-layers 4 ... lower --pipeline-model-parallel-size.",
    ),
    (
        f"{STAGES} --num-virtual-stages-per-pipeline-rank 6 --account-for-loss-in-pipeline-split",
        2,
        "12 virtual stages (2 pipeline ranks x 6 chunks) are too many for --num-layers 8 (with head: 9) ... or the "
        "number of chunks.",
    ),
    (
        f"{GOOD} --model llama3.1-405b --pipeline-model-parallel-size 16",
        16,
        "--num-layers 126 does not divide evenly into 16 pipeline stages: add "
        "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split, which makes 128, choose "
        "another --pipeline-model-parallel-size, give --decoder-first-pipeline-num-layers ... or write ... "
        "--pipeline-model-parallel-layout",
    ),
    (
        f"{GOOD} --num-layers 10 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split",
        4,
        "--num-layers 10 (with embedding: 11) ... add --account-for-loss-in-pipeline-split, which makes 12, choose",
    ),
    (
        f"{GOOD} --num-layers 9 --pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 2",
        3,
        "--num-layers 9 does not ... --num-layers-per-virtual-pipeline-stage 2 on 3 pipeline ranks: choose another "
        "--pipeline-model-parallel-size ... or write ... --pipeline-model-parallel-layout",
    ),
    (
        f"{STAGES} --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
        2,
        "--decoder-first-pipeline-num-layers 3 and --decoder-last-pipeline-num-layers 4 are not --num-layers 8 "
        "together ... drop one",
    ),
    *(
        (
            f"{GOOD} --num-layers 8 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers {first}",
            4,
            f"--decoder-first-pipeline-num-layers {first}: that leaves {rest} of --num-layers 8 ... leave 3 or a "
            "multiple of it, or write",
        )
        for first, rest in ((3, 5), (8, 0), (9, 0))
    ),
    *(
        (
            f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 --decoder-{end}-pipeline-num-layers 3",
            2,
            f"--decoder-{end}-pipeline-num-layers 3: that makes {count} layers on pipeline rank 0 ... "
            "--num-virtual-stages-per-pipeline-rank 2: use multiples of 2",
        )
        for end, count in (("first", 3), ("last", 5))
    ),
    # The pipeline: layout strings.
    *(
        (
            f"{STAGES} --pipeline-model-parallel-layout {layout}",
            2,
            f"--pipeline-model-parallel-layout {layout!r} cannot be used: ... {problem}",
        )
        for layout, problem in (
            ("tttt|ttttL", "begin with its only E"),
            ("|Etttt|ttttL|", "begin with its only E"),
            ("Etttt|Ettttt", "begin with its only E"),
            ("Etttt|tttt", "end with its only L"),
            ("EttttL|ttttL", "end with its only L"),
            ("EtEttt|ttttL", "begin with its only E"),
            ("Etttt|ttttL|", "end with its only L"),
            ("Etttt|tttL", "7 layers (t), but --num-layers is 8: add"),
            (
                "Ettt|ttt|ttL",
                "its number of stages, 3, ... --pipeline-model-parallel-size 2: write 2 stages, or a multiple",
            ),
            ("Etttt|ttttmL", "multi-token prediction ... remove it"),
            ("Etttt|xtttL", "'x' has no meaning where it stands: E is the embedding"),
            ("Etttt|tttt*L", "'*' has no meaning"),
            ("*3Etttt|tttL", "'*3' has no meaning"),
            ("Etttt|(tt)2L", "'2' has no meaning"),
            ("Etttt|tt)*2L", "')' has no meaning"),
            ("Etttt|((tt)*2L", "parenthesis is not closed: add ')'"),
            ("Et*999999|L", "100000 letters when written out: lower"),
            ("E(((t*999)*999)*999)*999|L", "100000 letters when written out: lower"),
            ("Et*4|(t*4L", "parenthesis is not closed"),
            ("EtttttttttL", "9 layers"),
            ("Et*8L||", "end with its only L"),
            ("Et*8L", "its number of stages, 1, is no multiple of"),
        )
    ),
    (
        f"{GOOD} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et||t|t|||t|L",
        4,
        "leaves pipeline rank 1 nothing to do (stage 2 and stage 6 of 8): move a layer (t) there, or lower",
    ),
    (
        f"{GOOD} --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ett|t|||t|L "
        "--pipeline-schedule zb-v",
        3,
        "leaves pipeline rank 2 nothing to do (stage 3 and stage 4 of 6)",
    ),
    # The training loop.
    (f"{GOOD} --train-samples 10", 1, "--train-iters and --train-samples exclude ... give one"),
    (f"{GOOD} --no-calculate-per-token-loss", 1, "--no-calculate-per-token-loss ... remove it"),
    (f"{GOOD} --manual-gc-interval 10", 1, "--manual-gc-interval needs --manual-gc"),
    # The learning rate.
    (f"{GOOD} --min-lr 2e-3", 1, "--min-lr 0.002 ... --lr 0.001"),
    (f"{GOOD} --min-lr -1", 1, "--min-lr -1.0 must lie between 0 and --lr 0.001"),
    (
        f"{GOOD} --lr-warmup-fraction 0.1 --lr-warmup-iters 1",
        1,
        "--lr-warmup-fraction excludes --lr-warmup-iters ... keep one",
    ),
    (
        f"{SAMPLES} --lr-warmup-fraction 0.1 --lr-warmup-samples 1",
        1,
        "--lr-warmup-fraction excludes ... --lr-warmup-samples ... keep one",
    ),
    (f"{GOOD} --lr-wsd-decay-iters 3", 1, "--lr-wsd-decay-iters ... --lr-decay-style WSD ... remove it"),
    (f"{GOOD} --lr-decay-style WSD", 1, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (
        f"{GOOD} --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        1,
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude",
    ),
    *(
        (
            f"{SAMPLES} {style} --lr-{part}-iters 1",
            1,
            f"--lr-{part}-iters ... --train-samples ... use --lr-{part}-samples",
        )
        for part, style in (("decay", ""), ("warmup", ""), ("wsd-decay", "--lr-decay-style WSD"))
    ),
    *(
        (f"{GOOD} {style} --lr-{part}-samples 1", 1, f"--lr-{part}-samples ... --train-iters ... use --lr-{part}-iters")
        for part, style in (("decay", ""), ("warmup", ""), ("wsd-decay", "--lr-decay-style WSD"))
    ),
    # Precision.
    (f"{GOOD} --bf16 --fp64", 1, "--bf16 and --fp64 exclude ... remove one"),
    (f"{GOOD} --bf16 --fp16", 1, "--bf16 and --fp16 exclude ... remove one"),
    (f"{GOOD} --fp16 --fp64", 1, "--fp16 and --fp64 exclude ... remove one"),
    *(
        (f"{GOOD} --bf16 {flag} 8", 1, f"{flag} ... dynamic loss scale ... only --fp16 ... add that, or remove {flag}")
        for flag in ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis")
    ),
    (f"{GOOD} --fp16 --loss-scale 8 --hysteresis 3", 1, "--hysteresis ... --loss-scale 8.0 is constant ... remove one"),
    (
        f"{GOOD} --fp16 --initial-loss-scale 8 --min-loss-scale 16",
        1,
        "--min-loss-scale 16.0 is above --initial-loss-scale 8.0: change one",
    ),
    (f"{GOOD} --fp64 --grad-reduce-in-bf16", 1, "--fp64 ... --grad-reduce-in-bf16 ... remove one"),
    (f"{GOOD} --fp64 --use-precision-aware-optimizer", 1, "--fp64 ... or --use-precision-aware-optimizer"),
    (f"{GOOD} --optimizer sgd --use-precision-aware-optimizer", 1, "--use-precision-aware-optimizer ... sgd"),
    *(
        (f"{GOOD} {flag} bf16", 1, f"{flag} needs --use-precision-aware-optimizer")
        for flag in ("--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
    ),
    *(
        (
            f"{GOOD} --use-precision-aware-optimizer {flag} bf16 {beta} 0.999",
            1,
            f"{flag} bf16 ... {beta} 0.999 ... never forget ... at most 0.992, or fp32",
        )
        for flag, beta in (("--exp-avg-dtype", "--adam-beta1"), ("--exp-avg-sq-dtype", "--adam-beta2"))
    ),
    (f"{GOOD} --no-accumulate-allreduce-grads-in-fp32", 1, "--no-accumulate-allreduce-grads-in-fp32 ... fp32"),
    # FP8.
    (f"{GOOD} --fp8-format e4m3", 1, "--fp8-format e4m3 ... add --bf16"),
    (f"{GOOD} --fp16 --fp8-format e4m3", 1, "--fp8-format e4m3 ... use --bf16 instead of --fp16"),
    (f"{FP8} --fp64", 1, "--bf16 and --fp64 exclude ... remove one"),
    (f"{FP8} --fp8-recipe blockwise", 1, "--fp8-recipe blockwise ... Transformer Engine ... Hopper ... use delayed or"),
    (f"{FP8} --fp8-recipe mxfp8", 1, "--fp8-recipe mxfp8 ... Transformer Engine ... Blackwell ... use delayed or"),
    *(
        (f"{GOOD} --bf16 {flag}", 1, f"{flag.split()[0]} has no effect without --fp8-format: add it, or remove")
        for flag in ("--fp8-recipe tensorwise", "--fp8-margin 1", "--first-last-layers-bf16")
    ),
    *(
        (f"{FP8} --fp8-recipe tensorwise {flag}", 1, f"{flag.split()[0]} has no effect without --fp8-recipe delayed")
        for flag in ("--fp8-margin 1", "--fp8-amax-history-len 16", "--fp8-amax-compute-algo max")
    ),
    *(
        (f"{FP8} --num-layers-at-{end}-in-bf16 2", 1, f"--num-layers-at-{end}-in-bf16 ... --first-last-layers-bf16")
        for end in ("start", "end")
    ),
    *(
        (
            f"{FP8} --first-last-layers-bf16 --num-layers-at-{end}-in-bf16 3",
            1,
            "--first-last-layers-bf16 keeps ... of 4",
        )
        for end in ("start", "end")
    ),
    (f"{FP8} --hidden-size 136 --kv-channels 16", 1, "multiples of 16, but --hidden-size is 136"),
    (f"{FP8} --tensor-model-parallel-size 4 --ffn-hidden-size 416", 4, "--ffn-hidden-size ... is 104"),
    (f"{FP8} --tensor-model-parallel-size 4 --kv-channels 4", 4, "--num-attention-heads x --kv-channels ... is 8"),
    (
        f"{FP8} --tensor-model-parallel-size 2 --kv-channels 4 --num-query-groups 2",
        2,
        "2 x --num-query-groups ... is 24",
    ),
    (f"{FP8} --micro-batch-size 1 --seq-length 72", 1, "--micro-batch-size x --seq-length ... is 72"),
    (f"{FP8} --context-parallel-size 4 --micro-batch-size 1 --seq-length 96", 4, "--context-parallel-size is 24"),
    # Data and tokenizer.
    (f"{GOOD} --data-path corpus", 1, "--mock-data and --data-path exclude ... drop all but one"),
    (f"{GOOD} --valid-data-path corpus", 1, "--mock-data and --valid-data-path exclude ... drop all but one"),
    (f"{CORPUS} --data-path a --data-args-path b", 1, "--data-path and --data-args-path exclude"),
    (
        f"{CORPUS} --train-data-path a --per-split-data-args-path b",
        1,
        "--per-split-data-args-path and --train-data-path",
    ),
    (
        f"{CORPUS} --train-data-path a --valid-data-path b --split 9,1",
        1,
        "--split '9,1' ... drop one",
    ),
    (f"{CORPUS} --valid-data-path b", 1, "--valid-data-path needs --train-data-path ... to train on"),
    (f"{GOOD} --sample-order extendable --dataloader-type cyclic", 1, "--sample-order ... cyclic ... drop one"),
    (f"{GOOD} --data-cache-path s3://bucket/cache", 1, "--data-cache-path s3://bucket/cache must be a directory"),
    (f"{GOOD} --object-storage-cache-path s3://b/c", 1, "--object-storage-cache-path s3://b/c must be a directory for"),
    (
        f"{GOOD} --create-attention-mask-in-dataloader",
        1,
        "--create-attention-mask-in-dataloader ... use --no-create-attention-mask-in-dataloader",
    ),
    (f"{GOOD} --trust-remote-code", 1, "--trust-remote-code ... remove it ... --tokenizer-model"),
    (
        GOOD.replace("--vocab-size 1000", "--tokenizer-type NullTokenizer"),
        1,
        "--tokenizer-type NullTokenizer needs --vocab-size",
    ),
    (f"{GOOD} --tokenizer-type TikTokenizer", 1, "--tokenizer-type TikTokenizer needs --tokenizer-model"),
    (GOOD.replace("--mock-data", ""), 1, "--data-path ... --mock-data"),
    (GOOD.replace("--mock-data", "--data-path corpus"), 1, "--tokenizer-type is missing ... --data-path"),
    (GOOD.replace("--vocab-size 1000", ""), 1, "--mock-data ... needs --vocab-size"),
    # What training needs.
    (GOOD.replace("--seq-length 64", ""), 1, "--seq-length is missing"),
    (GOOD.replace("--micro-batch-size 2", ""), 1, "--micro-batch-size is missing"),
    (GOOD.replace("--lr 1e-3", ""), 1, "--lr is missing"),
    (GOOD.replace("--train-iters 10", ""), 1, "--train-iters (or --train-samples) is missing"),
    # Checkpoints and logging.
    *(
        (f"{GOOD} --{flag} 10", 1, f"--{flag} needs --save")
        for flag in ("save-interval", "save-retain-last", "save-retain-interval", "redundant-save")
    ),
    (f"{GOOD} --async-save", 1, "--async-save needs --save"),
    (f"{GOOD} --save run --redundant-save run", 1, "--redundant-save run is --save itself"),
    *(
        (
            f"{GOOD} --save run --save-interval {wrong}",
            1,
            f"--save-interval {wrong} must be a number ... 500@0,2000@1000",
        )
        for wrong in ("0", "often", "5@1", "5@0,6@0", "5@0,6@9,7@8", "0@0", "5@0,", "@", "1.5")
    ),
    (f"{GOOD} --ckpt-step 10", 1, "--ckpt-step needs --load"),
    (f"{GOOD} --finetune", 1, "--finetune needs --load"),
    (f"{GOOD} --use-checkpoint-args", 1, "--use-checkpoint-args needs --load"),
    (f"{UNKNOWN} --tensor-model-parallel-size 2", 3, "3 processes ... --tensor-model-parallel-size 2 ... multiple"),
    (f"{UNKNOWN} --hidden-size 0", 1, "--hidden-size 0 must be at least 1"),
    (f"{GOOD} --no-checkpoint-fallback", 1, "--no-checkpoint-fallback needs --load"),
    (f"{GOOD} --start-weight-decay 0.1", 1, "--start-weight-decay needs --weight-decay-incr-style ... remove"),
    (
        f"{GOOD} --weight-decay-incr-style linear --start-weight-decay 0",
        1,
        "--weight-decay-incr-style linear needs --end-weight-decay: add it",
    ),
    (f"{GOOD} --decoupled-min-lr 1e-4", 1, "--decoupled-min-lr needs --decoupled-lr: add it"),
    (f"{GOOD} --min-lr 1e-4 --decoupled-lr 1e-5", 1, "--decoupled-lr 1e-05 is below its floor of 0.0001: give a lower"),
    (f"{GOOD} --no-te-rng-tracker", 1, "--no-te-rng-tracker asks for another way ... remove it"),
    (f"{GOOD} --no-use-cpu-initialization", 1, "--no-use-cpu-initialization asks ... remove it"),
    (f"{GOOD} --no-attention-softmax-in-fp32", 1, "--no-attention-softmax-in-fp32 asks ... remove it"),
    (
        f"{GOOD} --ddp-bucket-size 9 --ddp-num-buckets 2",
        1,
        "--ddp-bucket-size 9 and --ddp-num-buckets 2 ... remove one",
    ),
    (f"{GOOD} --use-torch-fsdp2 --ddp-num-buckets 2", 1, "--ddp-num-buckets 2 does not go ... remove it"),
    (f"{GOOD} --position-embedding", 1, "--position-embedding is not a Llama ... remove it"),
    (f"{GOOD} --no-use-rotary-position-embeddings", 1, "--no-use-rotary-position-embeddings is not a Llama ... remove"),
    (f"{GOOD} --iterations-to-skip 3 0", 1, "--iterations-to-skip 0 must be at least 1"),
    (f"{GOOD} --no-ckpt-fully-parallel-save", 1, "--no-ckpt-fully-parallel-save asks ... remove it"),
    (f"{GOOD} --no-dist-ckpt-optim-fully-reshardable", 1, "--no-dist-ckpt-optim-fully-reshardable asks ... remove it"),
    (f"{GOOD} --no-verify-integrity", 1, "--no-verify-integrity asks ... remove it"),
    (
        f"{GOOD} --use-tp-pp-dp-mapping --rank-order tp-cp-ep-dp-pp",
        1,
        "--use-tp-pp-dp-mapping contradicts --rank-order tp-cp-ep-dp-pp: remove one",
    ),
    (f"{GOOD} --no-disable-gloo-process-groups", 1, "--no-disable-gloo-process-groups asks ... remove it"),
    (
        f"{GOOD} --tokenizer-type TikTokenizer --tokenizer-model t --tiktoken-pattern v2",
        1,
        "--tiktoken-pattern v2 is not how ... remove it",
    ),
    (f"{GOOD} --no-log-timers-to-tensorboard", 1, "--no-log-timers-to-tensorboard leaves out ... remove it"),
    (f"{GOOD} --no-log-validation-ppl-to-tensorboard", 1, "--no-log-validation-ppl-to-tensorboard ... remove it"),
    (f"{GOOD} --profile-step-start 5", 1, "--profile-step-start has no effect without --profile: add that"),
    (f"{GOOD} --profile-ranks 0", 1, "--profile-ranks has no effect without --profile: add that"),
    (f"{GOOD} --profile --profile-step-start 12", 1, "--profile-step-end 12 must be above --profile-step-start 12"),
    (f"{GOOD} --profile --profile-ranks 0 2", 2, "--profile-ranks 2 is none of the ranks 0 to 1: name one"),
    (
        f"{GOOD} --profile --use-pytorch-profiler",
        1,
        "--use-pytorch-profiler writes ... --tensorboard-dir or --save: give",
    ),
    (f"{GOOD} --exit-on-missing-checkpoint", 1, "--exit-on-missing-checkpoint needs --load"),
    (
        f"{GOOD} --load run --pretrained-checkpoint base --load-hf hf",
        1,
        "--pretrained-checkpoint and --load-hf ... remove",
    ),
    (
        f"{GOOD} --load run --pretrained-checkpoint base --exit-on-missing-checkpoint",
        1,
        "--pretrained-checkpoint and --exit-on-missing-checkpoint differ ... remove one",
    ),
    (f"{GOOD} --overlap-param-gather", 1, "--overlap-param-gather ... --use-distributed-optimizer"),
    (f"{GOOD} --profile-pipeline trace.json --profile-pipeline-iteration 11", 1, "iteration 11 ... --train-iters 10"),
    (f"{GOOD} --profile-pipeline trace.json --skip-train --eval-interval 5", 1, "--profile-pipeline ... --skip-train"),
    (
        GOOD.replace("10", "4") + " --profile-pipeline trace.json",
        1,
        "--profile-pipeline ... 5 ... --train-iters 4 ... lower",
    ),
    (f"{GOOD} --eval-global-batch-size 3", 2, "--eval-global-batch-size 3 ... data-parallel size 2 ... multiple of"),
    (f"{GOOD} --wandb-entity team", 1, "--wandb-entity needs --wandb-project"),
    (f"{GOOD} --wandb-save-dir there", 1, "--wandb-save-dir needs --wandb-project"),
    (f"{GOOD} --wandb-exp-name run", 1, "--wandb-exp-name needs --wandb-project"),
]


@cache
def refuse(arguments: str, world_size: int) -> ConfigError:
    """The refusal; the flag that comes last in ``arguments`` counts."""
    with pytest.raises(ConfigError) as raised:
        parse_command_line(arguments.split()).check(world_size)
    return raised.value


@pytest.mark.parametrize(("arguments", "world_size", "expected"), BAD)
def test_a_bad_combination_is_refused_by_a_sentence_that_helps(arguments: str, world_size: int, expected: str) -> None:
    sentence = str(refuse(arguments, world_size))
    pattern = ".*".join(re.escape(fragment) for fragment in expected.split(" ... "))
    assert re.search(pattern, sentence), sentence
    assert sentence[-1] in ".?" and "\n" not in sentence
    known = {*flag_names(), *("--no-" + name[2:] for name in flag_names()), "--sequence-length", "--help"}
    assert set(re.findall(r"--[a-z][a-z0-9-]*", sentence)) <= known, "the sentence names a flag that does not exist"


def test_following_the_sentence_on_wsd_helps_a_run_counted_in_samples() -> None:
    sentence = str(refuse(f"{SAMPLES} --lr-decay-style WSD", 1))
    assert "--lr-wsd-decay-samples" in sentence


def raised_at(traceback: TracebackType | None) -> tuple[str, int]:
    """(file name, line) of the innermost frame."""
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return Path(traceback.tb_frame.f_code.co_filename).name, traceback.tb_lineno


def test_every_refusal_of_the_flag_groups_is_in_the_table() -> None:
    (directory,) = megatron.config.__path__
    reached = {raised_at(refuse(arguments, world_size).__traceback__) for arguments, world_size, _ in BAD}
    missed = [
        f"{file.name}:{node.lineno}"
        for file in sorted(Path(directory).glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and not any((file.name, line) in reached for line in range(node.lineno, (node.end_lineno or 0) + 1))
    ]
    assert not missed, f"no row of the table reaches {missed}"


@pytest.mark.parametrize(
    ("arguments", "world_size"),
    [
        (GOOD, 1),
        (GOOD, 7),
        (f"{GOOD} --tensor-model-parallel-size 4 --sequence-parallel", 8),
        (f"{GOOD} --sequence-parallel --seq-length 63", 1),
        (f"{GOOD} --sequence-parallel --tp-comm-overlap --tensor-model-parallel-size 4", 4),
        (f"{GOOD} --tp-comm-overlap", 1),
        (f"{ENGINE} --tp-comm-overlap", 1),
        (f"{ENGINE} --kernel weight_gradient=in_place", 1),
        (f"{OVERLAP} --bf16 --tensor-model-parallel-size 4 --fp8-format hybrid --first-last-layers-bf16", 8),
        (f"{OVERLAP} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --tensor-model-parallel-size 2 --seq-length 128", 2),
        (f"{GOOD} --use-distributed-optimizer --num-distributed-optimizer-instances 2", 4),
        (f"{GOOD} --data-parallel-sharding-strategy optim --use-distributed-optimizer", 4),
        (f"{GOOD} --use-torch-fsdp2 --no-torch-fsdp2-reshard-after-forward --defer-grad-reduce", 4),
        (f"{GOOD} --use-torch-fsdp2 --data-parallel-sharding-strategy optim_grads_params", 1),
        (f"{STAGES} --use-torch-fsdp2 --no-untie-embeddings-and-output-weights", 4),
        (f"{STAGES} --use-torch-fsdp2 --pipeline-schedule zb-v", 4),
        (f"{GOOD} --context-parallel-size 4 --cp-comm-type a2a", 8),
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
    for defaults, expected in (
        (ModelConfig(), "--num-layers is missing"),
        (preset("tiny"), "--num-query-groups 4 is not divisible by --tensor-model-parallel-size 8"),
    ):
        config = parse_command_line(arguments, defaults)
        config.check(8)
        with pytest.raises(ConfigError, match=expected):
            config.check_architecture(8)
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
