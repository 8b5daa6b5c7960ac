"""Flags of Megatron-LM, and values of flags, that are not supported, with the reason and the remedy."""

_BY_REMEDY = {
    "it changes the architecture: remove it.": (
        "--rotary-interleaved --rotary-seq-len-interpolation-factor --window-size --fp32-residual-connection "
        "--mtp-num-layers --spec --moe-latent-size"
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
        "--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy "
        "--moe-token-dropping --moe-expert-rank-capacity-factor"
    ),
    "noise of the router's input would differ between layouts: remove it.": "--moe-input-jitter-eps",
    "the shared expert has no gate, which only Qwen2-MoE has: remove it.": "--moe-shared-expert-gate",
    "experts compute in the precision of the activations, whose rows need no padding: remove it.": (
        "--moe-router-padding-for-quantization --moe-router-padding-for-fp8"
    ),
    "no other microbatch overlaps with the exchange of tokens: use --moe-shared-expert-overlap, or remove it.": (
        "--overlap-moe-expert-parallel-comm --ep-overlap-early-attn-memory-release"
    ),
    "use --recompute-granularity selective with --recompute-modules moe instead.": "--moe-layer-recompute",
    "use --recompute-granularity selective with --recompute-modules moe_act instead.": (
        "--moe-paged-stash --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda "
        "--moe-paged-stash-buffer-size-factor-cpu"
    ),
    "a run does not change the architecture of its checkpoint: use tools/convert_checkpoint.py upcycle instead.": (
        "--moe-use-upcycling --moe-upcycling-granularity"
    ),
    "use --moe-token-dispatcher-type allgather or alltoall instead.": (
        "--moe-enable-deepep --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-deepep-num-sms "
        "--moe-hybridep-num-sms --moe-hybridep-pad-variable-tokens --moe-ncclep-zero-copy"
    ),
    "tokens are exchanged in the dtype of the activations: remove it.": (
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype"
    ),
    "the weights of all experts of a rank are one parameter in every kernel: remove it.": (
        "--moe-single-grouped-weight --moe-single-grouped-bias --moe-use-grouped-tensor "
        "--moe-use-legacy-grouped-gemm --moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size "
        "--use-grouped-gemm-for-shared-expert"
    ),
    "shard the experts with --expert-tensor-parallel-size instead.": (
        "--moe-extended-tp --expert-tensor-parallel-num-weight-shards"
    ),
    "every token is routed by its own logits: remove it.": "--moe-enable-routing-replay",
    "use --moe-router-force-load-balancing, which balances every layer exactly, instead.": "--moe-router-force-biased",
    "use --moe-router-load-balancing-type seq_aux_loss instead.": "--moe-router-quantile-balancing-ema",
    "the choice of experts would depend on the layout: use --moe-router-num-groups and --moe-router-group-topk"
    " instead.": ("--moe-router-topk-limited-devices"),
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
    "slow ranks are found without a flag, see --straggler-threshold: remove it.": (
        "--log-straggler --straggler-minmax-count"
    ),
    "the launcher restarts a failed run, see examples/slurm: remove it.": "--enable-ft-package",
}

NOT_SUPPORTED = {flag: remedy for remedy, flags in _BY_REMEDY.items() for flag in flags.split()}

NOT_SUPPORTED_VALUES = {
    "--moe-router-load-balancing-type": {
        "global_aux_loss": "its loss would depend on the number and the order of the microbatches: use seq_aux_loss.",
        "sinkhorn": "its choice of experts would depend on the layout: use seq_aux_loss.",
        "quantile_balancing": "its choice of experts would depend on the layout: use seq_aux_loss.",
    },
    "--moe-router-score-function": {"sqrtsoftplus": "no model of the catalog has it: use softmax or sigmoid."},
    "--moe-token-dispatcher-type": {
        "flex": "it needs the packages DeepEP, HybridEP or NCCL-EP: use alltoall.",
    },
}
"""Values of Megatron-LM that an accepted flag does not have, with the reason and the remedy."""
