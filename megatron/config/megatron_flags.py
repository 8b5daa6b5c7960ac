"""Flags of Megatron-LM that a Llama recipe may carry and that are not supported here, with what to do."""

_BY_REMEDY: dict[str, tuple[str, ...]] = {
    "it changes the architecture, which is Llama's: remove it.": (
        "--rotary-interleaved",
        "--rotary-seq-len-interpolation-factor",
        "--add-qkv-bias",
        "--qk-layernorm",
        "--window-size",
        "--fp32-residual-connection",
        "--mtp-num-layers",
        "--spec",
    ),
    "gains of norms never decay, so that training is the same but for the rounding of a gain: remove it.": (
        "--apply-layernorm-1p",
    ),
    "the optimizer's state is on the training device: remove it.": (
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction",
        "--overlap-cpu-optimizer-d2h-h2d",
    ),
    "a loss or gradient that is not finite stops the run, and --clip-grad bounds large ones: remove it.": (
        "--check-for-large-grads",
        "--check-for-spiky-loss",
    ),
    "all copies of the model start from the same weights: remove it.": ("--data-parallel-random-init",),
    "precisions are fp32, --bf16, --fp8-format, --fp16 and --fp64: remove it.": ("--fp4-format",),
    "weights are gathered in the format of the model: remove it.": ("--fp8-param-gather",),
    "activations go to the host layer by layer: use --cpu-offloading-num-layers instead.": (
        "--fine-grained-activation-offloading",
    ),
    "layouts are tensor, sequence, context, pipeline and data parallelism: remove it.": (
        "--expert-tensor-parallel-size",
        "--overlap-param-gather-with-optimizer-step",
    ),
    "gradients are sums over tokens, which are divided once, after all ranks' are added up: remove it.": (
        "--ddp-average-in-collective",
    ),
    "the gradient of a linear layer's input is always reduced behind its weight gradient: remove it.": (
        "--no-async-tensor-model-parallel-allreduce",
    ),
    "scales change with every step: remove it.": ("--fp8-interval",),
    "--tp-comm-overlap has nothing to set, and layers of Transformer Engine take its defaults: remove it.": (
        "--tp-comm-overlap-cfg",
    ),
    "FSDP is PyTorch's: use --use-torch-fsdp2 instead.": ("--use-megatron-fsdp",),
    "it is spelled --no-torch-fsdp2-reshard-after-forward.": ("--torch-fsdp2-no-reshard-after-forward",),
    "context-parallel ranks exchange in one level: use --cp-comm-type p2p, allgather or a2a instead.": (
        "--hierarchical-context-parallel-sizes",
    ),
    "it is the schedule that delays weight gradients: use --pipeline-schedule zb-h1 or zb-v instead.": (
        "--delay-wgrad-compute",
        "--defer-embedding-wgrad-compute",
    ),
    "the model is dense: remove it.": (
        "--num-experts",
        "--moe-layer-freq",
        "--moe-ffn-hidden-size",
        "--moe-router-topk",
        "--moe-router-load-balancing-type",
        "--moe-aux-loss-coeff",
        "--moe-z-loss-coeff",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type",
        "--moe-shared-expert-intermediate-size",
        "--moe-expert-capacity-factor",
    ),
    "an order in the cache is found by its name and mapped, which needs no shortcut: remove it.": (
        "--dataloader-fast-cache-load",
        "--dataloader-defer-npy-index-mmap",
    ),
    "give the tokenizer with --tokenizer-type and --tokenizer-model: remove it.": (
        "--vocab-file",
        "--merge-file",
        "--padded-vocab-size",
    ),
    "evaluation takes --eval-iters batches of one set: remove it.": (
        "--full-validation",
        "--multiple-validation-sets",
    ),
    "checkpoints have one format and load in any layout; --async-save alone decides how they are saved: remove it.": (
        "--auto-detect-ckpt-format",
        "--ckpt-convert-format",
        "--ckpt-fully-parallel-load",
        "--use-persistent-ckpt-worker",
        "--async-strategy",
        "--ckpt-assume-constant-structure",
        "--dist-ckpt-strictness",
        "--dist-ckpt-workers",
        "--non-persistent-save-interval",
        "--non-persistent-ckpt-type",
        "--non-persistent-local-ckpt-dir",
    ),
    "--profile with --use-pytorch-profiler records allocations, too: use these instead.": (
        "--record-memory-history",
        "--memory-snapshot-path",
    ),
    "metrics go to the console, --metrics-jsonl, --tensorboard-dir and --wandb-project: remove it.": (
        "--log-progress",
    ),
    "--timing-log-level 1 with --timing-log-option all tells every rank's times: use these instead.": (
        "--log-straggler",
        "--straggler-minmax-count",
    ),
    "a run that fails is started again by its launcher, see examples/slurm: remove it.": (
        "--inprocess-restart",
        "--enable-ft-package",
    ),
}

NOT_SUPPORTED = {flag: remedy for remedy, flags in _BY_REMEDY.items() for flag in flags}
