"""An update rule bound to plain tensors of one process."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.core.data_parallel.buffer import ParameterSplit
from megatron.core.optimizer import AdamBuilder, WholeMatrices, torch_adam
from megatron.core.parameter import ParameterInfo, sharded_boxes
from megatron.core.topology import single_process
from megatron.update_rules.rule import Group, ParameterFacts, Shard, UpdateContext, build_rule

if TYPE_CHECKING:
    from megatron.update_rules.rule import MatrixUpdates


def bind(
    config: OptimizerConfig,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    decays: Sequence[float],
    adam: AdamBuilder = torch_adam,
) -> tuple[list[Group], Callable[[int], None]]:
    """A group for each of ``weights``, which may be matrices, and the update of all of them."""
    rule, ranks = build_rule(config), single_process().tensor_parallel
    infos = [
        ParameterInfo(f"p{number}", *sharded_boxes([weight.shape[0]], weight.shape[1:], 0, 1), None, True, True)
        for number, weight in enumerate(weights)
    ]
    groups = [
        Group([Shard(info, weight.view(-1), gradient.view(-1), rule.state(weight.view(-1)))], decay)
        for info, weight, gradient, decay in zip(infos, weights, gradients, decays, strict=True)
    ]
    splits = [ParameterSplit(info, 0, weight.numel()) for info, weight in zip(infos, weights)]

    def whole_matrices(belongs: Callable[[ParameterFacts], bool]) -> "MatrixUpdates":
        return WholeMatrices(
            [split for split in splits if belongs(split.info)], ranks, weights[0].new_empty(0)
        ).transform

    context = UpdateContext(adam, ranks, whole_matrices)
    return groups, rule.bind(groups, context)


def states(groups: Sequence[Group]) -> list[dict[str, Tensor]]:
    """The state tensors of every weight."""
    return [shard.state for group in groups for shard in group.shards]


def trained(
    config: OptimizerConfig,
    weights: list[Tensor],
    draw: Callable[[], Sequence[Tensor]],
    steps: int,
    gradient_dtype: torch.dtype = torch.float32,
    decays: Sequence[float] | None = None,
) -> list[Group]:
    """Train ``weights`` in place; ``draw`` returns their gradients in a step."""
    gradients = [torch.zeros_like(weight, dtype=gradient_dtype) for weight in weights]
    groups, update = bind(config, weights, gradients, decays or [0.1] * len(weights))

    def next_gradient() -> None:
        for gradient, drawn in zip(gradients, draw(), strict=True):
            gradient.copy_(drawn)

    run(groups, update, range(steps), next_gradient)
    return groups


def run(
    groups: Sequence[Group], update: Callable[[int], None], steps: range, next_gradient: Callable[[], None]
) -> None:
    """Make the updates with these numbers, at a learning rate of 0.01."""
    for step in steps:
        next_gradient()
        for group in groups:
            group.learning_rate = 1e-2
        with torch.no_grad():
            update(step + 1)
