"""Weight decay that changes over the run."""

import math

import pytest

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.hyperparameters import build_weight_decay_schedule


@pytest.mark.parametrize(
    ("style", "expected"),
    [("linear", [0.02, 0.04, 0.06, 0.1, 0.1]), ("cosine", [0.02, 0.02 + 0.04 * (1 - math.sqrt(0.5)), 0.06, 0.1, 0.1])],
)
def test_weight_decay_goes_from_its_start_to_its_end_and_stays_there(style: str, expected: list[float]) -> None:
    config = OptimizerConfig(start_weight_decay=0.02, end_weight_decay=0.1, weight_decay_incr_style=style)  # type: ignore[arg-type]
    schedule = build_weight_decay_schedule(config, planned_samples=1000)
    assert schedule is not None
    assert [schedule(samples) for samples in (0, 250, 500, 1000, 1500)] == pytest.approx(expected)


def test_a_constant_weight_decay_needs_no_schedule() -> None:
    assert build_weight_decay_schedule(OptimizerConfig(), planned_samples=1000) is None
