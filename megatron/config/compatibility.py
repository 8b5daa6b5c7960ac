"""Flags of Megatron-LM that are accepted and change nothing."""

from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, words_of

# Why any other value of a field is refused. Fields that are not listed accept both forms, or have one value.
REFUSALS = {
    "use_rotary_position_embeddings": "every model here has rotary position embeddings",
    "position_embedding": "every model here has rotary position embeddings, not learned ones",
    "rotary_percent": "the whole head is rotated",
    "swiglu": "every MLP here is SwiGLU",
    "disable_bias_linear": "only --add-qkv-bias adds biases",
    "hidden_dropout": "dropout is not implemented",
    "attention_dropout": "dropout is not implemented",
    "use_flash_attn": "--attention-backend local chooses the reference kernel",
    "use_mcore_models": "there is one implementation of the model",
    "cross_entropy_loss_fusion": "there is one implementation of the loss",
    "attention_softmax_in_fp32": "every attention kernel computes its softmax in fp32",
    "calculate_per_token_loss": "a mean of microbatch means would depend on the layout",
    "te_rng_tracker": "training draws no random numbers",
    "use_cpu_initialization": "initial weights are the same in every layout",
    "accumulate_allreduce_grads_in_fp32": "--grad-reduce-in-bf16 accumulates gradients in bf16",
    "disable_gloo_process_groups": "one gloo process group of all ranks is needed beside NCCL's",
    "dist_ckpt_optim_fully_reshardable": "the optimizer state loads in every layout",
    "verify_integrity": "every file is compared with its digest before it is loaded",
    "log_timers_to_tensorboard": "TensorBoard and wandb receive the timers of --timing-log-level",
    "log_validation_ppl_to_tensorboard": "TensorBoard and wandb receive the validation perplexity",
    "create_attention_mask_in_dataloader": "attention kernels build the causal mask",
}

_DESCRIPTIVE = """
    use_rotary_position_embeddings position_embedding rotary_percent normalization swiglu disable_bias_linear
    hidden_dropout attention_dropout attention_softmax_in_fp32 calculate_per_token_loss main_params_dtype
    accumulate_allreduce_grads_in_fp32
"""
# Fields that describe the model and its numbers: the run is as they say.
DESCRIPTIVE = _DESCRIPTIVE.split()


@dataclass(frozen=True)
class CompatibilityConfig:
    """Accepted for Megatron-LM compatibility; no effect. They state what this code always does."""

    # What describes the model
    use_rotary_position_embeddings: bool = True
    """Accepted for Megatron-LM compatibility; no effect."""
    position_embedding: bool = False
    """Accepted for Megatron-LM compatibility as --no-position-embedding; no effect."""
    rotary_percent: float = 1.0
    """Accepted for Megatron-LM compatibility; no effect. The whole head is rotated."""
    normalization: Literal["RMSNorm"] = "RMSNorm"
    """Accepted for Megatron-LM compatibility; no effect."""
    swiglu: bool = True
    """Accepted for Megatron-LM compatibility; no effect."""
    disable_bias_linear: bool = True
    """Accepted for Megatron-LM compatibility; no effect. Linear layers have no bias, except with --add-qkv-bias."""
    hidden_dropout: float = 0.0
    """Accepted for Megatron-LM compatibility; no effect."""
    attention_dropout: float = 0.0
    """Accepted for Megatron-LM compatibility; no effect."""
    # Kernels
    use_flash_attn: bool = True
    """Accepted for Megatron-LM compatibility; no effect. --attention-backend chooses the kernel."""
    use_mcore_models: bool = True
    """Accepted for Megatron-LM compatibility; no effect."""
    cross_entropy_loss_fusion: bool = True
    """Accepted for Megatron-LM compatibility; no effect. The loss never allocates fp32 logits of a whole microbatch."""
    attention_softmax_in_fp32: bool = True
    """Accepted for Megatron-LM compatibility; no effect. The softmax is in fp32 (fp64 under --fp64)."""
    bias_dropout_fusion: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. There is no dropout."""
    masked_softmax_fusion: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. --attention-backend chooses the kernel."""
    persist_layer_norm: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. There is no LayerNorm."""
    cuda_graph_impl: Literal["none"] = "none"
    """Accepted for Megatron-LM compatibility; no effect. CUDA graphs are not used."""
    # Training
    calculate_per_token_loss: bool = True
    """Accepted for Megatron-LM compatibility; no effect. The loss is the mean over all unmasked tokens of the global
    batch."""
    rerun_mode: Literal["disabled", "validate_results"] = "disabled"
    """Accepted for Megatron-LM compatibility; no effect. --replay-interval runs microbatches twice to compare their
    bits."""
    te_rng_tracker: bool = True
    """Accepted for Megatron-LM compatibility; no effect. Training draws no random numbers."""
    use_cpu_initialization: bool = True
    """Accepted for Megatron-LM compatibility; no effect. Initial weights are the same in every layout; they are
    computed on the training device."""
    main_params_dtype: Literal["fp32"] = "fp32"
    """Accepted for Megatron-LM compatibility; no effect. Master weights are fp32."""
    # Communication and data
    accumulate_allreduce_grads_in_fp32: bool = True
    """Accepted for Megatron-LM compatibility; no effect. --grad-reduce-in-bf16 and --main-grads-dtype choose bf16, also
    beside this flag."""
    disable_gloo_process_groups: bool = True
    """Accepted for Megatron-LM compatibility; no effect. On GPUs NCCL sends tensors; one gloo group of
    all ranks sends objects."""
    create_attention_mask_in_dataloader: bool = False
    """Accepted for Megatron-LM compatibility as --no-create-attention-mask-in-dataloader; no effect. Attention kernels
    build the causal mask."""
    # Checkpoints
    ckpt_format: Literal["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"] = "torch_dist"
    """Accepted for Megatron-LM compatibility; no effect. A checkpoint is safetensors files and a manifest, and loads in
    every layout. Megatron-LM cannot read it; tools/convert_checkpoint.py from-megatron converts Megatron-LM's."""
    ckpt_fully_parallel_save: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. Every rank saves its own part."""
    dist_ckpt_optim_fully_reshardable: bool = True
    """Accepted for Megatron-LM compatibility; no effect. The optimizer state loads in every layout."""
    verify_integrity: bool = True
    """Accepted for Megatron-LM compatibility; no effect. Every file is compared with its digest before it is loaded."""
    # Logging
    log_timers_to_tensorboard: bool = True
    """Accepted for Megatron-LM compatibility; no effect. TensorBoard and wandb receive the timers of
    --timing-log-level."""
    log_validation_ppl_to_tensorboard: bool = True
    """Accepted for Megatron-LM compatibility; no effect. TensorBoard and wandb receive the validation perplexity."""

    def check(self) -> None:
        refused = [name for name in REFUSALS if changed_flags(self, name)]
        spelling = {name: " ".join(words_of(name, getattr(self, name))) for name in refused}
        if refused:
            raise ConfigError(
                *(f"{spelling[name]} is not supported, because {REFUSALS[name]}: remove it." for name in refused)
            )
