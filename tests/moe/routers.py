"""Routers of tests: rules, logits, the balance of one rank, and the definition of the load balancing loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.communication import Communicator
from megatron.core.moe.routing import BalanceRule, BalancingLoss, ExpertBalance, RouterBalance, RoutingRule, route

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
            scores = row.sigmoid() if routing_rule.score_function == "sigmoid" else row.exp()
            sums = [total + score / scores.sum() for total, score in zip(sums, scores)]
        products = sum(count * total for count, total in zip(counts, sums))
        total = total + size * num_experts * products / (routing_rule.topk * size**2)
    return total
