"""GPipe: all forward passes, then all backward passes (Huang et al., arXiv 1811.06965)."""

from collections.abc import Iterator

from megatron.schedules.schedule import Action, ScheduleSpec, Shape


def gpipe(stage: int, shape: Shape) -> Iterator[Action]:
    for microbatch in range(shape.microbatches):
        yield Action("F", microbatch, 0)
    for microbatch in range(shape.microbatches):
        yield Action("B", microbatch, 0)


SCHEDULE = ScheduleSpec(
    "gpipe", "all forward, then all backward", gpipe, live_activations=lambda stage, shape: shape.microbatches
)
