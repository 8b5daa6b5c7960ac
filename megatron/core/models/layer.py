"""One transformer layer: norm, attention, norm, MLP, with two residual connections.

    x = x + proj(attention(rotate(qkv(norm(x)))))       x: the residual stream [s/(cp tp), b, h]
    x = x + fc2(swiglu(fc1(norm(x))))                   or the experts of a token in place of fc1, SwiGLU and fc2

Shapes: ``s`` sequence length, ``b`` sequences, ``h`` hidden size, ``n`` query heads in ``g`` groups, ``d`` head size,
``f`` MLP width. Context parallelism divides ``s`` by ``cp``, sequence parallelism by ``tp`` outside parallel regions;
without it read ``s/(cp tp)`` as ``s/cp``. Column-parallel layers (qkv, fc1) gather the sequence and divide the width,
row-parallel ones (proj, fc2) sum over the ranks and divide the sequence again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.context_parallel import ContextParallel
from megatron.core.kernels.selection import LayerKernels
from megatron.core.key_value_cache import KeyValueCache
from megatron.core.moe.layer import ExpertParallel, Experts, MoELayer, Router
from megatron.core.ops.attention import (
    Attention,
    AttentionKernel,
    AttentionMask,
    AttentionShape,
    fused_attention,
    masks_of,
)
from megatron.core.ops.documents import AttentionSpans
from megatron.core.ops.fp8 import DelayedQuantization
from megatron.core.ops.norm import rms_norm
from megatron.core.ops.rope import apply_rotary
from megatron.core.parameter import constant
from megatron.core.precision import QuantizedActivation
from megatron.core.tensor_parallel.layers import (
    Bias,
    ColumnParallelLinear,
    LayerContext,
    QuantizingLinear,
    RowParallelLinear,
    SwiGLULinear,
)


class LayerProvider(Protocol):
    """Builds the linear layers of a transformer layer and the norms before them: our own, or a backend's. Weights have
    the same names, facts and layout in each."""

    def norm_linear(
        self, norm: str, name: str, output_sections: Sequence[int], config: TransformerConfig, context: "BuildContext"
    ) -> nn.Module:
        """The norm ``norm`` and the column-parallel layer ``name`` after it, on the residual stream."""

    def row_linear(self, name: str, input_size: int, config: TransformerConfig, context: "BuildContext") -> nn.Module:
        """A row-parallel layer into the residual stream, a :class:`QuantizingLinear`."""


@dataclass(frozen=True)
class BuildContext(LayerContext):
    """:class:`LayerContext` with the kernels, context parallelism, and the provider of linear layers."""

    attention_kernel: AttentionKernel
    provider: LayerProvider = field(default_factory=lambda: LocalProvider(), kw_only=True)
    context_parallel: ContextParallel = field(default_factory=ContextParallel, kw_only=True)
    kernels: LayerKernels = field(default_factory=LayerKernels, kw_only=True)
    experts: ExpertParallel | None = field(default=None, kw_only=True)
    """The objects that mixture-of-experts layers share; None for a model without experts."""
    cache: KeyValueCache | None = field(default=None, kw_only=True)
    """Keys and values of earlier tokens, for generation; None: every pass has whole sequences."""

    build_layer: "BuildLayer" = field(default_factory=lambda: TransformerLayer, kw_only=True)
    """Makes layer number ``n``, which is called as a :class:`TransformerLayer`."""

    def attention(self, layer: int, has_chunks: bool) -> Attention:
        """The attention of layer number ``layer``, with chunks or without."""
        if self.cache is not None:
            return self.cache.attention(has_chunks, self.attention_kernel)
        return self.context_parallel.attention(layer, self.attention_kernel)

    def of_layer(self, layer: int, num_layers: int) -> "BuildContext":
        """The context of one layer: the first and last layers may be excluded from FP8."""
        if self.fp8 is None or self.fp8.includes(layer, num_layers):
            return self
        return replace(self, fp8=None)


BuildLayer = Callable[[int, TransformerConfig, BuildContext], nn.Module]


class RMSNorm(nn.Module):
    """RMSNorm with a gain, replicated over the tensor-parallel ranks: ``[..., h] -> [..., h]``."""

    def __init__(
        self,
        name: str,
        size: int,
        config: TransformerConfig,
        context: BuildContext,
        gradient_is_partial: bool | None = None,
    ) -> None:
        super().__init__()
        self.epsilon, self.is_zero_centered = config.norm_epsilon, config.apply_layernorm_1p
        self.kernel = context.kernels.rms_norm
        info = context.gain(name, size, self.is_zero_centered, gradient_is_partial, config.width_mult)
        self.weight = context.empty_parameter(info)

    def forward(self, x: Tensor, quantization: DelayedQuantization | None = None) -> Tensor | QuantizedActivation:
        # [..., h], for a linear layer with a quantization as FP8 numbers alone
        return rms_norm(x, self.weight, self.epsilon, self.kernel, self.is_zero_centered, quantization)


class HeadNorm(nn.Module):
    """RMSNorm of every query head and every key head, each with one gain ``[d]`` for all heads (QK-norm; Henry et al.,
    arXiv 2010.04245, with RMSNorm as in Qwen3)."""

    def __init__(self, name: str, shape: AttentionShape, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        self.shape = shape
        # Each tensor-parallel rank has some of the heads, so its gradient of a gain is a partial sum.
        is_partial = context.parallel.size > 1
        self.q_layernorm = RMSNorm(f"{name}.q_layernorm", shape.head_size, config, context, is_partial)
        self.k_layernorm = RMSNorm(f"{name}.k_layernorm", shape.head_size, config, context, is_partial)

    def forward(self, qkv: Tensor) -> Tensor:  # [s/cp, b, (n + 2g) d / tp]
        shape = self.shape
        heads = qkv.unflatten(-1, (-1, shape.head_size))  # [s/cp, b, (n + 2g) / tp, d]
        query, key, value = heads.split((shape.query_heads, shape.key_value_heads, shape.key_value_heads), dim=2)
        # The statistics are those of one head: [s/cp, b, n / tp, 1] and [s/cp, b, g / tp, 1].
        normed = (self.q_layernorm(query), self.k_layernorm(key), value)
        return torch.cat(normed, dim=2).flatten(2)  # [s/cp, b, (n + 2g) d / tp]


class HeadL2Norm(nn.Module):
    """RMSNorm without a gain of every query head and every key head (Llama 4). It does not change with a rotation, so
    it may come before it."""

    def __init__(self, shape: AttentionShape, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        self.shape, self.epsilon, self.kernel = shape, config.norm_epsilon, context.kernels.rms_norm

    def forward(self, qkv: Tensor) -> Tensor:  # [s/cp, b, (n + 2g) d / tp]
        shape = self.shape
        heads = qkv.unflatten(-1, (-1, shape.head_size))  # [s/cp, b, (n + 2g) / tp, d]
        query_key, value = heads.split((shape.query_heads + shape.key_value_heads, shape.key_value_heads), dim=2)
        normed = rms_norm(query_key, qkv.new_ones(shape.head_size), self.epsilon, self.kernel)
        return torch.cat((cast(Tensor, normed), value), dim=2).flatten(2)  # [s/cp, b, (n + 2g) d / tp]


class NormLinear(nn.Module):
    """RMSNorm and the column-parallel GEMM after it; under delayed FP8 scaling RMSNorm writes quantised numbers."""

    last_linear = "linear"

    def __init__(self, norm: RMSNorm, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor) -> Tensor:  # [s/(cp tp), b, h]
        normed = self.norm(x, cast(QuantizingLinear, self.linear).input_quantization)  # [s/(cp tp), b, h]
        output: Tensor = self.linear(normed)  # [s/cp, b, out/tp]
        return output


class LocalProvider:
    """The layers of :mod:`megatron.core.tensor_parallel.layers`."""

    norm: ClassVar[type[RMSNorm]] = RMSNorm
    column: ClassVar[type[ColumnParallelLinear]] = ColumnParallelLinear
    row: ClassVar[type[RowParallelLinear]] = RowParallelLinear

    def norm_linear(
        self, norm: str, name: str, output_sections: Sequence[int], config: TransformerConfig, context: BuildContext
    ) -> nn.Module:
        weight = context.column_weight(
            name, config.hidden_size, output_sections, config.hidden_init_std, config.width_mult
        )
        return NormLinear(self.norm(norm, config.hidden_size, config, context), self.column(weight, context))

    def row_linear(self, name: str, input_size: int, config: TransformerConfig, context: BuildContext) -> nn.Module:
        weight = context.row_weight(name, input_size, config.hidden_size, config.residual_init_std, config.width_mult)
        return self.row(weight, context)


@dataclass(frozen=True)
class SequencePositions:
    """The tables and ranges that attention computes with, of the positions of a microbatch."""

    rotary: Tensor
    """Rotations of this rank's positions, ``[s/cp, 1 or b, 1, d/2]``, complex."""
    spans: AttentionSpans | None = None
    """The ranges within which attention without chunks is causal; None: the sequences."""
    chunks: AttentionSpans | None = None
    """The ranges within which attention with chunks is causal."""
    query_scales: Tensor | None = None
    """Scales of the queries of layers without rotary position embedding ``[s/cp, 1 or b, 1]``; None: 1."""


class RotaryPositions(nn.Module):
    """Rotary position embedding, and attention inside chunks if the model has them."""

    def __init__(self, shape: AttentionShape, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        self.rotated_size, self.rotate = shape.rotated_size, context.kernels.rotate
        self.qk_l2_norm = HeadL2Norm(shape, config, context) if config.qk_l2_norm else nn.Identity()
        self.has_chunks = config.attention_chunk_size is not None

    def forward(self, qkv: Tensor, positions: SequencePositions) -> Tensor:  # [s/cp, b, (n + 2g) d / tp]
        return apply_rotary(self.qk_l2_norm(qkv), positions.rotary, self.rotated_size, self.rotate)  # in place

    def spans(self, positions: SequencePositions) -> AttentionSpans | None:
        return positions.chunks if self.has_chunks else positions.spans


class NoPositions(nn.Module):
    """No position embedding (NoPE; Kazemnejad et al., arXiv 2305.19466): attention over whole sequences whose scores
    depend on positions by the scales of queries alone."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.query_size = shape.query_heads * shape.head_size

    def forward(self, qkv: Tensor, positions: SequencePositions) -> Tensor:  # [s/cp, b, (n + 2g) d / tp]
        scales = positions.query_scales
        # Queries are multiplied by real scales where a rotation would multiply by complex numbers: in place, and so is
        # the gradient.
        return qkv if scales is None else apply_rotary(qkv, scales, self.query_size, Tensor.mul_)

    def spans(self, positions: SequencePositions) -> AttentionSpans | None:
        return positions.spans


class SelfAttention(nn.Module):
    """Causal grouped-query attention; the heads are divided over the tensor-parallel ranks."""

    segments: ClassVar = {"layernorm": "norm_qkv", "core_attn": "attend_proj"}

    def __init__(self, layer: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        name, tp = f"layers.{layer}.self_attention", context.parallel.size
        self.shape = AttentionShape(config.num_attention_heads // tp, config.num_query_groups // tp, config.kv_channels)
        # One weight for all three, so that the input is gathered and read once.
        sections = (config.query_size, config.key_value_size, config.key_value_size)
        self.norm_qkv = context.provider.norm_linear(
            f"layers.{layer}.input_layernorm", f"{name}.linear_qkv", sections, config, context
        )
        self.qkv_bias: nn.Module = nn.Identity()
        if config.add_qkv_bias:
            self.qkv_bias = Bias(f"{name}.linear_qkv", sections, context, config.width_mult)
        self.qk_norm = HeadNorm(name, self.shape, config, context) if config.qk_layernorm else nn.Identity()
        has_rope = config.rope_layers()[layer]
        self.embed_positions = RotaryPositions(self.shape, config, context) if has_rope else NoPositions(self.shape)
        self.attend_proj = AttentionProjection(
            self.shape,
            context.attention(layer, has_chunks=has_rope and config.attention_chunk_size is not None),
            masks_of(config)[layer],
            attention_sinks(name, config, context),
            context.provider.row_linear(f"{name}.linear_proj", config.query_size, config, context),
        )

    def forward(self, x: Tensor, positions: SequencePositions) -> Tensor:  # [s/(cp tp), b, h]
        qkv = self.norm_qkv(x)  # [s/cp, b, (n + 2g) d / tp]: queries, keys, values
        qkv = self.qk_norm(self.qkv_bias(qkv))  # identities in Llama
        qkv = self.embed_positions(qkv, positions)  # rotates queries and keys in place
        output: Tensor = self.attend_proj(qkv, self.embed_positions.spans(positions))  # [s/(cp tp), b, h]
        return output


def attention_sinks(name: str, config: TransformerConfig, context: BuildContext) -> Tensor | None:
    """A score of each head of this rank, ``[n / tp, 1]``, beside those of the keys (arXiv 2309.17453, section 3.3)."""
    heads = config.num_attention_heads
    if config.softmax_type == "learnable":
        return context.parameter(f"{name}.softmax_offset", (heads, 1), constant(0.0), is_divided=True)
    if config.softmax_type == "off-by-one":
        return torch.zeros(heads // context.parallel.size, 1, device=context.device)
    return None


class AttentionProjection(nn.Module):
    """Attention on rotated queries and keys, and the row-parallel GEMM after it."""

    last_linear = "linear"

    def __init__(
        self,
        shape: AttentionShape,
        attention: Attention,
        mask: AttentionMask,
        sinks: Tensor | None,
        linear_proj: nn.Module,
    ) -> None:
        super().__init__()
        self.shape, self.attention, self.mask, self.linear = shape, attention, mask, linear_proj
        self.sinks = sinks

    def forward(self, qkv: Tensor, spans: AttentionSpans | None = None) -> Tensor:  # [s/cp, b, (n + 2g) d / tp]
        attended = fused_attention(qkv, self.shape, self.attention, spans, self.mask, self.sinks)  # [s/cp, b, n d / tp]
        output: Tensor = self.linear(attended)  # [s/(cp tp), b, h]
        return output


class MLP(nn.Module):
    """SwiGLU MLP; gate and up projections are one column-parallel weight."""

    segments: ClassVar = {"layernorm": "norm_fc1", "mlp_act": "swiglu_fc2", "mlp": ""}
    last_linear = "swiglu_fc2"

    def __init__(self, layer: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        name, width = f"layers.{layer}.mlp", config.ffn_hidden_size
        self.norm_fc1 = context.provider.norm_linear(
            f"layers.{layer}.pre_mlp_layernorm", f"{name}.linear_fc1", (width, width), config, context
        )
        linear_fc2 = context.provider.row_linear(f"{name}.linear_fc2", width, config, context)
        self.swiglu_fc2 = SwiGLULinear(context.kernels.swiglu, linear_fc2)

    def forward(self, x: Tensor) -> Tensor:  # [s/(cp tp), b, h]
        gate_up = self.norm_fc1(x)  # [s/cp, b, 2 f / tp]: gate, then up
        output: Tensor = self.swiglu_fc2(gate_up)  # [s/(cp tp), b, h]
        return output


class SharedExperts(nn.Module):
    """The SwiGLU MLP of a mixture-of-experts layer that processes every token."""

    last_linear = "swiglu_fc2"

    def __init__(self, name: str, width: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        hidden, width_mult = config.hidden_size, config.width_mult
        fc1 = context.column_weight(f"{name}.linear_fc1", hidden, (width, width), config.hidden_init_std, width_mult)
        fc2 = context.row_weight(f"{name}.linear_fc2", width, hidden, config.residual_init_std, width_mult)
        self.linear_fc1 = ColumnParallelLinear(fc1, context)
        self.swiglu_fc2 = SwiGLULinear(context.kernels.swiglu, RowParallelLinear(fc2, context))

    def forward(self, x: Tensor) -> Tensor:  # [s/(cp tp), b, h]
        output: Tensor = self.swiglu_fc2(self.linear_fc1(x))  # [s/(cp tp), b, h]
        return output


def moe_layer(layer: int, config: TransformerConfig, context: BuildContext) -> MoELayer:
    """The mixture-of-experts layer in the place of the MLP of layer number ``layer``."""
    name, parallel, shared_width = f"layers.{layer}.mlp", context.experts, config.moe_shared_expert_intermediate_size
    assert parallel is not None, "a model with experts needs their ranks"
    return MoELayer(
        RMSNorm(f"layers.{layer}.pre_mlp_layernorm", config.hidden_size, config, context),
        Router(f"{name}.router", layer, config, context, parallel),
        parallel.dispatcher,
        Experts(f"{name}.experts", config, context, context.kernels, parallel.shard),
        SharedExperts(f"{name}.shared_experts", shared_width, config, context) if shared_width else None,
        parallel.overlaps_shared_experts,
    )


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer; ``number`` is its global number, from 0."""

    last_linear = "mlp"

    def __init__(self, number: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__()
        self.self_attention = SelfAttention(number, config, context)
        is_moe = config.moe_layers()[number]
        self.mlp = moe_layer(number, config, context) if is_moe else MLP(number, config, context)

    def forward(self, x: Tensor, positions: SequencePositions) -> Tensor:  # [s/(cp tp), b, h]
        x = x + self.self_attention(x, positions)  # [s/(cp tp), b, h]
        return x + self.mlp(x)  # [s/(cp tp), b, h]
