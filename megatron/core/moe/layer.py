"""A mixture-of-experts layer (MoE): each token is processed by the experts that the router chooses for it.

The experts are SwiGLU MLPs, each for the rows that are routed to it. All local experts share two 2-D weights, so every
microbatch has one gradient for each weight, also if an expert has no rows.

Shapes: ``n`` tokens of this rank, ``n = s b / (cp tp)``; ``h`` hidden size, ``E`` experts, ``k`` choices of a token,
``m`` rows of this rank's experts: one for each of their tokens. ``E_l`` local experts, ``f`` width of an expert; expert
tensor parallelism divides ``f`` by ``etp``.

Sources: Shazeer et al. (arXiv 1701.06538), GShard (arXiv 2006.16668).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.communication import Work
from megatron.core.gradient import WeightGradStore, accumulate_main_grad, main_grad_of
from megatron.core.kernels.selection import LayerKernels
from megatron.core.moe.dispatch import TokenDispatcher
from megatron.core.moe.routing import ExpertBalance, Routing, RoutingRule, balanced_routing, route
from megatron.core.moe.transfer import BackwardOverlap
from megatron.core.ops.grouped import GroupedGemm, RowCounts
from megatron.core.parameter import Division, ParameterInfo, columns_box, sharded_boxes
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.layers import LayerContext, SwiGLULinear


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

    input_quantization = None
    """The rows of experts are not quantised."""

    def __init__(self, info: ParameterInfo, context: LayerContext, gemm: GroupedGemm) -> None:
        super().__init__()
        self.weight = context.empty_parameter(info)
        self.gemm, self.weight_gradients, self.skip_output = gemm, context.weight_gradients, False

    def forward(self, rows: Tensor, counts: RowCounts, overlap: BackwardOverlap | None = None) -> Tensor:
        assert rows.shape[0] == counts.total, (rows.shape, counts.host)
        op = _GroupedOp(self.gemm, self.weight_gradients, self.skip_output, overlap)
        output: Tensor = _GroupedLinear.apply(rows, self.weight, counts, op)
        return output


class Experts(nn.Module):
    """This rank's experts of a layer; ``name`` is their global name, such as ``layers.3.mlp.experts``.

    The rows of ``linear_fc1`` are, expert by expert, the gate and then the up projection. With expert tensor
    parallelism the output is a partial sum over the ``etp`` ranks.
    """

    last_linear = "swiglu_fc2"

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
        self.swiglu_fc2 = SwiGLULinear(kernels.swiglu, linear_fc2)

    def forward(self, rows: Tensor, counts: RowCounts, overlap: BackwardOverlap | None = None) -> Tensor:
        """``[m, h]``, sorted by local expert, to the same shape. The weight gradient of fc1 is computed during the
        ``overlap``: it is the last GEMM of the backward pass and needs only tensors that are there anyway."""
        gate_up = self.linear_fc1(rows, counts, overlap)  # [m, 2 f / etp]
        output: Tensor = self.swiglu_fc2(gate_up, counts)  # [m, h]
        return output


@dataclass(frozen=True)
class ExpertParallel:
    """Objects that the MoE layers of a rank share."""

    routing: RoutingRule
    shard: ExpertShard
    dispatcher: TokenDispatcher
    balance: ExpertBalance
    forces_balance: bool = False
    """``--moe-router-force-load-balancing``: round robin instead of the router's choices."""
    overlaps_shared_experts: bool = False
    """``--moe-shared-expert-overlap``: shared experts compute while tokens are under way."""


class _RouterLogits(Function):
    """``x W^T`` in fp32 or wider, whatever the dtype of ``x`` and ``W``: ``[n, h] -> [n, E]``."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return tokens.to(wide) @ weight.to(wide).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (tokens,) = ctx.saved_tensors
        weight, gradient = ctx.weight, gradients[0]  # [E, h], [n, E]
        grad_tokens = (gradient @ weight.to(gradient.dtype)).to(tokens.dtype)
        grad_weight = gradient.t() @ tokens.to(gradient.dtype)  # [E, h]
        return grad_tokens, accumulate_main_grad(weight, grad_weight)


class Router(nn.Module):
    """Chooses experts for every token; its losses balance the load of the experts.

    Scores are computed in fp32 or wider: in bf16 several percent of the tokens have two equal scores at the border of
    the ``k`` best.
    """

    def __init__(
        self, name: str, layer: int, config: TransformerConfig, context: LayerContext, parallel: ExpertParallel
    ) -> None:
        super().__init__()
        self.rule, self.forces_balance = parallel.routing, parallel.forces_balance
        self.balance, self.auxiliary_losses = parallel.balance.add_router(layer), context.auxiliary_losses
        layout = sharded_boxes((self.rule.num_experts,), (config.hidden_size,), rank=0, size=1)
        is_partial = context.parallel.sequence_parallel
        info = ParameterInfo(
            f"{name}.weight",
            *layout,
            config.router_init_std,
            weight_decay=True,
            tensor_parallel_sharded=False,
            gradient_is_partial=is_partial,
            fan_in_mult=config.width_mult,
        )
        self.weight = context.empty_parameter(info)

    def forward(self, tokens: Tensor, num_sequences: int) -> Routing:
        """The choices for ``tokens`` ``[n, h]``, this rank's part of ``num_sequences`` sequences."""
        logits: Tensor = _RouterLogits.apply(tokens, self.weight)  # [n, E]
        if self.forces_balance:
            routing = balanced_routing(logits, self.rule)
        else:
            routing = route(logits, self.rule, self.balance.expert_bias)
        # Not in evaluations, nor in the first run of a recomputed segment: each token is counted once.
        loss = None
        if torch.is_grad_enabled():
            loss = self.balance.observe(logits, routing.experts, num_sequences)
        if loss is None:
            return routing
        return Routing(routing.experts, self.auxiliary_losses.attach(routing.weights, loss))


class MoELayer(nn.Module):
    """Norm, router and experts, in the place of an MLP; ``shared_experts`` process every token as well."""

    last_linear = None
    """The gradient of the routing weights needs the output of the last linear layer."""

    def __init__(
        self,
        norm: nn.Module,
        router: Router,
        dispatcher: TokenDispatcher,
        experts: Experts,
        shared_experts: nn.Module | None,
        overlaps_shared_experts: bool = False,
    ) -> None:
        super().__init__()
        self.norm, self.router, self.dispatcher = norm, router, dispatcher
        self.experts, self.shared_experts = experts, shared_experts
        self.overlaps_shared_experts = overlaps_shared_experts

    @property
    def segments(self) -> Mapping[str, str]:
        segments = {"moe": "", "moe_act": "experts.swiglu_fc2"}
        return segments if self.shared_experts is None else segments | {"shared_experts": "shared_experts"}

    def forward(self, x: Tensor) -> Tensor:  # [s/(cp tp), b, h]
        normed = self.norm(x)
        tokens = normed.flatten(0, 1)  # [n, h]
        routing = self.router(tokens, x.shape[1])  # experts and weights [n, k]
        dispatching = self.dispatcher.start(tokens, routing)
        shared = None
        if self.shared_experts is not None and self.overlaps_shared_experts:
            shared = self.shared_experts(normed)  # while tokens are under way, and their gradients in backward
        dispatched = dispatching.wait()
        outputs = self.experts(dispatched.rows, dispatched.counts, dispatched.overlap)  # [m, h], sorted by expert
        output = dispatched.combine(outputs).view_as(x)  # [s/(cp tp), b, h]
        if self.shared_experts is None:
            return output
        return output + (self.shared_experts(normed) if shared is None else shared)
