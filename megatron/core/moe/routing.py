"""Experts and weights from the logits of a router, and the balance of a rank's routers in a step.

Routing and the losses are functions of tensors, without ranks. Tokens ``[s, b]`` are flattened to n = s * b rows, E is
the number of experts, k the experts of a token. No function makes a tensor of n * k * E elements. Logits are fp32 or
fp64: with bf16 logits many tokens have ties.

The balance of a step has counts, auxiliary losses, expert biases and metrics. An auxiliary loss is a sum over tokens
(:mod:`megatron.core.auxiliary_losses`):

- load balancing: ``alpha * T * LBL`` for every set of T tokens, which is a sequence (``seq_aux_loss``) or a microbatch
  (``aux_loss``);
- z-loss: ``beta * sum of logsumexp^2``.

All tokens of a sequence count, also those that the loss mask leaves out. Ranks that share a sequence add their counts,
which have no gradient. They do not add probabilities, because the loss is linear in them: each rank's loss is its
addend, and only the sum over the ranks is the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from megatron.architectures.features import RouterScoreFunction
from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import MoEConfig
from megatron.core.communication import Communicator, Work
from megatron.metrics.writer import LAYER_METRICS

SCORES: Mapping[RouterScoreFunction, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid}
"""Score functions of single logits. Softmax, the other one, is a function of all logits of a token."""
_SMALL = 1e-20
"""Added to sums of scores, which may be zero (DeepSeek-V3)."""


@dataclass(frozen=True)
class RoutingRule:
    """The rule by which a router chooses and weighs experts. The fields are the flags ``--moe-router-*``."""

    num_experts: int
    topk: int
    score_function: RouterScoreFunction = "softmax"
    pre_softmax: bool = False
    """Softmax over all experts, before the choice; otherwise over the chosen experts."""
    scaling_factor: float | None = None
    """Multiplies the weights."""
    num_groups: int | None = None
    """Equal groups of neighbouring experts, of which ``group_topk`` are chosen first."""
    group_topk: int | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.topk <= self.num_experts, self
        assert (self.num_groups is None) == (self.group_topk is None), self
        if self.num_groups is not None and self.group_topk is not None:
            assert self.num_experts % self.num_groups == 0 and self.group_topk <= self.num_groups, self
            # At least one score of every group counts, and the chosen groups have enough experts.
            group_size = self.num_experts // self.num_groups
            assert self.group_topk <= self.topk <= self.group_topk * group_size, self

    @classmethod
    def of(cls, config: TransformerConfig) -> "RoutingRule":
        assert config.num_experts is not None
        return cls(
            num_experts=config.num_experts,
            topk=config.moe_router_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            scaling_factor=config.moe_router_topk_scaling_factor,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
        )


@dataclass(frozen=True)
class Routing:
    """The experts of every token."""

    experts: Tensor
    """``[n, k]`` int64, the best first; of equal scores the lowest id."""
    weights: Tensor
    """``[n, k]`` in the dtype of the logits; differentiable."""


def route(logits: Tensor, rule: RoutingRule, expert_bias: Tensor | None = None) -> Routing:
    """Choose ``k`` experts for every row of ``logits`` ``[n, E]``.

    ``expert_bias`` ``[E]`` is added to the scores for the choice, not in the weights (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2).
    """
    assert logits.dtype in (torch.float32, torch.float64), logits.dtype
    with torch.no_grad():
        scores = logits
        if rule.score_function != "softmax":
            scores = SCORES[rule.score_function](logits)
        elif rule.pre_softmax:
            scores = logits.softmax(dim=1)
        if expert_bias is not None:
            scores = scores + expert_bias
        experts = _best(_exclude_groups(scores, rule), rule.topk)
    return Routing(experts, _weights(logits, experts, rule))


def balanced_routing(logits: Tensor, rule: RoutingRule) -> Routing:
    """Experts in turn, whatever the logits are: every expert gets the same number of rows if E divides n * k. The
    weights are those of ``logits`` ``[n, E]`` at these experts. Only for measurements of speed: the experts of a token
    depend on its row."""
    num_choices = logits.shape[0] * rule.topk
    experts = (torch.arange(num_choices, device=logits.device) % rule.num_experts).view(-1, rule.topk)
    return Routing(experts, _weights(logits, experts, rule))


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` highest scores of every row, of equal scores the lowest: ``[n, count]``."""
    # topk may return any of equal scores, and its choice depends on the device.
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _exclude_groups(scores: Tensor, rule: RoutingRule) -> Tensor:
    """``scores`` ``[n, E]`` with minus infinity for all experts of groups that are not chosen."""
    if rule.num_groups is None or rule.group_topk is None:
        return scores
    by_group = scores.unflatten(1, (rule.num_groups, -1))  # [n, groups, E / groups]
    # A group's score is the sum of its best k / group_topk experts.
    group_scores = by_group.topk(rule.topk // rule.group_topk, dim=2).values.sum(dim=2)  # [n, groups]
    excluded = torch.ones_like(group_scores, dtype=torch.bool)
    excluded.scatter_(1, _best(group_scores, rule.group_topk), False)
    return by_group.masked_fill(excluded.unsqueeze(2), -inf).flatten(1)


def _weights(logits: Tensor, experts: Tensor, rule: RoutingRule) -> Tensor:
    """The weights ``[n, k]`` of the chosen ``experts`` ``[n, k]``."""
    chosen = logits.gather(1, experts)
    if rule.score_function != "softmax":
        scores = SCORES[rule.score_function](chosen)
        weights = scores if rule.topk == 1 else _normalized(scores)
    elif rule.pre_softmax:
        weights = (chosen - logits.logsumexp(dim=1, keepdim=True)).exp()
    else:
        weights = chosen.softmax(dim=1)
    return weights if rule.scaling_factor is None else weights * rule.scaling_factor


def _normalized(scores: Tensor) -> Tensor:
    return scores / (scores.sum(dim=1, keepdim=True) + _SMALL)


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Number of times that each expert occurs in ``experts``, of any shape: ``[E]`` int64."""
    # Not bincount: the dry run has no values, on which the shape of its output depends.
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())


def count_choices_by_set(experts: Tensor, num_experts: int) -> Tensor:
    """Number of times that each expert occurs in each set, dim 1 of ``experts`` ``[_, sets, _]``: ``[sets, E]``."""
    num_sets = experts.shape[1]
    first_cells = torch.arange(0, num_sets * num_experts, num_experts, device=experts.device).view(-1, 1)  # [sets, 1]
    return count_choices(experts + first_cells, num_sets * num_experts).view(num_sets, num_experts)


def balancing_probabilities(logits: Tensor, score_function: RouterScoreFunction) -> Tensor:
    """The probabilities of the load balancing loss, ``[n, E]``: every row sums to 1."""
    if score_function == "softmax":
        return logits.softmax(dim=1)
    return _normalized(SCORES[score_function](logits))


def load_balancing_loss(counts: Tensor, probability_sums: Tensor, topk: int, num_tokens: int) -> Tensor:
    """``E * sum_i c_i P_i / (k T^2)`` of sets of ``num_tokens`` tokens, 1 if they are balanced: ``[...]``.

    ``counts`` ``[..., E]`` are the tokens that chose each expert, ``probability_sums`` ``[..., E]`` the sums of their
    :func:`balancing_probabilities`. Sums of a part of the tokens, with the counts of all, give the part's addend. See
    Switch Transformer (arXiv 2101.03961), equations 4 to 6, divided by k.
    """
    products = (counts.to(probability_sums.dtype) * probability_sums).sum(dim=-1)
    return products * (counts.shape[-1] / (topk * num_tokens**2))


def z_loss(logits: Tensor) -> Tensor:
    """The sum over tokens of ``logsumexp(logits)^2``, a scalar (ST-MoE, arXiv 2202.08906, equation 5)."""
    return logits.logsumexp(dim=1).square().sum()


# The balance of a rank's routers

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
        self.sums[0] += total.detach() / sum(coeff for _, coeff in self._rule.balancing_losses)
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
        self._counts = torch.zeros(len(self._layers), routing_rule.num_experts, dtype=torch.float64, device=device)
        """Number of tokens of the global batch that chose each expert of each layer, ``[layers, E]``."""

    def add_router(self, layer: int) -> RouterBalance:
        assert layer in self._layers and layer not in self._routers, (layer, self._layers)
        router = RouterBalance(layer, self._routing_rule, self._rule, self._sequence_ranks, self._device)
        self._routers[layer] = router
        return router

    def start_step(self) -> None:
        """Reset counts and losses."""
        for router in self._routers.values():
            router.start_step()

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
            f"layers.{layer}.mlp.router.expert_bias": router.expert_bias
            for layer, router in self._routers.items()
            if router.expert_bias is not None
        }
