"""Flags of Megatron-LM that are not supported, with the reason and the remedy."""

_BY_REMEDY = {
    "it changes the architecture: remove it.": (
        "--rotary-interleaved --rotary-seq-len-interpolation-factor --window-size --fp32-residual-connection "
        "--mtp-num-layers --spec"
    ),
    "the optimizer state is always on the training device: remove it.": (
        "--optimizer-cpu-offload --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d"
    ),
    "it is spelled --muon-nesterov.": "--muon-use-nesterov",
    "the products of the Newton-Schulz iteration are torch's: remove it.": "--muon-use-syrk",
    "a loss or gradient that is not finite stops the run, and --clip-grad bounds large ones: remove it.": (
        "--check-for-large-grads --check-for-spiky-loss"
    ),
    "all model replicas start from the same weights: remove it.": "--data-parallel-random-init",
    "use fp32, --bf16, --fp8-format, --fp16 or --fp64 instead.": "--fp4-format",
    "activations are offloaded by whole layers: use --cpu-offloading-num-layers instead.": (
        "--fine-grained-activation-offloading"
    ),
    "use tensor, sequence, context, pipeline and data parallelism instead.": (
        "--overlap-param-gather-with-optimizer-step"
    ),
    "gradients are summed over all ranks and divided by the number of tokens once: remove it.": (
        "--ddp-average-in-collective"
    ),
    "the all-reduce of input gradients always overlaps with the weight gradient: remove it.": (
        "--no-async-tensor-model-parallel-allreduce"
    ),
    "FP8 scales are updated in every step: remove it.": "--fp8-interval",
    "--tp-comm-overlap has no settings, and Transformer Engine uses its defaults: remove it.": "--tp-comm-overlap-cfg",
    "use PyTorch's FSDP2 with --use-torch-fsdp2 instead.": "--use-megatron-fsdp",
    "use --no-torch-fsdp2-reshard-after-forward instead.": "--torch-fsdp2-no-reshard-after-forward",
    "delay weight gradients with --pipeline-schedule zb-h1 or zb-v instead.": (
        "--delay-wgrad-compute --defer-embedding-wgrad-compute"
    ),
    "no token is dropped, because dropping by rank would make the result depend on the layout: remove it.": (
        "--moe-expert-capacity-factor"
    ),
    "the cached sample order is always memory-mapped: remove it.": (
        "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap"
    ),
    "use --tokenizer-type and --tokenizer-model instead.": "--vocab-file --merge-file --padded-vocab-size",
    "evaluation uses --eval-iters batches of one validation set: remove it.": (
        "--full-validation --multiple-validation-sets"
    ),
    "checkpoints have one format, load in every layout, and are saved in the background with --async-save: "
    "remove it.": (
        "--auto-detect-ckpt-format --ckpt-convert-format --ckpt-fully-parallel-load --use-persistent-ckpt-worker "
        "--async-strategy --ckpt-assume-constant-structure --dist-ckpt-strictness --dist-ckpt-workers "
        "--non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-local-ckpt-dir"
    ),
    "use --profile with --use-pytorch-profiler, which records allocations.": (
        "--record-memory-history --memory-snapshot-path"
    ),
    "use --metrics-jsonl, --tensorboard-dir or --wandb-project instead.": "--log-progress",
    "use --timing-log-level 1 with --timing-log-option all, which reports the times of every rank.": (
        "--log-straggler --straggler-minmax-count"
    ),
    "the launcher restarts a failed run, see examples/slurm: remove it.": "--inprocess-restart --enable-ft-package",
}

NOT_SUPPORTED = {flag: remedy for remedy, flags in _BY_REMEDY.items() for flag in flags.split()}
