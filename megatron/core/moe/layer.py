"""A mixture-of-experts layer (MoE): each token is processed by the experts that the router chooses for it.

Shapes: ``n`` tokens of this rank, ``n = s b / (cp tp)``; ``h`` hidden size, ``E`` experts, ``k`` choices of a token,
``m`` rows of this rank's experts: one for each of their tokens.

Sources: Shazeer et al. (arXiv 1701.06538), GShard (arXiv 2006.16668).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.gradient import accumulate_main_grad
from megatron.core.moe.dispatch import TokenDispatcher
from megatron.core.moe.layer import Experts, ExpertShard
from megatron.core.moe.routing import ExpertBalance, Routing, RoutingRule, balanced_routing, route
from megatron.core.parameter import ParameterInfo, sharded_boxes
from megatron.core.tensor_parallel.layers import LayerContext


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
        self.balance, self.with_loss = parallel.balance.add_router(layer), parallel.balance.with_loss
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
        return Routing(routing.experts, self.with_loss(routing.weights, loss))


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
