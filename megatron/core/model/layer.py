"""One Llama layer: norm, attention, norm, MLP, with two residual connections.

Activations are ``[s, b, h]``, or ``[s/tp, b, h]`` between the parallel regions under sequence parallelism, where
``s`` are the positions of this context-parallel rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from megatron.config.activations import ActivationConfig, RecomputeModule
from megatron.config.model import LlamaConfig
from megatron.core.communication import Communicator
from megatron.core.context_parallel.attention import ContextParallel
from megatron.core.kernels.selection import LayerKernels
from megatron.core.ops.attention import AttentionShape, fused_attention
from megatron.core.ops.attention_kernels import AttentionKernel
from megatron.core.ops.documents import Documents
from megatron.core.ops.norm import rms_norm
from megatron.core.ops.swiglu import swiglu
from megatron.core.parameter import ParameterInfo, sharded_boxes
from megatron.core.recompute import Piece, in_sequence, recompute
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear


class LayerParts(Protocol):
    """Makes a transformer layer's linear layers, each a :class:`~megatron.core.recompute.Piece`, and the norms before
    them. Whoever makes them, weights have the same names, facts and layout."""

    def norm(self, name: str, size: int, epsilon: float, context: "BuildContext") -> nn.Module:
        """The norm ``name`` of ``size`` features."""

    def column(
        self,
        name: str,
        input_size: int,
        output_sections: Sequence[int],
        context: "BuildContext",
        init_std: float,
        norm: str,
        epsilon: float,
    ) -> nn.Module:
        """A column-parallel layer behind :meth:`norm`; it may contain what ``norm`` does, which is nothing then."""

    def row(self, name: str, input_size: int, output_size: int, context: "BuildContext", init_std: float) -> nn.Module:
        """A row-parallel layer."""


@dataclass(frozen=True)
class BuildContext(LayerContext):
    """What a model is built in: that of its layers, the kernels that compute, the ranks that share a sequence, and what
    is kept for the backward pass."""

    attention_kernel: AttentionKernel
    parts: LayerParts = field(default_factory=lambda: LocalParts(), kw_only=True)
    context_parallel: ContextParallel = field(default_factory=ContextParallel, kw_only=True)
    activations: ActivationConfig = field(default_factory=ActivationConfig, kw_only=True)
    kernels: LayerKernels = field(default_factory=LayerKernels, kw_only=True)


class RMSNorm(nn.Module):
    """RMSNorm with a gain, whole on every tensor-parallel rank."""

    def __init__(self, name: str, size: int, epsilon: float, context: BuildContext) -> None:
        super().__init__()
        self.epsilon, self.kernel = epsilon, context.kernels.rms_norm
        info = ParameterInfo(
            f"{name}.weight",
            *sharded_boxes((size,), (), rank=0, size=1),
            init_std=None,
            weight_decay=False,
            tensor_parallel_sharded=False,
            gradient_is_partial=context.parallel.sequence_parallel,
        )
        self.weight = context.empty_parameter(info)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., h] -> [..., h]``."""
        return rms_norm(inputs, self.weight, self.epsilon, self.kernel)


class LocalParts:
    """The layers of :mod:`megatron.core.tensor_parallel.layers`."""

    def norm(self, name: str, size: int, epsilon: float, context: BuildContext) -> nn.Module:
        """RMSNorm."""
        return RMSNorm(name, size, epsilon, context)

    def column(
        self,
        name: str,
        input_size: int,
        output_sections: Sequence[int],
        context: BuildContext,
        init_std: float,
        norm: str,
        epsilon: float,
    ) -> nn.Module:
        """The product alone."""
        return ColumnParallelLinear(name, input_size, output_sections, context, init_std)

    def row(self, name: str, input_size: int, output_size: int, context: BuildContext, init_std: float) -> nn.Module:
        """The product and its sum over the ranks."""
        return RowParallelLinear(name, input_size, output_size, context, init_std)


class SelfAttention(nn.Module):
    """Grouped-query attention; the heads are divided over the tensor-parallel ranks."""

    def __init__(self, layer: int, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        name = f"layers.{layer}.self_attention"
        sections = (config.query_size, config.key_value_size, config.key_value_size)
        size = context.parallel.size
        self.attention = context.context_parallel.attention(layer, context.attention_kernel)
        self.rotate = context.kernels.rotate
        self.shape = AttentionShape(
            config.num_attention_heads // size, config.num_query_groups // size, config.kv_channels
        )
        self.linear_qkv = context.parts.column(
            f"{name}.linear_qkv",
            config.hidden_size,
            sections,
            context,
            config.init_method_std,
            f"layers.{layer}.input_layernorm",
            config.norm_epsilon,
        )
        self.linear_proj = context.parts.row(
            f"{name}.linear_proj",
            config.query_size,
            config.hidden_size,
            context,
            residual_init_std(config),
        )

    def attend(
        self, fused: Tensor, rotary: Tensor, documents: Documents | None = None, *, graph_only: bool = False
    ) -> Tensor:
        """From the output of ``linear_qkv`` ``[s, b, (n + 2 groups) d / tp]``, which it overwrites, to
        ``[s(/tp), b, h]``; ``rotary`` rotates the ``s`` positions."""
        # Where it runs again, the first run has rotated queries and keys in place.
        attended = fused_attention(
            fused, rotary, self.shape, self.attention, documents, is_rotated=graph_only, rotate=self.rotate
        )
        output: Tensor = self.linear_proj(attended, graph_only=graph_only)
        return output


class MLP(nn.Module):
    """SwiGLU MLP; gate and up projections are one column-parallel weight."""

    def __init__(self, layer: int, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        name = f"layers.{layer}.mlp"
        self.activation = partial(swiglu, kernel=context.kernels.swiglu)
        self.linear_fc1 = context.parts.column(
            f"{name}.linear_fc1",
            config.hidden_size,
            (config.ffn_hidden_size, config.ffn_hidden_size),
            context,
            config.init_method_std,
            f"layers.{layer}.pre_mlp_layernorm",
            config.norm_epsilon,
        )
        self.linear_fc2 = context.parts.row(
            f"{name}.linear_fc2",
            config.ffn_hidden_size,
            config.hidden_size,
            context,
            residual_init_std(config),
        )

    def forward(self, hidden: Tensor, *, graph_only: bool = False) -> Tensor:
        """``[s(/tp), b, h] -> [s(/tp), b, h]``."""
        output: Tensor = self.linear_fc2(self.activation(self.linear_fc1(hidden)), graph_only=graph_only)
        return output


def residual_init_std(config: LlamaConfig) -> float:
    """Standard deviation of projections into the residual stream: scaled by ``1 / sqrt(2 layers)`` (GPT-2)."""
    return config.init_method_std / math.sqrt(2 * config.num_layers)


class TransformerLayer(nn.Module):
    """A pre-norm Llama layer; ``number`` is its global number, from 0."""

    def __init__(self, number: int, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        name = f"layers.{number}"
        self.recomputed = context.activations.modules
        if context.fp8 is not None and not context.fp8.includes(number, config.num_layers):
            context = replace(context, fp8=None)
        norm = partial(context.parts.norm, size=config.hidden_size, epsilon=config.norm_epsilon, context=context)
        self.input_layernorm = norm(f"{name}.input_layernorm")
        self.self_attention = SelfAttention(number, config, context)
        self.pre_mlp_layernorm = norm(f"{name}.pre_mlp_layernorm")
        self.mlp = MLP(number, config, context)

    def forward(
        self, hidden: Tensor, rotary: Tensor, documents: Documents | None = None, *, graph_only: bool = False
    ) -> Tensor:
        """``[s(/tp), b, h] -> [s(/tp), b, h]``."""
        attention = self.self_attention
        fused = self._run("layernorm", in_sequence(self.input_layernorm, last=attention.linear_qkv), hidden)
        attend = partial(attention.attend, rotary=rotary, documents=documents)
        hidden = hidden + self._run("core_attn", attend, fused)
        return hidden + self._feed_forward(hidden, graph_only)

    def _feed_forward(self, hidden: Tensor, graph_only: bool) -> Tensor:
        norm, mlp = self.pre_mlp_layernorm, self.mlp
        if {"layernorm", "mlp"} <= self.recomputed:
            return recompute(in_sequence(norm, last=mlp), hidden)
        if "mlp" in self.recomputed:
            return recompute(mlp, norm(hidden))
        gate_and_up = self._run("layernorm", in_sequence(norm, last=mlp.linear_fc1), hidden)
        return self._run("mlp_act", in_sequence(mlp.activation, last=mlp.linear_fc2), gate_and_up, graph_only)

    def _run(self, module: RecomputeModule, piece: Piece, inputs: Tensor, graph_only: bool = False) -> Tensor:
        """Run the piece that begins with the activations of ``module`` and ends with the next product, which must have
        them in its backward pass; if they are recomputed, only ``inputs`` are kept."""
        if module in self.recomputed:
            return recompute(piece, inputs)
        return piece(inputs, graph_only=graph_only)


class RecomputedLayers(nn.Module):
    """Layers that keep the input of the first alone, and run again as one before their backward pass.

    ``sharers`` are ranks that divide what is kept.
    """

    def __init__(self, layers: Sequence[TransformerLayer], sharers: Communicator | None) -> None:
        super().__init__()
        self.layers, self.sharers = nn.ModuleList(layers), sharers

    def forward(self, hidden: Tensor, rotary: Tensor, documents: Documents | None = None) -> Tensor:
        """``[s(/tp), b, h] -> [s(/tp), b, h]``."""
        layers = [partial(layer, rotary=rotary, documents=documents) for layer in self.layers]
        return recompute(in_sequence(*layers[:-1], last=layers[-1]), hidden, self.sharers)
