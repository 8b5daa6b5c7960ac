"""Schedules of one chunk per stage: GPipe, 1F1B, and 1F1B with delayed weight gradients."""

# Four microbatches on two stages (the lower row is the last stage):
#
#     gpipe    F0 F1 F2 F3 -- -- B0 B1 B2 B3      1f1b    F0 F1 -- B0 F2 B1 F3 B2 -- B3
#              -- F0 F1 F2 F3 B0 B1 B2 B3                 -- F0 B0 F1 B1 F2 B2 F3 B3

from collections.abc import Iterator

from megatron.schedules.schedule import Action, ScheduleSpec, Shape, alternate


def gpipe(stage: int, shape: Shape) -> Iterator[Action]:
    """All forward passes, then all backward passes (Huang et al., arXiv 1811.06965)."""
    for microbatch in range(shape.microbatches):
        yield Action("F", microbatch, 0)
    for microbatch in range(shape.microbatches):
        yield Action("B", microbatch, 0)


def one_forward_one_backward(stage: int, shape: Shape) -> Iterator[Action]:
    """As few forward passes as fill the pipeline, then one and one (PipeDream-Flush, arXiv 2006.09503)."""
    order = [(0, microbatch) for microbatch in range(shape.microbatches)]
    yield from alternate(order, order, ahead=shape.stages - stage - 1)


def zero_bubble_h1(stage: int, shape: Shape) -> Iterator[Action]:
    """1F1B whose weight gradients stage p delays by p microbatches, so that all stages hold the same number of
    activations (Qi et al., arXiv 2401.10241, section 2.2)."""
    for action in one_forward_one_backward(stage, shape):
        yield action
        if action.kind == "B" and action.microbatch >= stage:
            yield Action("W", action.microbatch - stage, 0)
    for microbatch in range(max(0, shape.microbatches - stage), shape.microbatches):
        yield Action("W", microbatch, 0)


GPIPE = ScheduleSpec(
    "gpipe", "all forward, then all backward", gpipe, live_activations=lambda stage, shape: shape.microbatches
)
ONE_F_ONE_B = ScheduleSpec(
    "1f1b",
    "default: one forward, one backward in turn",
    one_forward_one_backward,
    live_activations=lambda stage, shape: min(shape.stages - stage, shape.microbatches),
)
ZERO_BUBBLE_H1 = ScheduleSpec(
    "zb-h1",
    "1f1b whose weight gradients fill idle time",
    zero_bubble_h1,
    live_activations=lambda stage, shape: min(shape.stages, shape.microbatches),
    splits_backward=True,
)
