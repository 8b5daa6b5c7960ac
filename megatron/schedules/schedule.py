"""A pipeline schedule: a list of actions for every stage, the placement of the chunks, and its description.

``F`` is the forward pass of a microbatch through a chunk. ``B`` is its backward pass; where the schedule splits it,
``B`` computes the gradient of the input and ``W`` the weight gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.schedules.stages import PlacementShape, pipeline_rank

Kind = Literal["F", "B", "W"]


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order, deadlocks, or does not support the requested sizes."""


class Action(NamedTuple):
    """A pass of a microbatch through one chunk of a stage."""

    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


class Result(NamedTuple):
    """The result of an action, by virtual stage."""

    kind: Kind
    microbatch: int
    virtual_stage: int


class Message(NamedTuple):
    """A result that one stage sends to another."""

    result: Result
    source: int
    target: int

    @property
    def channel(self) -> tuple[Kind, int, int]:
        """Messages of one channel arrive in the order in which they are sent."""
        return self.result.kind, self.source, self.target


class Step(NamedTuple):
    """An action with its input and its messages."""

    action: Action
    result: Result
    source: Result | None
    """The result that is its input; None for tokens, the loss and weight gradients."""
    incoming: Message | None
    """The message with the input, if another stage sends it."""
    outgoing: Message | None
    """The message with the result, if another stage needs it."""


@dataclass(frozen=True)
class Placement:
    """The placement of the virtual stages on the stages.

    ``loop``: stage p holds p, p + P, p + 2P and so on. ``v``: stage p holds p and 2P - 1 - p, so that the first stage
    holds both ends of the model.
    """

    num_stages: int
    num_chunks: int = 1
    shape: PlacementShape = "loop"

    def __post_init__(self) -> None:
        assert self.shape == "loop" or self.num_chunks == 2, self

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    def virtual_stage(self, stage: int, chunk: int) -> int:
        if self.shape == "v" and chunk == 1:
            return 2 * self.num_stages - 1 - stage
        return chunk * self.num_stages + stage

    def location(self, virtual_stage: int) -> tuple[int, int]:
        """The inverse of :meth:`virtual_stage`: (stage, chunk)."""
        return pipeline_rank(virtual_stage, self.num_stages, self.shape), virtual_stage // self.num_stages


@dataclass(frozen=True)
class Schedule:
    name: str
    placement: Placement
    num_microbatches: int
    kinds: tuple[Kind, ...]
    """The actions of every microbatch on every chunk."""
    actions: tuple[tuple[Action, ...], ...]
    """The actions of every stage, in order."""

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return "W" in self.kinds

    def result(self, stage: int, action: Action) -> Result:
        return Result(action.kind, action.microbatch, self.placement.virtual_stage(stage, action.chunk))

    def requirements(self, stage: int, action: Action) -> tuple[Result, ...]:
        """The results that must exist before ``action`` can run on ``stage``."""
        kind, microbatch, virtual_stage = self.result(stage, action)
        source = self.source(stage, action)
        needed = () if source is None else (source,)
        if kind == "B":
            return (Result("F", microbatch, virtual_stage), *needed)
        return (Result("B", microbatch, virtual_stage),) if kind == "W" else needed

    def source(self, stage: int, action: Action) -> Result | None:
        """The requirement that is the input of ``action``: an activation or a gradient of another chunk."""
        kind, microbatch, virtual_stage = self.result(stage, action)
        neighbour = virtual_stage + {"F": -1, "B": 1, "W": 0}[kind]
        is_there = neighbour != virtual_stage and 0 <= neighbour < self.placement.num_virtual_stages
        return Result(kind, microbatch, neighbour) if is_there else None

    def steps(self, stage: int) -> tuple[Step, ...]:
        steps = []
        for action in self.actions[stage]:
            result, source = self.result(stage, action), self.source(stage, action)
            incoming = outgoing = None
            if source is not None:
                sender, _ = self.placement.location(source.virtual_stage)
                incoming = Message(source, sender, stage) if sender != stage else None
            # A weight gradient stays where it is.
            following = result.virtual_stage + {"F": 1, "B": -1, "W": 0}[action.kind]
            if 0 <= following < self.placement.num_virtual_stages:
                target, _ = self.placement.location(following)
                outgoing = Message(result, stage, target) if target != stage else None
            steps.append(Step(action, result, source, incoming, outgoing))
        return tuple(steps)

    def forward_only(self) -> "Schedule":
        """The forward passes alone, in the same order, for evaluation."""
        forwards = tuple(tuple(action for action in actions if action.kind == "F") for actions in self.actions)
        return Schedule(self.name, self.placement, self.num_microbatches, ("F",), forwards)


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
    """The virtual stages of a stage (:class:`Placement`)."""
    splits_backward: bool = False
    """Whether weight gradients are actions of their own."""
    groups_microbatches: bool = False
    """Whether --microbatch-group-size-per-virtual-pipeline-stage applies."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("F", "B", "W") if self.splits_backward else ("F", "B")

    def resolve_chunks(self, wanted: int | None) -> int:
        default = 1 if self.chunks == "one chunk" else 2
        return default if wanted is None else wanted

    def allows(self, chunks: int) -> bool:
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
