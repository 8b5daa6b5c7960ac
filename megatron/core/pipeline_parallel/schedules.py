"""The schedules: each a small function from (stage, stages, microbatches, ...) to that stage's list of actions.

A new schedule is a function here with its row in :data:`ORDERS`, and its row in
:data:`megatron.config.pipeline.SCHEDULES`; verifier, simulator and executor take it as it is.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config.pipeline import SCHEDULES, ScheduleName
from megatron.core.pipeline_parallel.schedule import Action, Kind, Placement, Schedule, ScheduleError


@dataclass(frozen=True)
class Shape:
    """What a schedule is asked for."""

    stages: int
    microbatches: int
    chunks: int = 1
    group_size: int = 1
    """Microbatches that go through a chunk in a row (interleaved only)."""


def gpipe(stage: int, shape: Shape) -> Iterator[Action]:
    """All forward passes, then all backward passes (Huang et al., arXiv 1811.06965)."""
    for microbatch in range(shape.microbatches):
        yield Action("F", microbatch, 0)
    for microbatch in range(shape.microbatches):
        yield Action("B", microbatch, 0)


def one_forward_one_backward(stage: int, shape: Shape) -> Iterator[Action]:
    """As few forward passes as fill the pipeline, then one and one (PipeDream-Flush, arXiv 2006.09503)."""
    order = [(0, microbatch) for microbatch in range(shape.microbatches)]
    yield from _alternate(order, order, ahead=shape.stages - stage - 1)


def interleaved(stage: int, shape: Shape) -> Iterator[Action]:
    """1F1B over several chunks, a group of microbatches at a time (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    groups = microbatch_groups(shape)
    chunks = range(shape.chunks)
    forwards = [(chunk, microbatch) for group in groups for chunk in chunks for microbatch in group]
    backwards = [(chunk, microbatch) for group in groups for chunk in reversed(chunks) for microbatch in group]
    for action in _alternate(forwards, backwards, ahead=_interleaved_ahead(stage, shape)):
        if action.microbatch < shape.microbatches:
            yield action


def microbatch_groups(shape: Shape) -> list[range]:
    """Microbatches in groups of ``group_size``; those left over make groups longer by one, or a group of their own.

    A group shorter than the pipeline would reach the next chunk before the pipeline has delivered its input, and lock
    up; it is filled up to ``stages`` with microbatches that the batch does not have. Longer groups hold more
    activations, so no group gets more than one of those left over.
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


def _interleaved_ahead(stage: int, shape: Shape) -> int:
    longest = max(len(group) for group in microbatch_groups(shape))
    return 2 * (shape.stages - stage - 1) + (shape.chunks - 1) * longest


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int
) -> Iterator[Action]:
    """Run ``ahead`` forward passes, then one forward and one backward pass in turn; pairs (chunk, microbatch)."""
    ahead = min(ahead, len(forwards))
    for chunk, microbatch in forwards[:ahead]:
        yield Action("F", microbatch, chunk)
    for number, (chunk, microbatch) in enumerate(backwards):
        if ahead + number < len(forwards):
            forward_chunk, forward_microbatch = forwards[ahead + number]
            yield Action("F", forward_microbatch, forward_chunk)
        yield Action("B", microbatch, chunk)


def zero_bubble_h1(stage: int, shape: Shape) -> Iterator[Action]:
    """1F1B whose weight gradients wait: stage p is p microbatches late with them, so that all stages hold as much.

    ZB-H1 of Qi et al., arXiv 2401.10241, section 2.2.
    """
    for action in one_forward_one_backward(stage, shape):
        yield action
        if action.kind == "B" and action.microbatch >= stage:
            yield Action("W", action.microbatch - stage, 0)
    for microbatch in range(max(0, shape.microbatches - stage), shape.microbatches):
        yield Action("W", microbatch, 0)


class ChunkPass(NamedTuple):
    """An action whose microbatch is not numbered yet."""

    kind: Kind
    chunk: int


class _Counter:
    """Hands out the next microbatch of each kind and chunk, and leaves out those that the batch does not have."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.next: dict[ChunkPass, int] = {}

    def __call__(self, *passes: ChunkPass) -> Iterator[Action]:
        for one in passes:
            microbatch = self.next.get(one, 0)
            self.next[one] = microbatch + 1
            if microbatch < self.microbatches:
                yield Action(one.kind, microbatch, one.chunk)


_F0, _F1 = ChunkPass("F", 0), ChunkPass("F", 1)
_B0, _B1 = ChunkPass("B", 0), ChunkPass("B", 1)
_W0, _W1 = ChunkPass("W", 0), ChunkPass("W", 1)


def zero_bubble_v(stage: int, shape: Shape) -> Iterator[Action]:
    """V-shaped, with the memory of 1F1B and no bubble when F = B = W.

    ZB-V of Qi et al., arXiv 2401.10241, section 6 and appendix.
    """
    after = shape.stages - stage
    do = _Counter(shape.microbatches)
    for _ in range(2 * after - 1):
        yield from do(_F0)
    for _ in range(stage):
        yield from do(_F1, _F0)
    for _ in range(after):
        yield from do(_F1, _B1, _W1)
    for _ in range(shape.microbatches - shape.stages):
        yield from do(_F0, _B0, _W0, _F1, _B1, _W1)
    for _ in range(stage):
        yield from do(_B0, _B1)
    for _ in range(after):
        yield from do(_B0, _W0)
    for _ in range(stage):
        yield from do(_W1)
    for _ in range(stage):
        yield from do(_W0)


def dualpipe_v(stage: int, shape: Shape) -> Iterator[Action]:
    """V-shaped, forward passes of one microbatch beside backward passes of another.

    DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) cut in half. Each pair, which DeepSeek runs at the same
    time to hide expert communication, runs one after the other here. With few microbatches it is the schedule of
    2P without those that are not there.
    """
    after = shape.stages - stage - 1
    microbatches = max(shape.microbatches, 2 * shape.stages)
    do = _Counter(shape.microbatches)
    late: deque[ChunkPass] = deque()
    for _ in range(2 * after):
        yield from do(_F0)
    for _ in range(stage + 1):
        yield from do(_F0, _F1)
    for _ in range(after):
        yield from do(_B1, _W1, _F1)
    for _ in range(microbatches - 2 * shape.stages + stage + 1):
        yield from do(_F0, _B1, _W1, _F1, _B0, _W0)
    for _ in range(after):
        yield from do(_B1, _W1, _F1, _B0, _W0)
    # In the second half of the last backward passes, and in all that follow, the weight gradients wait.
    for number in range(2 * (stage + 1)):
        backward, weight = (_B1, _W1) if number % 2 == 0 else (_B0, _W0)
        yield from do(backward)
        if number <= stage:
            yield from do(weight)
        else:
            late.append(weight)
    for _ in range(after):
        yield from do(late.popleft(), _B0)
        late.append(_W0)
    yield from do(*late)


@dataclass(frozen=True)
class Order:
    """A schedule's row: its actions, and what it claims of memory."""

    actions: Callable[[int, Shape], Iterator[Action]]
    live_activations: Callable[[int, Shape], int]
    """Most (microbatch, chunk) pairs that a stage holds activations of, from F to the end of its backward pass."""


ORDERS: dict[ScheduleName, Order] = {
    "gpipe": Order(gpipe, lambda stage, shape: shape.microbatches),
    "1f1b": Order(one_forward_one_backward, lambda stage, shape: min(shape.stages - stage, shape.microbatches)),
    "interleaved": Order(
        interleaved,
        lambda stage, shape: min(_interleaved_ahead(stage, shape) + 1, shape.microbatches * shape.chunks),
    ),
    "zb-h1": Order(zero_bubble_h1, lambda stage, shape: min(shape.stages, shape.microbatches)),
    "zb-v": Order(zero_bubble_v, lambda stage, shape: 2 * min(shape.stages, shape.microbatches)),
    "dualpipe-v": Order(dualpipe_v, lambda stage, shape: min(2 * shape.stages + 1, 2 * shape.microbatches)),
}


def placement_of(name: ScheduleName, num_stages: int, num_chunks: int | None = None) -> Placement:
    """Where the chunks of the schedule ``name`` lie; raises :class:`ScheduleError` for a number it does not run."""
    traits = SCHEDULES[name]
    num_chunks = traits.settle_chunks(num_chunks)
    if not traits.allows(num_chunks):
        raise ScheduleError(f"{name} runs {traits.chunks} per stage, not {num_chunks}")
    return Placement(num_stages, num_chunks, traits.placement)


def build_schedule(
    name: ScheduleName,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """The schedule ``name`` of a batch; raises :class:`ScheduleError` with what to change where it cannot be.

    ``num_chunks`` and ``microbatch_group_size`` (by default the number of stages) matter to schedules of several
    chunks alone.
    """
    placement = placement_of(name, num_stages, num_chunks)
    if min(num_stages, num_microbatches) < 1:
        raise ScheduleError("a schedule needs at least one stage and one microbatch")
    group_size = num_stages if microbatch_group_size is None else microbatch_group_size
    if group_size < num_stages:
        raise ScheduleError(
            f"{name} would idle, or lock up, with {group_size} microbatches per group on {num_stages} stages: use "
            f"{num_stages} or more"
        )
    shape = Shape(num_stages, num_microbatches, placement.num_chunks, group_size)
    return Schedule(
        name,
        placement,
        num_microbatches,
        SCHEDULES[name].kinds,
        tuple(tuple(ORDERS[name].actions(stage, shape)) for stage in range(num_stages)),
    )
