"""The balance of a rank's routers in a step: counts, auxiliary losses, expert biases and metrics.

The scale of the losses. The gradient of a step is ``scale`` times that of a sum over tokens
(:mod:`megatron.training.loop.step`), so an auxiliary loss is a sum over tokens as well:

- load balancing: ``alpha * T * LBL`` for every set of T tokens, which is a sequence (``seq_aux_loss``) or a microbatch
  (``aux_loss``);
- z-loss: ``beta * sum of logsumexp^2``.

All tokens of a sequence count, also those that the loss mask leaves out. Ranks that share a sequence add their counts,
which have no gradient. They do not add probabilities, because the loss is linear in them: each rank's loss is its
addend, and only the sum over the ranks is the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import MoEConfig
from megatron.core.communication import Communicator, Work
from megatron.core.moe.routing import (
    RoutingRule,
    balancing_probabilities,
    count_choices_by_set,
    load_balancing_loss,
    z_loss,
)
from megatron.metrics.writer import LAYER_METRICS

BalancingLoss = Literal["aux_loss", "seq_aux_loss"]


@dataclass(frozen=True)
class BalanceRule:
    """The losses and biases that balance the experts, and the metrics about them."""

    balancing_losses: tuple[tuple[BalancingLoss, float], ...] = ()
    """(``--moe-router-load-balancing-type``, ``--moe-aux-loss-coeff``) of every loss; no coefficient is zero."""
    z_loss_coeff: float | None = None
    bias_update_rate: float | None = None
    """None: the experts have no bias."""
    logs_layers: bool = False
    """Whether every layer has metrics of its own (``--moe-per-layer-logging``)."""

    @classmethod
    def of(cls, config: MoEConfig, model: TransformerConfig) -> "BalanceRule":
        """The rule of a run's flags. A type with the coefficient 0, which is the default, is no loss."""
        pairs = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
        return cls(
            balancing_losses=tuple((kind, coeff) for kind, coeff in pairs if kind != "none" and coeff != 0.0),
            z_loss_coeff=config.moe_z_loss_coeff or None,
            bias_update_rate=config.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else None,
            logs_layers=config.moe_per_layer_logging,
        )

    @property
    def total_coeff(self) -> float:
        return sum(coeff for _, coeff in self.balancing_losses)


class RouterBalance:
    """The balance of the router of one layer; ``sequence_ranks`` are the ranks that share a sequence."""

    def __init__(
        self,
        layer: int,
        routing_rule: RoutingRule,
        rule: BalanceRule,
        sequence_ranks: Communicator,
        device: torch.device,
    ) -> None:
        self.layer = layer
        self._routing_rule, self._rule, self._sequence_ranks = routing_rule, rule, sequence_ranks
        num_experts = routing_rule.num_experts
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        """Number of this rank's tokens that chose each expert in this step, ``[E]``."""
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums over this rank's tokens in this step, without coefficients: the load balancing loss times the tokens
        (with several types the mean, weighted by their coefficients), and the z-loss."""
        self.expert_bias: Tensor | None = None
        """``[E]``, fp32 in every precision: in bf16 an update would be lost."""
        if rule.bias_update_rate is not None:
            self.expert_bias = torch.zeros(num_experts, dtype=torch.float32, device=device)

    @property
    def bias_name(self) -> str:
        return f"layers.{self.layer}.mlp.router.expert_bias"

    def observe(self, logits: Tensor, experts: Tensor, num_sequences: int) -> Tensor | None:
        """Count the ``experts`` ``[n, k]`` of tokens ``[s, b]`` with ``logits`` ``[n, E]``; returns this rank's addend
        of their auxiliary loss, a scalar, or None if there is none. A collective of the ranks that share a sequence.

        Only where a graph is built: otherwise evaluation would count, and recomputed layers would count twice.
        """
        assert torch.is_grad_enabled()
        by_sequence = experts.view(-1, num_sequences, experts.shape[1])  # [s, b, k]
        counts = count_choices_by_set(by_sequence, self._routing_rule.num_experts)  # [b, E]
        self.counts += counts.sum(dim=0)
        losses = []
        if self._rule.balancing_losses:
            losses.append(self._balancing_loss(logits, counts))
        if self._rule.z_loss_coeff is not None:
            loss = z_loss(logits)
            self.sums[1] += loss.detach()
            losses.append(self._rule.z_loss_coeff * loss)
        return sum(losses[1:], losses[0]) if losses else None

    def _balancing_loss(self, logits: Tensor, counts: Tensor) -> Tensor:
        """The load balancing loss with its coefficients; ``counts`` ``[b, E]`` are those of this rank."""
        pending = self._sequence_ranks.start_all_reduce(counts)
        probabilities = balancing_probabilities(logits, self._routing_rule.score_function)  # [n, E]
        sums = probabilities.view(-1, *counts.shape).sum(dim=0)  # [b, E]
        counts = pending.wait()
        topk, num_sequences = self._routing_rule.topk, counts.shape[0]
        length = logits.shape[0] // num_sequences * self._sequence_ranks.size
        total = logits.new_zeros(())
        for kind, coeff in self._rule.balancing_losses:
            if kind == "seq_aux_loss":
                loss = length * load_balancing_loss(counts, sums, topk, length).sum()
            else:
                tokens = num_sequences * length
                loss = tokens * load_balancing_loss(counts.sum(dim=0), sums.sum(dim=0), topk, tokens)
            total = total + coeff * loss
        self.sums[0] += total.detach() / self._rule.total_coeff
        return total

    def start_step(self) -> None:
        self.counts.zero_()
        self.sums.zero_()

    def update_bias(self, counts: Tensor) -> None:
        """``bias += rate * sign(mean(counts) - counts)`` with the ``counts`` ``[E]`` fp64 of the global batch
        (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
        assert self.expert_bias is not None and self._rule.bias_update_rate is not None
        # E times the difference, because a mean may not be a number of tokens: integers are exact in fp64.
        missing = counts.sum() - counts * counts.numel()
        self.expert_bias.add_(missing.sign().to(torch.float32), alpha=self._rule.bias_update_rate)


class ExpertBalance:
    """The balance of all routers of a rank.

    ``layers`` are the numbers of all layers with experts in the model, ascending. Every rank of the ``world`` has this
    object, also if its stage has no experts. ``sequence_ranks`` are the ranks that share a sequence: tensor- and
    context-parallel ranks.
    """

    def __init__(
        self,
        routing_rule: RoutingRule,
        rule: BalanceRule,
        layers: Sequence[int],
        sequence_ranks: Communicator,
        world: Communicator,
        device: torch.device,
    ) -> None:
        self._routing_rule, self._rule, self._layers = routing_rule, rule, tuple(layers)
        self._sequence_ranks, self._world, self._device = sequence_ranks, world, device
        self._routers: dict[int, RouterBalance] = {}
        self._scale = 0.0
        self._counts = torch.zeros(len(self._layers), routing_rule.num_experts, dtype=torch.float64, device=device)
        """Number of tokens of the global batch that chose each expert of each layer, ``[layers, E]``."""

    def add_router(self, layer: int) -> RouterBalance:
        assert layer in self._layers and layer not in self._routers, (layer, self._layers)
        router = RouterBalance(layer, self._routing_rule, self._rule, self._sequence_ranks, self._device)
        self._routers[layer] = router
        return router

    def start_step(self, scale: float) -> None:
        """Reset counts and losses; ``scale`` is the gradient of the sum of token losses."""
        self._scale = scale
        for router in self._routers.values():
            router.start_step()

    def with_loss(self, weights: Tensor, loss: Tensor) -> Tensor:
        """``weights``, whose backward pass adds ``scale`` times the gradient of ``loss``.

        So the stage of a router computes the gradient of its loss, and no stage sends losses to the last one.
        """
        result: Tensor = _WithLoss.apply(weights, loss, self._scale)
        return result

    def start_sum(self) -> Work[Tensor]:
        """Sum counts and losses over all ranks: ``[layers, E + 2]`` fp64, exact for counts below 2^53. A collective."""
        total = torch.zeros(
            len(self._layers), self._routing_rule.num_experts + 2, dtype=torch.float64, device=self._device
        )
        for layer, router in self._routers.items():
            total[self._layers.index(layer)] = torch.cat((router.counts.to(torch.float64), router.sums))
        return self._world.start_all_reduce(total)

    def update_biases(self) -> None:
        """Update the expert biases by the counts of :meth:`finish_sum`; not in a skipped step."""
        if self._rule.bias_update_rate is not None:
            for layer, router in self._routers.items():
                router.update_bias(self._counts[self._layers.index(layer)])

    def finish_sum(self, total: Tensor) -> dict[str, float]:
        """The metrics of the step from the ``total`` of :meth:`start_sum`. Waits for the device.

        They are the losses without coefficients, as means over tokens and layers, and the worst layer's ratio of the
        largest to the mean count; with ``logs_layers`` also the values of every layer.
        """
        counts, sums = total[:, :-2], total[:, -2:]  # [layers, E], [layers, 2]
        self._counts = counts
        choices = counts.sum(dim=1)  # [layers]: tokens * k
        loads = counts.amax(dim=1) * counts.shape[1] / choices
        means = sums * (self._routing_rule.topk / choices).unsqueeze(1)  # [layers, 2]
        columns = {"load_balancing_loss": means[:, 0], "z_loss": means[:, 1], "expert_load_max": loads}
        if not self._rule.balancing_losses:
            del columns["load_balancing_loss"]
        if self._rule.z_loss_coeff is None:
            del columns["z_loss"]
        # One copy to the host for all metrics.
        values = dict(zip(columns, torch.stack(tuple(columns.values())).tolist()))
        metrics = {name: max(row) if name == "expert_load_max" else sum(row) / len(row) for name, row in values.items()}
        if self._rule.logs_layers:
            for name, row in values.items():
                metrics |= {f"{LAYER_METRICS}{name}_layer_{layer}": value for layer, value in zip(self._layers, row)}
        return metrics

    def state(self) -> dict[str, Tensor]:
        """The expert biases of this rank's layers, for checkpoints, which load them in place. They are equal on ranks
        with the same layers."""
        return {
            router.bias_name: router.expert_bias for router in self._routers.values() if router.expert_bias is not None
        }


class _WithLoss(Function):
    """Identity on the weights; the loss gets the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.loss_gradient = torch.full_like(loss, scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.loss_gradient, None
