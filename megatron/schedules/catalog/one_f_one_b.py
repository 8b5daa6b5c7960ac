"""1F1B: as few forward passes as fill the pipeline, then one and one (PipeDream-Flush, arXiv 2006.09503)."""

from collections.abc import Iterator

from megatron.schedules.schedule import Action, ScheduleSpec, Shape, alternate


def one_forward_one_backward(stage: int, shape: Shape) -> Iterator[Action]:
    order = [(0, microbatch) for microbatch in range(shape.microbatches)]
    yield from alternate(order, order, ahead=shape.stages - stage - 1)


SCHEDULE = ScheduleSpec(
    "1f1b",
    "default: one forward, one backward in turn",
    one_forward_one_backward,
    live_activations=lambda stage, shape: min(shape.stages - stage, shape.microbatches),
)
