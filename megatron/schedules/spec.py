"""The description of a schedule of the catalog, and helpers to write one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.schedules.schedule import Action, Kind
from megatron.schedules.stages import PlacementShape


@dataclass(frozen=True)
class Shape:
    """The sizes for which a schedule is built."""

    stages: int
    microbatches: int
    chunks: int = 1
    group_size: int = 1
    """Microbatches that go through a chunk in a row (``groups_microbatches`` only)."""


@dataclass(frozen=True)
class ScheduleSpec:
    """One schedule: its order of actions, and its properties."""

    name: str
    """Value of --pipeline-schedule."""
    summary: str
    """For --help."""
    actions: Callable[[int, Shape], Iterator[Action]]
    """The actions of a stage, in order."""
    live_activations: Callable[[int, Shape], int]
    """Most (microbatch, chunk) pairs whose activations a stage holds, from F to the end of their backward pass."""
    chunks: Literal["one chunk", "several chunks", "two chunks"] = "one chunk"
    """Chunks of the model on a stage."""
    placement: PlacementShape = "loop"
    """Which virtual stages a stage holds (:class:`~megatron.schedules.schedule.Placement`)."""
    splits_backward: bool = False
    """Whether weight gradients are actions of their own."""
    groups_microbatches: bool = False
    """Whether --microbatch-group-size-per-virtual-pipeline-stage applies."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("F", "B", "W") if self.splits_backward else ("F", "B")

    def resolve_chunks(self, wanted: int | None) -> int:
        """``wanted``, or the default number of chunks."""
        default = 1 if self.chunks == "one chunk" else 2
        return default if wanted is None else wanted

    def allows(self, chunks: int) -> bool:
        """Whether the schedule supports this number of chunks per stage."""
        return {"one chunk": chunks == 1, "several chunks": chunks > 1, "two chunks": chunks == 2}[self.chunks]


def alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int
) -> Iterator[Action]:
    """``ahead`` forward passes, then one forward and one backward pass in turn; pairs are (chunk, microbatch)."""
    ahead = min(ahead, len(forwards))
    for chunk, microbatch in forwards[:ahead]:
        yield Action("F", microbatch, chunk)
    for number, (chunk, microbatch) in enumerate(backwards):
        if ahead + number < len(forwards):
            forward_chunk, forward_microbatch = forwards[ahead + number]
            yield Action("F", forward_microbatch, forward_chunk)
        yield Action("B", microbatch, chunk)


class ChunkPass(NamedTuple):
    """An action without its microbatch."""

    kind: Kind
    chunk: int


F0, F1 = ChunkPass("F", 0), ChunkPass("F", 1)
B0, B1 = ChunkPass("B", 0), ChunkPass("B", 1)
W0, W1 = ChunkPass("W", 0), ChunkPass("W", 1)


class PassCounter:
    """Numbers the microbatches of each kind and chunk, and omits numbers beyond the batch."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.next: dict[ChunkPass, int] = {}

    def __call__(self, *passes: ChunkPass) -> Iterator[Action]:
        for one in passes:
            microbatch = self.next.get(one, 0)
            self.next[one] = microbatch + 1
            if microbatch < self.microbatches:
                yield Action(one.kind, microbatch, one.chunk)
