"""The experts of a layer: SwiGLU MLPs, each for the rows that are routed to it.

All local experts share two 2-D weights, so every microbatch has one gradient for each weight, also if an expert has no
rows. Shapes: ``m`` rows on this rank, ``E_l`` local experts, ``h`` hidden size, ``f`` width of an expert; expert tensor
parallelism divides ``f`` by ``etp``.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.activations import SkippableLinear, last_linear_of
from megatron.core.communication import Work
from megatron.core.gradient import WeightGradStore, accumulate_main_grad, main_grad_of
from megatron.core.kernels.selection import LayerKernels
from megatron.core.moe.transfer import BackwardOverlap
from megatron.core.ops.grouped import GroupedGemm, RowCounts
from megatron.core.ops.swiglu import SwiGLUKernel, swiglu
from megatron.core.parameter import Division, ParameterInfo, columns_box, sharded_boxes
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.layers import LayerContext


@dataclass(frozen=True)
class ExpertShard:
    """The experts of a rank, and its part of each."""

    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1

    def weight(self, name: str, division: Division, init_std: float, width_mult: float) -> ParameterInfo:
        """The facts of the weight of the layer ``name``, from the ``division`` of the rows of this rank's experts."""
        (rows, columns), local_shape, boxes = division
        first_row = rows * self.ep_rank
        moved = [replace(box, global_offset=(box.global_offset[0] + first_row, box.global_offset[1])) for box in boxes]
        return ParameterInfo(
            f"{name}.weight",
            (rows * self.ep_size, columns),
            local_shape,
            tuple(moved),
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
        """See :class:`~megatron.core.activations.Recomputed`."""
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
        local, rank, size = experts // shard.ep_size, shard.etp_rank, shard.etp_size
        # Of the gate and the up projection of each expert every etp rank has its part; undivided, all are one box.
        sections = (width, width) * local if size > 1 else (2 * width * local,)
        up = sharded_boxes(sections, (hidden,), rank, size)  # [E_l 2 f / etp, h]
        down = columns_box(local * hidden, width, rank, size)  # [E_l h, f / etp]
        fc1 = shard.weight(f"{name}.linear_fc1", up, config.hidden_init_std, config.width_mult)
        fc2 = shard.weight(f"{name}.linear_fc2", down, config.residual_init_std, config.width_mult)
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
