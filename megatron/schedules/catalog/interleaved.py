"""1F1B over several chunks, a group of microbatches at a time (Narayanan et al., arXiv 2104.04473, section 2.2)."""

from collections.abc import Iterator

from megatron.schedules.schedule import Action, ScheduleSpec, Shape, alternate


def interleaved(stage: int, shape: Shape) -> Iterator[Action]:
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


SCHEDULE = ScheduleSpec(
    "interleaved",
    "default with several chunks per rank: less idle time, more messages",
    interleaved,
    live_activations=lambda stage, shape: min(_ahead(stage, shape) + 1, shape.microbatches * shape.chunks),
    chunks="several chunks",
    groups_microbatches=True,
)
