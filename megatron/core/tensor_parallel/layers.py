"""Column-parallel, row-parallel and vocabulary-parallel layers.

Backward starts the collective of the input gradient before it computes the weight gradient, which is accumulated in
the main gradient or deferred (:mod:`megatron.core.gradient`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.auxiliary_losses import AuxiliaryLosses
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.gradient import WeightGradStore, accumulate_main_grad, main_grad_of
from megatron.core.ops.fp8 import E4M3, DelayedQuantization, Fp8Role
from megatron.core.ops.matmul import Gemm, PlainGemm, WeightGradientKernel
from megatron.core.ops.swiglu import SwiGLUKernel, swiglu
from megatron.core.parameter import (
    Division,
    InitialValues,
    ParameterInfo,
    columns_box,
    empty_parameter,
    padded_rows_box,
    sharded_boxes,
)
from megatron.core.precision import Layout, QuantizedActivation, QuantizedTensor
from megatron.core.tensor_parallel.collectives import TensorParallel


@dataclass(frozen=True)
class LinearOp:
    """The GEMMs of a linear layer, and on which side of them the ranks communicate."""

    parallel: TensorParallel
    gemm: Gemm
    weight_gradients: WeightGradStore
    is_column: bool
    """Column-parallel: all-gather, then GEMM. Row-parallel: GEMM, then reduction."""

    @property
    def gathers_input(self) -> bool:
        """Whether a rank has only its rows of the input, which forward and backward all-gather."""
        return self.is_column and self.parallel.sequence_parallel

    def input_layout(self, skip_output: bool = False) -> Layout:
        """The layouts in which the GEMMs read the input."""
        # Backward needs x for the weight gradient alone, hence transposed. Under sequence parallelism only this rank's
        # rows of x are saved; backward gathers them again, and transposes all rows.
        layout = Layout.ROWS if self.gathers_input or not skip_output else Layout(0)
        # Without gradients: evaluations, and the first run of a recomputed segment.
        if torch.is_grad_enabled():
            layout |= Layout.COLUMNS if self.gathers_input else Layout.TRANSPOSED
        return layout


class LinearFunction(Function):
    """``y = x W^T`` at the edge of a tensor-parallel region: ``[s(/tp), b, in] -> [s, b, out/tp]`` if column-parallel,
    ``[s, b, in/tp] -> [s(/tp), b, out]`` if row-parallel."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, op: LinearOp, x: QuantizedTensor | Layout, skip_output: bool
    ) -> Tensor:
        if isinstance(x, Layout):
            x = op.gemm.quantize("input", inputs, x)
        # The weight and a scale of the whole tensor are no activations, so hooks on saved tensors (CPU offload) must
        # not receive them.
        ctx.save_for_backward(*x.kept_tensors)
        ctx.scaling, ctx.weight, ctx.op = x.scaling, weight, op
        if skip_output:
            # Recompute: nothing reads the output, so it has a shape and no memory. NaN, so that a wrong reader is seen.
            rows, parts = inputs.shape[0], op.parallel.sequence_parts
            rows = rows * parts if op.is_column else rows // parts
            return inputs.new_full((), math.nan).expand(rows, *inputs.shape[1:-1], weight.shape[0])
        matrix = weight.t() if op.gemm.is_plain else None  # [in, out], of this rank
        gemm = partial(op.gemm.output, weight=weight)
        if op.is_column:
            return op.parallel.overlap.gather_gemm(x, gemm, matrix)[0]
        return op.parallel.overlap.gemm_reduce(x, gemm, matrix).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        op: LinearOp = ctx.op
        parallel, weight, wgrad = op.parallel, ctx.weight, op.gemm.weight_gradient
        # Detached: a deferred weight gradient must not keep the graph alive.
        x: QuantizedTensor = ctx.scaling.with_kept([tensor.detach() for tensor in ctx.saved_tensors])
        # A rank that has only its rows of dy gathers the others, and transposes all rows then.
        has_own_rows = parallel.sequence_parallel and not op.is_column
        layout = Layout.ROWS | (Layout.COLUMNS if has_own_rows else Layout.TRANSPOSED)
        dy = op.gemm.quantize("output_gradient", gradients[0], layout)
        dgrad = partial(op.gemm.input_gradient, weight=weight)
        matrix = weight if op.gemm.is_plain else None  # [out, in], of this rank
        is_deferred = weight.requires_grad and op.weight_gradients.is_deferring
        computes = weight.requires_grad and not is_deferred
        grad_weight = None
        if not op.is_column:
            dx, whole_dy = parallel.overlap.gather_gemm(dy, dgrad, matrix)
            if is_deferred:
                # Stores this rank's rows of dy and gathers them again: all rows are as large as a layer's input.
                op.weight_gradients.put(weight, partial(parallel.gather_input, dy.kept), lambda dy: wgrad(dy, x))
            if computes:
                if dy.columns is not None:
                    whole_dy = parallel.gather_input(dy.columns).wait()
                grad_weight = accumulate_main_grad(weight, wgrad(whole_dy, x))
            return dx, grad_weight, None, None, None
        if is_deferred:
            op.weight_gradients.put(weight, lambda: parallel.gather_input(x), partial(wgrad, dy.kept))
        gathering = parallel.gather_input(x) if computes else None
        dx_reduction = parallel.overlap.gemm_reduce(dy, dgrad, matrix)
        if gathering is not None:
            # dx is reduced while the weight gradient is multiplied.
            grad_weight = accumulate_main_grad(weight, wgrad(dy, gathering.wait()))
        return dx_reduction.wait(), grad_weight, None, None, None


class _VocabParallelEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_id: int, parallel: TensorParallel) -> Tensor:
        rows = tokens.t() - first_id  # [s, b]: the sequence comes first from here on
        is_outside = (rows < 0) | (rows >= weight.shape[0])  # ids on other ranks
        rows = rows.masked_fill(is_outside, 0)
        ctx.save_for_backward(rows, is_outside)
        ctx.weight, ctx.parallel = weight, parallel
        embedded = F.embedding(rows, weight)  # [s, b, h]
        if parallel.size == 1:
            return embedded
        return parallel.reduce_output(embedded.masked_fill_(is_outside.unsqueeze(-1), 0.0)).wait()  # [s(/tp), b, h]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        rows, is_outside = ctx.saved_tensors
        weight: Tensor = ctx.weight
        gradient = ctx.parallel.gather_input(QuantizedTensor(gradients[0])).wait().data  # [s, b, h]
        if ctx.parallel.size > 1:
            gradient = gradient.masked_fill(is_outside.unsqueeze(-1), 0.0)
        main_grad = main_grad_of(weight)
        if main_grad is not None:
            main_grad.add_rows(rows.flatten(), gradient.flatten(0, 1))
            return None, None, None, None
        dense = torch.zeros_like(weight).index_add_(0, rows.flatten(), gradient.flatten(0, 1))
        return None, accumulate_main_grad(weight, dense), None, None


@dataclass(frozen=True)
class LayerContext:
    """The tensor-parallel ranks of a parallel layer, the dtype and device of its weights, and the computation of its
    weight gradients."""

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device
    weight_gradients: WeightGradStore = field(default_factory=WeightGradStore, kw_only=True)
    weights_device: torch.device | None = field(default=None, kw_only=True)
    """Device of the weights if it is not ``device``; with ``meta``, data parallelism allocates them."""
    weight_gradient: WeightGradientKernel | None = field(default=None, kw_only=True)
    """The weight-gradient GEMM; None: a GEMM, then an addition."""
    fp8: Fp8Layers | None = field(default=None, kw_only=True)
    """The FP8 state of the linear layers; None if they multiply in ``dtype``."""
    auxiliary_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses, kw_only=True)
    """Where layers add losses of their own."""

    def empty_parameter(self, info: ParameterInfo) -> nn.Parameter:
        return empty_parameter(info, self.dtype, self.weights_device or self.device)

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        initial: InitialValues,
        *,
        is_divided: bool = False,
        in_parallel_region: bool = False,
        weight_decay: bool = False,
        uses: int = 1,
    ) -> nn.Parameter:
        """A parameter for plain torch operations, of the global name ``name`` and the global ``shape``.

        With ``is_divided`` each tensor-parallel rank has its part of dim 0; otherwise every rank has the whole, and
        ``in_parallel_region`` says that it is used between a column-parallel and a row-parallel layer, where a rank has
        some of the heads or of the MLP's width. Elsewhere a rank has its part of the sequence, under sequence
        parallelism, or all of it. ``initial`` are its values, such as
        :func:`~megatron.core.parameter.constant` and :func:`~megatron.core.parameter.normal`.
        """
        assert len(shape) > 0, f"{name}: a single number has the shape (1,)"
        rank, size = (self.parallel.rank, self.parallel.size) if is_divided else (0, 1)
        is_partial = self.parallel.size > 1 if in_parallel_region else self.parallel.sequence_parallel
        info = ParameterInfo(
            name,
            *sharded_boxes(shape[:1], shape[1:], rank, size),
            init_std=None,
            weight_decay=weight_decay,
            tensor_parallel_sharded=is_divided,
            gradient_is_partial=is_partial and not is_divided,
            uses=uses,
            initial=initial,
        )
        return self.empty_parameter(info)

    def linear_op(self, name: str, is_column: bool, weight_shape: Sequence[int]) -> LinearOp:
        """The GEMMs and collectives of the linear layer ``name`` with this rank's weight ``[n, k]``."""
        gemm: Gemm = PlainGemm(self.weight_gradient)
        if self.fp8 is not None:
            assert isinstance(self.fp8, Fp8Scaling), "other backends have their own layers"
            # The amax of a tensor that is sharded over the tensor-parallel ranks is reduced over these ranks.
            sharded: set[Fp8Role] = {"weight", "output_gradient" if is_column else "input"}
            if self.parallel.sequence_parallel:
                sharded.add("input" if is_column else "output_gradient")
            gemm = self.fp8.gemm(name, self.dtype, self.parallel.communicator, sharded, weight_shape)
        return LinearOp(self.parallel, gemm, self.weight_gradients, is_column)

    def column_weight(
        self, name: str, input_size: int, output_sections: Sequence[int], init_std: float, width_mult: float = 1.0
    ) -> ParameterInfo:
        """The facts of the weight ``[out/tp, in]`` of the column-parallel layer ``name``. ``output_sections`` are the
        sizes of the matrices fused into it (query, key, value; gate, up): every rank has its part of each, and its
        outputs are these parts side by side."""
        layout = sharded_boxes(output_sections, (input_size,), self.parallel.rank, self.parallel.size)
        return self._matrix(name, layout, init_std, width_mult)

    def row_weight(
        self, name: str, input_size: int, output_size: int, init_std: float, width_mult: float = 1.0
    ) -> ParameterInfo:
        """The facts of the weight ``[out, in/tp]`` of the row-parallel layer ``name``."""
        layout = columns_box(output_size, input_size, self.parallel.rank, self.parallel.size)
        return self._matrix(name, layout, init_std, width_mult)

    def _matrix(self, name: str, division: Division, init_std: float, width_mult: float) -> ParameterInfo:
        """The facts of a matrix whose two dims grow with the width."""
        return ParameterInfo(
            f"{name}.weight",
            *division,
            init_std,
            weight_decay=True,
            tensor_parallel_sharded=True,
            fan_in_mult=width_mult,
            fan_out_mult=width_mult,
        )

    def gain(
        self,
        name: str,
        size: int,
        is_zero_centered: bool,
        gradient_is_partial: bool | None = None,
        width_mult: float = 1.0,
    ) -> ParameterInfo:
        """The facts of the weight ``[size]`` of the norm ``name``, the gain or, if ``is_zero_centered``, the gain minus
        one. By default its gradient is partial under sequence parallelism, where each rank has its part of the
        sequence."""
        if gradient_is_partial is None:
            gradient_is_partial = self.parallel.sequence_parallel
        layout = sharded_boxes((size,), (), rank=0, size=1)
        init_std = 0.0 if is_zero_centered else None
        return ParameterInfo(
            f"{name}.weight",
            *layout,
            init_std,
            weight_decay=False,
            tensor_parallel_sharded=False,
            gradient_is_partial=gradient_is_partial,
            fan_out_mult=width_mult,
        )


class QuantizingLinear(Protocol):
    """A linear layer whose input another operation may quantise."""

    @property
    def input_quantization(self) -> DelayedQuantization | None:
        """The quantisation that the operation before must apply; None if it must not."""


class _ParallelLinear(nn.Module):
    """``y = x W^T`` with a weight of the facts ``info``."""

    is_column: ClassVar[bool]

    def __init__(self, info: ParameterInfo, context: LayerContext) -> None:
        super().__init__()
        # The weight is in FP8 if it is gathered in FP8.
        gathers_fp8 = context.fp8 is not None and context.fp8.config.fp8_param_gather
        dtype = E4M3 if gathers_fp8 else context.dtype
        self.weight = empty_parameter(info, dtype, context.weights_device or context.device)
        name = info.name.removesuffix(".weight")
        self.op, self.skip_output = context.linear_op(name, self.is_column, self.weight.shape), False

    @property
    def input_quantization(self) -> DelayedQuantization | None:
        return self.op.gemm.input_quantization(self.op.input_layout(self.skip_output))

    def forward(self, inputs: Tensor | QuantizedActivation) -> Tensor:
        x: QuantizedTensor | Layout = self.op.input_layout(self.skip_output)
        if isinstance(inputs, QuantizedActivation):
            x = inputs.value
            inputs = inputs.edge
        output: Tensor = LinearFunction.apply(inputs, self.weight, self.op, x, self.skip_output)
        return output


class ColumnParallelLinear(_ParallelLinear):
    """``y = x W^T`` with the outputs divided over the ranks: ``[s(/tp), b, in] -> [s, b, out/tp]``. Its weight is a
    :meth:`LayerContext.column_weight`."""

    is_column = True


class RowParallelLinear(_ParallelLinear):
    """``y = x W^T`` with the inputs divided over the ranks: ``[s, b, in/tp] -> [s(/tp), b, out]``. Its weight is a
    :meth:`LayerContext.row_weight`."""

    is_column = False


class SwiGLULinear(nn.Module):
    """SwiGLU and the linear layer after it, of an MLP or of experts; under delayed FP8 scaling SwiGLU writes quantised
    numbers. ``arguments`` are further ones of the layer."""

    last_linear = "linear"

    def __init__(self, kernel: SwiGLUKernel, linear: nn.Module) -> None:
        super().__init__()
        self.kernel, self.linear = kernel, linear

    def forward(self, gate_up: Tensor, *arguments: Any) -> Tensor:  # [s/cp, b, 2 f / tp], of experts [m, 2 f / etp]
        quantization = cast(QuantizingLinear, self.linear).input_quantization
        activated = swiglu(gate_up, self.kernel, quantization)  # [s/cp, b, f / tp] or [m, f / etp]
        output: Tensor = self.linear(activated, *arguments)  # [s/(cp tp), b, h] or [m, h]
        return output


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        # Detached: autograd forbids in-place changes of views, which the GEMM's output is on some devices.
        return inputs.detach().add_(bias.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        return gradients[0], accumulate_main_grad(ctx.bias, gradients[0].flatten(0, -2).sum(dim=0, dtype=wide))


class Bias(nn.Module):
    """The bias of a column-parallel layer, added in place to its output ``[s, b, out/tp]``."""

    def __init__(
        self, name: str, output_sections: Sequence[int], context: LayerContext, width_mult: float = 1.0
    ) -> None:
        super().__init__()
        parallel = context.parallel
        layout = sharded_boxes(output_sections, (), parallel.rank, parallel.size)
        info = ParameterInfo(
            f"{name}.bias",
            *layout,
            init_std=0.0,
            weight_decay=False,
            tensor_parallel_sharded=True,
            fan_out_mult=width_mult,
        )
        self.bias = context.empty_parameter(info)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = _AddBias.apply(inputs, self.bias)
        return output


class VocabParallelWeight(nn.Module):
    """A weight ``[v/tp, h]`` with a row for each id of this rank's vocabulary shard; the weight of the output layer.

    The vocabulary is padded to a multiple of the ranks. ``uses``, ``stages`` and ``is_copy`` are its facts
    (:class:`~megatron.core.parameter.ParameterInfo`).
    """

    def __init__(
        self,
        name: str,
        config: TransformerConfig,
        context: LayerContext,
        uses: int = 1,
        stages: tuple[int, ...] = (),
        is_copy: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.context = config, context
        rank, size = context.parallel.rank, context.parallel.size
        info = ParameterInfo(
            f"{name}.weight",
            *padded_rows_box(config.vocab_size, config.padded_vocab_size, config.hidden_size, rank, size),
            config.init_method_std,
            weight_decay=True,
            tensor_parallel_sharded=True,
            uses=uses,
            is_vocabulary=True,
            stages=stages,
            is_copy=is_copy,
            fan_out_mult=config.width_mult,
        )
        self.weight = context.empty_parameter(info)
        self.first_id, self.num_ids = rank * info.local_shape[0], sum(info.section_rows)  # without padding


class VocabParallelEmbedding(VocabParallelWeight):
    """Token embedding with the vocabulary divided over the ranks."""

    backward_reads_weights = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[b, s]`` to activations ``[s(/tp), b, h]``."""
        output: Tensor = _VocabParallelEmbedding.apply(tokens, self.weight, self.first_id, self.context.parallel)
        factor = self.config.embedding_multiplier
        return output if factor == 1.0 else output * factor
