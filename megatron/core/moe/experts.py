"""The experts of a layer: SwiGLU MLPs, each for the rows that are routed to it.

All local experts share two 2-D weights, so every microbatch has one gradient for each weight, also if an expert has no
rows. Shapes: ``m`` rows on this rank, ``E_l`` local experts, ``h`` hidden size, ``f`` width of an expert; expert tensor
parallelism divides ``f`` by ``etp``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.communication import Work
from megatron.core.gradient import WeightGradStore, accumulate_main_grad, main_grad_of
from megatron.core.kernels.selection import LayerKernels
from megatron.core.moe.transfer import BackwardOverlap
from megatron.core.ops.grouped import GroupedGemm, RowCounts
from megatron.core.ops.swiglu import SwiGLUKernel, swiglu
from megatron.core.parameter import Box, ParameterInfo, columns_box, sharded_boxes
from megatron.core.precision import QuantizedTensor
from megatron.core.recompute import SkippableLinear, last_linear_of
from megatron.core.tensor_parallel.layers import LayerContext


@dataclass(frozen=True)
class ExpertShard:
    """Which experts a rank has, and which part of each."""

    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1

    def column_weight(
        self,
        name: str,
        num_experts: int,
        input_size: int,
        sections: Sequence[int],
        init_std: float,
        width_mult: float = 1.0,
    ) -> ParameterInfo:
        """The facts of the weight ``[E_l out/etp, in]`` of the column-parallel layer ``name``. The rows of each expert
        are ``sections``, of which every rank has its part."""
        local = num_experts // self.ep_size
        if self.etp_size == 1:
            sections = (sum(sections) * local,)  # one box
        else:
            sections = tuple(sections) * local
        _, local_shape, boxes = sharded_boxes(sections, (input_size,), self.etp_rank, self.etp_size)
        global_shape = sum(sections) * self.ep_size, input_size
        return self._info(name, global_shape, local_shape, boxes, init_std, width_mult)

    def row_weight(
        self,
        name: str,
        num_experts: int,
        input_size: int,
        output_size: int,
        init_std: float,
        width_mult: float = 1.0,
    ) -> ParameterInfo:
        """The facts of the weight ``[E_l out, in/etp]`` of the row-parallel layer ``name``."""
        rows = num_experts // self.ep_size * output_size
        _, local_shape, boxes = columns_box(rows, input_size, self.etp_rank, self.etp_size)
        return self._info(name, (rows * self.ep_size, input_size), local_shape, boxes, init_std, width_mult)

    def _info(
        self,
        name: str,
        global_shape: tuple[int, int],
        local_shape: tuple[int, ...],
        boxes: tuple[Box, ...],
        init_std: float,
        width_mult: float,
    ) -> ParameterInfo:
        """``boxes`` are counted from this rank's first expert."""
        first_row = global_shape[0] // self.ep_size * self.ep_rank
        moved = tuple(
            replace(box, global_offset=(box.global_offset[0] + first_row, box.global_offset[1])) for box in boxes
        )
        return ParameterInfo(
            f"{name}.weight",
            global_shape,
            local_shape,
            moved,
            init_std,
            weight_decay=True,
            tensor_parallel_sharded=True,
            is_expert=True,
            fan_in_mult=width_mult,
            fan_out_mult=width_mult,
        )


@dataclass(frozen=True)
class _GroupedOp:
    gemm: GroupedGemm
    weight_gradients: WeightGradStore
    skip_output: bool
    overlap: BackwardOverlap | None
    """When to add the weight gradient to the main gradient; None: at once."""


class _GroupedLinear(Function):
    """``y = x W^T`` with the matrix of its expert for every row, ``[m, in] -> [m, out]``."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, counts: RowCounts, op: _GroupedOp) -> Tensor:
        # The weight is no activation, so hooks on saved tensors (CPU offload) must not receive it.
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.counts, ctx.op = weight, counts, op
        if op.skip_output:
            # Recompute: nothing reads the output, so it has a shape and no memory. NaN, so that a wrong reader is seen.
            return inputs.new_full((), math.nan).expand(inputs.shape[0], weight.shape[0] // len(counts.host))
        return op.gemm.output(inputs.detach(), weight.detach(), counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (inputs,) = ctx.saved_tensors
        op: _GroupedOp = ctx.op
        weight, counts, x = ctx.weight, ctx.counts, inputs.detach()
        # A sum over rows has a gradient without strides, which grouped kernels do not read.
        dy = gradients[0].contiguous()
        dx = op.gemm.input_gradient(dy, weight.detach(), counts)
        if not weight.requires_grad:
            return dx, None, None, None
        if op.weight_gradients.is_deferring:
            product = partial(op.gemm.weight_gradient, dy, counts=counts)
            op.weight_gradients.put(
                weight, lambda: Work((), lambda: QuantizedTensor(x)), lambda kept: product(kept.data)
            )
            return dx, None, None, None
        weight_gradient = op.gemm.weight_gradient(dy, x, counts)  # not computed yet
        main_grad = main_grad_of(weight)
        if op.overlap is not None and main_grad is not None:
            op.overlap.put(partial(main_grad.add, weight_gradient))
            return dx, None, None, None
        return dx, accumulate_main_grad(weight, weight_gradient), None, None


class GroupedLinear(nn.Module):
    """The linear layers of this rank's experts: ``[m, in] -> [m, out]``, rows sorted by local expert."""

    def __init__(self, info: ParameterInfo, context: LayerContext, gemm: GroupedGemm) -> None:
        super().__init__()
        self.weight = context.empty_parameter(info)
        self.gemm, self.weight_gradients, self.skip_output = gemm, context.weight_gradients, False

    def forward(self, rows: Tensor, counts: RowCounts, overlap: BackwardOverlap | None = None) -> Tensor:
        """The output; with ``skip_output`` the graph is built and nothing is multiplied."""
        assert rows.shape[0] == counts.total, (rows.shape, counts.host)
        op = _GroupedOp(self.gemm, self.weight_gradients, self.skip_output, overlap)
        output: Tensor = _GroupedLinear.apply(rows, self.weight, counts, op)
        return output


class GroupedSwiGLULinear(nn.Module):
    """SwiGLU, and the second GEMM of the experts after it."""

    def __init__(self, kernel: SwiGLUKernel, linear: GroupedLinear) -> None:
        super().__init__()
        self.kernel, self.linear = kernel, linear

    @property
    def last_linear(self) -> GroupedLinear:
        """See :class:`~megatron.core.recompute.Recomputed`."""
        return self.linear

    def forward(self, gate_up: Tensor, counts: RowCounts) -> Tensor:  # [m, 2 f / etp]
        output: Tensor = self.linear(swiglu(gate_up, self.kernel), counts)  # [m, h]
        return output


class Experts(nn.Module):
    """This rank's experts of a layer; ``name`` is their global name, such as ``layers.3.mlp.experts``.

    The rows of ``linear_fc1`` are, expert by expert, the gate and then the up projection. With expert tensor
    parallelism the output is a partial sum over the ``etp`` ranks.
    """

    def __init__(
        self, name: str, config: TransformerConfig, context: LayerContext, kernels: LayerKernels, shard: ExpertShard
    ) -> None:
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
        assert experts is not None and width is not None
        fc1 = shard.column_weight(
            f"{name}.linear_fc1", experts, hidden, (width, width), config.hidden_init_std, config.width_mult
        )
        fc2 = shard.row_weight(
            f"{name}.linear_fc2", experts, width, hidden, config.residual_init_std, config.width_mult
        )
        self.linear_fc1 = GroupedLinear(fc1, context, kernels.grouped_gemm)
        linear_fc2 = GroupedLinear(fc2, context, kernels.grouped_gemm)
        self.swiglu_fc2 = GroupedSwiGLULinear(kernels.swiglu, linear_fc2)

    @property
    def last_linear(self) -> SkippableLinear | None:
        return last_linear_of(self.swiglu_fc2)

    def forward(self, rows: Tensor, counts: RowCounts, overlap: BackwardOverlap | None = None) -> Tensor:
        """``[m, h]``, sorted by local expert, to the same shape. The weight gradient of fc1 is computed during the
        ``overlap``: it is the last GEMM of the backward pass and needs only tensors that are there anyway."""
        gate_up = self.linear_fc1(rows, counts, overlap)  # [m, 2 f / etp]
        output: Tensor = self.swiglu_fc2(gate_up, counts)  # [m, h]
        return output
