"""Experts and weights from the logits of a router, and the losses of routers: functions of tensors, without ranks.

Tokens ``[s, b]`` are flattened to n = s * b rows, E is the number of experts, k the experts of a token. No function
makes a tensor of n * k * E elements. Logits are fp32 or fp64: with bf16 logits many tokens have ties.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from megatron.architectures.transformer_config import RouterScoreFunction, TransformerConfig

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
