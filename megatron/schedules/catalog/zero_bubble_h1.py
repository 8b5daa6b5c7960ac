"""ZB-H1: 1F1B with delayed weight gradients (Qi et al., arXiv 2401.10241, section 2.2).

Stage p delays them by p microbatches, so that all stages hold the same number of activations.
"""

from collections.abc import Iterator

from megatron.schedules.catalog.one_f_one_b import one_forward_one_backward
from megatron.schedules.schedule import Action, ScheduleSpec, Shape


def zero_bubble_h1(stage: int, shape: Shape) -> Iterator[Action]:
    for action in one_forward_one_backward(stage, shape):
        yield action
        if action.kind == "B" and action.microbatch >= stage:
            yield Action("W", action.microbatch - stage, 0)
    for microbatch in range(max(0, shape.microbatches - stage), shape.microbatches):
        yield Action("W", microbatch, 0)


SCHEDULE = ScheduleSpec(
    "zb-h1",
    "1f1b whose weight gradients fill idle time",
    zero_bubble_h1,
    live_activations=lambda stage, shape: min(shape.stages, shape.microbatches),
    splits_backward=True,
)
