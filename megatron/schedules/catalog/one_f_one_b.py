"""GPipe, and 1F1B: plain, with delayed weight gradients, and interleaved over several chunks per stage."""

# Four microbatches of one chunk on two stages (the lower row is the last stage):
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


def interleaved(stage: int, shape: Shape) -> Iterator[Action]:
    """1F1B over several chunks, a group of microbatches at a time (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    groups = microbatch_groups(shape)
    chunks = range(shape.chunks)
    forwards = [(chunk, microbatch) for group in groups for chunk in chunks for microbatch in group]
    backwards = [(chunk, microbatch) for group in groups for chunk in reversed(chunks) for microbatch in group]
    for action in alternate(forwards, backwards, ahead=_ahead(stage, shape)):
        if action.microbatch < shape.microbatches:
            yield action


def microbatch_groups(shape: Shape) -> list[range]:
    """Microbatches in groups of ``group_size``; a remainder makes groups longer by one, or is an additional group.

    A group with fewer microbatches than stages would deadlock: its first microbatch would need the next chunk before
    the pipeline has produced its input. It is padded to ``stages`` with numbers beyond the batch. Longer groups hold
    more activations, so every group gets at most one microbatch of the remainder.
    """
    full, rest = divmod(shape.microbatches, shape.group_size)
    sizes = [shape.group_size] * full
    if rest <= full and rest < shape.stages:
        sizes = [size + (number < rest) for number, size in enumerate(sizes)]
    elif full == 0:
        sizes = [rest]
    else:
        sizes.append(max(rest, shape.stages))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes)]


def _ahead(stage: int, shape: Shape) -> int:
    longest = max(len(group) for group in microbatch_groups(shape))
    return 2 * (shape.stages - stage - 1) + (shape.chunks - 1) * longest


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
INTERLEAVED = ScheduleSpec(
    "interleaved",
    "default with several chunks per rank: less idle time, more messages",
    interleaved,
    live_activations=lambda stage, shape: min(_ahead(stage, shape) + 1, shape.microbatches * shape.chunks),
    chunks="several chunks",
    groups_microbatches=True,
)
