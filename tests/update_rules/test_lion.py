"""An elementwise update rule that no file but this one knows, in every sharding."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.update_rules.rule import Flags, Shard, UpdateRule, update_rules
from tests.parallel.layout_run import Layout, Task, Trace, assemble, build, place_in, train
from tests.rank_pool import RankPool


@dataclass(frozen=True)
class LionFlags(Flags):
    """Flags as a rule of the room has them."""

    lion_beta1: float = 0.95
    """Share of the momentum in the update."""
    lion_beta2: float = 0.98
    """Decay of the momentum."""


class Lion(UpdateRule):
    """Lion (arXiv 2302.06675)."""

    name = "lion"
    flags = LionFlags

    def __init__(self, flags: LionFlags) -> None:
        self._flags = flags

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """The momentum."""
        return {"lion_momentum": torch.zeros_like(weight)}

    def update(self, shard: Shard, learning_rate: float, weight_decay: float, step: int) -> None:
        """The sign of an average."""
        momentum = shard.state["lion_momentum"]
        direction = momentum.lerp(shard.gradient, 1 - self._flags.lion_beta1).sign_()
        shard.weight.mul_(1 - learning_rate * weight_decay).add_(direction, alpha=-learning_rate)
        momentum.lerp_(shard.gradient, 1 - self._flags.lion_beta2)


@dataclass(frozen=True)
class LionConfig(LionFlags, OptimizerConfig):
    """What :class:`OptimizerConfig` is where the rule is a file of the room."""


TASK = Task(LionConfig(optimizer="lion", weight_decay=0.1, lion_beta1=0.9), learning_rate=1e-3, steps=3)


def state_names(task: Task, layout: Layout) -> set[str]:
    _, _, optimizer = build(task, layout, place_in(layout))
    return {state.kind for state in optimizer.state()}


def slow_lion(gradients: list[Tensor], weight: Tensor) -> Tensor:
    """The paper's algorithm on one whole tensor."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        direction = (0.9 * momentum + 0.1 * gradient).sign()
        weight = weight - 1e-3 * (direction + 0.1 * weight)
        momentum = 0.98 * momentum + 0.02 * gradient
    return weight


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_rule_of_one_file_trains_in_every_sharding(four_ranks: RankPool, strategy: str) -> None:
    expected = train(TASK, Layout())
    layout = Layout(2, 2, True, strategy, bucket_size=None if strategy == "optim_grads_params" else 3000)  # type: ignore[arg-type]
    traces: list[Trace] = four_ranks.run(train, TASK, layout, world_size=4)
    for step in range(TASK.steps):
        found = assemble([part for trace in traces for part in trace.weights[step]])
        for name, weight in assemble(expected.weights[step]).items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12, msg=name)


def test_its_state_is_saved_under_its_names() -> None:
    assert state_names(TASK, Layout()) == {"lion_momentum"}
    assert "lion" in update_rules()


def test_its_steps_are_those_of_the_paper() -> None:
    trace = train(TASK, Layout())
    name = "layers.0.mlp.linear_fc2.weight"
    scales = [min(1.0, TASK.optimizer.clip_grad / (norm + 1e-6)) for norm in trace.grad_norms]
    gradients = [assemble(step)[name] * scale for step, scale in zip(trace.gradients, scales)]
    one = assemble(trace.weights[0])[name]
    first = slow_lion(gradients[:1], torch.zeros_like(one))
    # The weights before the first step are what it is the step from.
    start = (one - first) / (1 - 1e-3 * 0.1)
    torch.testing.assert_close(assemble(trace.weights[-1])[name], slow_lion(gradients, start), rtol=1e-9, atol=1e-12)


def test_a_rule_of_unknown_scaling_does_not_support_mup() -> None:
    assert "use adam" in str(Lion(LionFlags()).mup_obstacle())
