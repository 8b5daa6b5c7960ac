"""Routers of tests: rules, logits, the balance of one rank, and the definition of the load balancing loss."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.moe import routing
from megatron.core.moe.routing import (
    BalanceRule,
    BalancingLoss,
    ExpertBalance,
    RouterBalance,
    RoutingRule,
    balancing_probabilities,
    route,
)

CPU = torch.device("cpu")
ALONE = Communicator((0,), 0)
SOFTMAX = RoutingRule(num_experts=8, topk=2)
SIGMOID = RoutingRule(8, 3, score_function="sigmoid", scaling_factor=2.5, num_groups=4, group_topk=2)
SEQUENCE: tuple[BalancingLoss, float] = ("seq_aux_loss", 0.25)
MICROBATCH: tuple[BalancingLoss, float] = ("aux_loss", 0.5)
LENGTH, SEQUENCES = 12, 4


def logits_of(routing_rule: RoutingRule, length: int = LENGTH, sequences: int = SEQUENCES, seed: int = 0) -> Tensor:
    """Random logits ``[s, b, E]`` whose sequences prefer different experts."""
    generator = torch.Generator().manual_seed(seed)
    shape = length, sequences, routing_rule.num_experts
    preferences = torch.randn(shape[1:], dtype=torch.float64, generator=generator)
    return torch.randn(shape, dtype=torch.float64, generator=generator) + preferences


def balance_of(
    rule: BalanceRule, routing_rule: RoutingRule = SOFTMAX, layers: Sequence[int] = (0,), ranks: Communicator = ALONE
) -> ExpertBalance:
    return ExpertBalance(routing_rule, rule, layers, ranks, ranks, CPU)


def observe(router: RouterBalance, logits: Tensor, routing_rule: RoutingRule) -> Tensor | None:
    """The loss of ``logits`` ``[s, b, E]``."""
    rows = logits.flatten(0, 1)
    return router.observe(rows, route(rows, routing_rule, router.expert_bias).experts, logits.shape[1])


def finish(balance: ExpertBalance) -> dict[str, float]:
    """The end of a step: the metrics, after an update of the biases."""
    metrics = balance.finish_sum(balance.start_sum().wait())
    balance.update_biases()
    return metrics


def defined_loss(kind: BalancingLoss, logits: Tensor, routing_rule: RoutingRule) -> Tensor:
    """T times the load balancing loss of every set of T tokens of ``logits`` ``[s, b, E]``, token by token."""
    total = logits.new_zeros(())
    sets = logits.unbind(dim=1) if kind == "seq_aux_loss" else [logits.flatten(0, 1)]
    for tokens in sets:
        size, num_experts = tokens.shape
        counts, sums = [0] * num_experts, [logits.new_zeros(())] * num_experts
        for row in tokens:
            for expert in route(row[None], routing_rule).experts[0].tolist():
                counts[expert] += 1
            probabilities = balancing_probabilities(row[None], routing_rule.score_function)[0]
            sums = [total + probability for total, probability in zip(sums, probabilities)]
        products = sum(count * total for count, total in zip(counts, sums))
        total = total + size * num_experts * products / (routing_rule.topk * size**2)
    return total


def selection_margin(logits: Tensor, rule: RoutingRule, expert_bias: Tensor | None = None) -> Tensor:
    """The smallest difference between the scores of a chosen and of another expert or group, over all rows of
    ``logits`` ``[n, E]``: a scalar, infinite if nothing can be chosen otherwise. Noise below half of it changes no set
    of chosen experts. It may change their order."""
    scores = logits.detach()
    if rule.score_function != "softmax":
        scores = routing.SCORES[rule.score_function](scores)
    elif rule.pre_softmax:
        scores = scores.softmax(dim=1)
    scores = scores if expert_bias is None else scores + expert_bias
    margins = [scores.new_full((1,), inf), _margins(routing._exclude_groups(scores, rule), rule.topk)]
    if rule.num_groups is not None and rule.group_topk is not None:
        best = scores.unflatten(1, (rule.num_groups, -1)).topk(rule.topk // rule.group_topk, dim=2).values
        margins.append(_margins(best.sum(dim=2), rule.group_topk))
    return torch.cat(margins).min()


def _margins(scores: Tensor, count: int) -> Tensor:
    """The difference of the ``count``-th highest score of every row and the next: ``[n]``; empty if there is none."""
    if count == scores.shape[1]:
        return scores.new_empty(0)
    best = scores.topk(count + 1, dim=1).values
    return best[:, -2] - best[:, -1]
