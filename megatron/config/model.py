"""Flags for the architecture and for mixture of experts, and the concrete architecture they resolve to."""

import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from megatron.architectures.catalog import PRESET_VOCABULARIES, PRESETS, ModelName
from megatron.architectures.features import ArchitectureFeatures
from megatron.architectures.layer_pattern import (
    PatternError,
    describe_layers,
    describe_nope_layers,
    describe_window_layers,
    parse_layer_pattern,
    parse_nope_pattern,
    parse_window_pattern,
)
from megatron.architectures.transformer_config import YARN_FIELDS, TransformerConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of


@dataclass(frozen=True)
class ModelSizes:
    """The preset, and sizes, of which those that are missing follow from others."""

    model: ModelName | None = None
    """Preset that sets the flags of this group; explicit flags override it."""
    num_layers: int | None = None
    """Number of transformer layers (required without --model)."""
    hidden_size: int | None = None
    """Hidden size (required without --model)."""
    ffn_hidden_size: int | None = None
    """Hidden size of the MLP, also of dense layers beside MoE layers (default: 8/3 of --hidden-size, rounded down to a
    multiple of 64)."""
    num_attention_heads: int | None = None
    """Number of query heads (required without --model)."""
    group_query_attention: bool = True
    """Use --num-query-groups. --no-group-query-attention requires one key-value head per query head."""
    num_query_groups: int | None = None
    """Number of key-value heads (default: --num-attention-heads)."""
    kv_channels: int | None = None
    """Size of a head (default: --hidden-size / --num-attention-heads)."""
    max_position_embeddings: int | None = None
    """Longest sequence that the model supports; at least --seq-length (default: --seq-length, with YaRN the original
    length times the factor)."""


@dataclass(frozen=True)
class ModelConfig(ArchitectureFeatures, ModelSizes):
    """Architecture: a preset, explicit sizes, or a preset with some sizes changed."""

    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times --tensor-model-parallel-size."""
    # Implementations; results differ by rounding alone
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Attention kernel: auto chooses the fastest available one, with documents one that computes all of them in one
    call (docs/kernels.md), flash chooses FlashAttention, fused chooses cuDNN's, unfused and local choose the PyTorch
    reference."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of the linear layers of the transformer layers and of the norms before them: local is this code,
    transformer_engine needs that package and a GPU. Checkpoints are the same; see docs/precision.md."""

    def check(self) -> None:
        require_at_least(1, values_of(self, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"))
        require_at_least(1, values_of(self, "num_query_groups", "kv_channels", "max_position_embeddings"))
        require_at_least(1, values_of(self, "rope_scaling_original_length", "make_vocab_size_divisible_by"))
        require_at_least(1, values_of(self, "attention_chunk_size", "attention_temperature_floor"))
        require_at_least(1, values_of(self, "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"))
        require_at_least(1, values_of(self, "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"))
        require_positive(values_of(self, "rotary_base", "rope_scaling_factor", "moe_router_topk_scaling_factor"))
        require_positive(values_of(self, "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"))
        require_positive(values_of(self, "attention_temperature_scale", "attn_logit_softcapping"))
        require_at_least(1, values_of(self, "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"))
        require_positive(values_of(self, "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim"))
        require_positive(values_of(self, "yarn_attention_factor"))
        require_at_least(0, values_of(self, "norm_epsilon", "init_method_std", "num_experts", "mtp_num_layers"))
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        if low > high:
            raise ConfigError(
                f"--rope-scaling-low-freq-factor {low:g} is above --rope-scaling-high-freq-factor {high:g}: lower "
                "--rope-scaling-low-freq-factor, or raise --rope-scaling-high-freq-factor."
            )
        require_at_least(1, values_of(self, "mup_base_hidden_size"))
        require_positive(values_of(self, "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim"))
        require_at_least(0, values_of(self, "mup_attn_scale_power"))
        names = [field.name for field in fields(self) if field.name.startswith("mup_")]
        require_flag("--use-mup", self.use_mup, changed_flags(self, *names))

    def resolve(self, vocab_size: int, tensor_parallel_size: int, seq_length: int) -> TransformerConfig:
        """The architecture for a vocabulary of ``vocab_size`` ids.

        Raises :class:`ConfigError` for a size that is missing or not divisible.
        """
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.num_layers is None or hidden is None or heads is None:
            sizes = values_of(self, "num_layers", "hidden_size", "num_attention_heads")
            missing = [flag for flag, value in sizes.items() if value is None]
            raise ConfigError(
                *(f"{flag} is missing: set it, or choose a preset such as --model llama3-8b." for flag in missing)
            )
        if self.kv_channels is None and hidden % heads:
            raise ConfigError(
                f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}: change one of them, or "
                "set the head size with --kv-channels."
            )
        if (self.kv_channels or hidden // heads) % 2:
            raise ConfigError(
                f"The head size {self.kv_channels or hidden // heads} is odd, but the rotary embedding needs an even "
                "one: change --kv-channels, or --hidden-size / --num-attention-heads."
            )
        # g key-value heads, each for n / g query heads
        groups = heads if self.num_query_groups is None else self.num_query_groups
        if not self.group_query_attention and groups != heads:
            raise ConfigError(
                f"--no-group-query-attention contradicts --num-query-groups {groups}: remove one of them."
            )
        if heads % groups:
            raise ConfigError(
                f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: change one of them."
            )
        self._check_yarn()
        positions = self.max_position_embeddings or seq_length
        factor, original = self.yarn_rotary_scaling_factor, self.yarn_original_max_position_embeddings
        if self.max_position_embeddings is None and factor is not None and original is not None:
            positions = int(factor * original)  # the length for which YaRN is meant
        if positions < seq_length:
            raise ConfigError(
                f"--max-position-embeddings {positions} is below --seq-length {seq_length}: raise "
                "--max-position-embeddings, or lower --seq-length."
            )
        # Every tensor-parallel rank has equally many rows of the embedding: [v_padded / tp, h].
        unit = self.make_vocab_size_divisible_by * tensor_parallel_size
        ffn = self.ffn_hidden_size or int(hidden * 8 / 3) // 64 * 64 or 64
        resolved: dict[str, Any] = {
            "ffn_hidden_size": ffn,
            "num_query_groups": groups,
            "kv_channels": self.kv_channels or hidden // heads,
            "vocab_size": vocab_size,
            "padded_vocab_size": -(-vocab_size // unit) * unit,
            "max_position_embeddings": positions,
            "num_experts": self.num_experts or None,
            "no_rope_freq": self.canonical_nope_pattern,
            "window_size": self.canonical_window,
            "window_attn_skip_freq": self.canonical_window_pattern,
        }
        if self.num_experts:
            resolved["moe_ffn_hidden_size"] = self.moe_ffn_hidden_size or ffn
            resolved["moe_layer_freq"] = self.canonical_layer_pattern
        if self.use_mup:
            base = resolved["mup_base_hidden_size"] = self.mup_base_hidden_size or hidden
            resolved["mup_output_mult"] = base / hidden if self.mup_output_mult is None else self.mup_output_mult
        # Flags with the name of a field are taken over; those above need a value.
        known = {field.name for field in fields(TransformerConfig)}
        return TransformerConfig(**{name: value for name, value in vars(self).items() if name in known} | resolved)

    def _check_yarn(self) -> None:
        yarn = "--position-embedding-type yarn"
        if self.position_embedding_type != "yarn":
            return require_flag(yarn, False, changed_flags(self, *YARN_FIELDS))
        needed = values_of(self, "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings")
        for flag, value in needed.items():
            if value is None:
                raise ConfigError(f"{yarn} needs {flag}: add it.")
        if self.use_rope_scaling:
            raise ConfigError(f"--use-rope-scaling and {yarn} exclude each other: add --no-use-rope-scaling.")
        if (self.yarn_mscale is None) != (self.yarn_mscale_all_dim is None):
            raise ConfigError("--yarn-mscale and --yarn-mscale-all-dim need each other: add the other, or remove both.")
        if self.yarn_mscale is not None and self.yarn_attention_factor is not None:
            raise ConfigError("--yarn-attention-factor and --yarn-mscale exclude each other: remove one of them.")
        if self.yarn_beta_fast < self.yarn_beta_slow:
            raise ConfigError(
                f"--yarn-beta-fast {self.yarn_beta_fast:g} is below --yarn-beta-slow {self.yarn_beta_slow:g}: raise "
                "--yarn-beta-fast, or lower --yarn-beta-slow."
            )
        if self.rotary_base <= 1:
            raise ConfigError(f"--rotary-base {self.rotary_base:g} has no falling frequencies for {yarn}: raise it.")
        length = self.yarn_original_max_position_embeddings
        assert length is not None
        if length <= 2 * math.pi * self.yarn_beta_slow:
            raise ConfigError(
                f"No frequency turns --yarn-beta-slow {self.yarn_beta_slow:g} times in "
                f"--yarn-original-max-position-embeddings {length}: lower --yarn-beta-slow, or raise "
                "--yarn-original-max-position-embeddings."
            )
        return None

    @property
    def canonical_layer_pattern(self) -> str:
        """``--moe-layer-freq``, equal for equal layers; raises :class:`ConfigError` for a text that is no pattern."""
        assert self.num_layers is not None
        try:
            return describe_layers(parse_layer_pattern(self.moe_layer_freq, self.num_layers))
        except PatternError as error:
            raise ConfigError(
                f"--moe-layer-freq {self.moe_layer_freq} {error}: give a number, or a list with 1 for every MoE layer "
                'and 0 for every dense layer, such as "([0]*1+[1]*3)*2" for 8 layers.'
            ) from None

    @property
    def canonical_nope_pattern(self) -> str:
        """``--no-rope-freq``, equal for equal layers; raises :class:`ConfigError` for a text that is no pattern."""
        assert self.num_layers is not None
        try:
            return describe_nope_layers(parse_nope_pattern(self.no_rope_freq, self.num_layers))
        except PatternError as error:
            raise ConfigError(
                f"--no-rope-freq {self.no_rope_freq} {error}: give a number, or a list with 1 for every layer without "
                'rotary position embedding and 0 for every other, such as "([0]*3+[1])*2" for 8 layers.'
            ) from None

    @property
    def canonical_window_pattern(self) -> str:
        """``--window-attn-skip-freq``, equal for equal layers; raises :class:`ConfigError` for a text that is no
        pattern, or has no layer with a window."""
        assert self.num_layers is not None
        flag = f"--window-attn-skip-freq {self.window_attn_skip_freq}"
        try:
            has_window = parse_window_pattern(self.window_attn_skip_freq, self.num_layers)
        except PatternError as error:
            raise ConfigError(
                f"{flag} {error}: give a number, or a list with 1 for every layer with a window and 0 for every other, "
                'such as "([1]*5+[0])*2" for 12 layers.'
            ) from None
        if self.window_size is None:
            require_flag("--window-size", False, changed_flags(self, "window_attn_skip_freq"))
        elif not any(has_window):
            raise ConfigError(f"{flag} leaves no layer with the window of --window-size: change it, or remove both.")
        return describe_window_layers(has_window)

    @property
    def canonical_window(self) -> str | None:
        """``--window-size`` without spaces and parentheses; raises :class:`ConfigError` for another text."""
        if self.window_size is None:
            return None
        match = re.fullmatch(r"\(?\s*(\d{1,18})\s*,\s*0\s*\)?", self.window_size)
        if match is None:
            raise ConfigError(
                f"--window-size {self.window_size} is not LEFT,0: give the number of keys before a query's own, such "
                "as 4095,0; attention is causal, so that it has none after."
            )
        return f"{int(match[1])},0"

    @property
    def preset_vocab_size(self) -> int | None:
        """Ids of the vocabulary of ``--model``; None without a preset and for ``tiny``, which has no tokenizer."""
        return None if self.model is None else PRESET_VOCABULARIES.get(self.model)

    @classmethod
    def of(cls, architecture: TransformerConfig) -> "ModelConfig":
        """The flags that resolve to ``architecture`` (but for the vocabulary, which is the tokenizer's)."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in asdict(architecture).items() if name in known})


def preset(name: str) -> ModelConfig:
    """The flags that ``--model name`` sets."""
    return ModelConfig(model=name, **PRESETS[name])


LoadBalancingType = Literal["none", "aux_loss", "seq_aux_loss"]
TokenDispatcherType = Literal["allgather", "alltoall"]


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: balance of the load and exchange of tokens. The architecture has --num-experts and sizes."""

    # Balance of the load
    moe_router_load_balancing_type: tuple[LoadBalancingType, ...] = ("aux_loss",)
    """Auxiliary loss that balances the load of the experts, with the coefficient --moe-aux-loss-coeff: of every
    sequence (seq_aux_loss), or of every microbatch (aux_loss), whose result depends on --micro-batch-size. Several need
    as many coefficients."""
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """Coefficient of every --moe-router-load-balancing-type (1e-2 is common). 0 is no auxiliary loss."""
    moe_z_loss_coeff: float | None = None
    """Coefficient of the router's z-loss, the square of the logits' log-sum-exp (ST-MoE: 1e-3)."""
    moe_router_bias_update_rate: float = 1e-3
    """Amount by which a step changes the bias of --moe-router-enable-expert-bias: up for an expert with fewer tokens
    than the mean, down for one with more."""
    moe_router_force_load_balancing: bool = False
    """Benchmarks only: choose the experts in turn, not by their scores. The model does not learn to route."""
    # Exchange of tokens between expert-parallel ranks
    moe_token_dispatcher_type: TokenDispatcherType = "allgather"
    """Exchange of tokens between expert-parallel ranks: all tokens to all ranks (allgather), or every token to the
    ranks of its experts (alltoall), which sends less if --moe-router-topk is below --expert-model-parallel-size."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared expert while the tokens are exchanged."""
    # Reports, and flags without effect
    moe_per_layer_logging: bool = False
    """Report the balance of the load of every MoE layer."""
    overlap_dispatch_backward_with_experts_wgrad: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The gradients of the tokens are always sent back
    during a weight gradient of the experts."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Accepted for Megatron-LM compatibility; no effect. The router computes in fp32, and in fp64 under --fp64."""
    moe_grouped_gemm: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The kernel is chosen and logged."""
    moe_permute_fusion: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The kernel is chosen and logged."""
    moe_router_fusion: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The kernel is chosen and logged."""

    def check(self) -> None:
        require_at_least(0, values_of(self, "moe_z_loss_coeff"))
        for coefficient in self.moe_aux_loss_coeff:
            require_at_least(0, {"--moe-aux-loss-coeff": coefficient})
        require_positive(values_of(self, "moe_router_bias_update_rate"))
