"""What a pipeline schedule is: for every stage a list of actions, and where the chunks lie.

``F`` is the forward pass of a microbatch through a chunk. ``B`` is its backward pass: all of it, or, where the
schedule splits the backward pass, the gradient of the input alone, which leaves the weight gradients to ``W``.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.schedules.stages import PlacementShape, pipeline_rank

Kind = Literal["F", "B", "W"]


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order, cannot run, or is asked for what it cannot do."""


class Action(NamedTuple):
    """One thing that a stage does: a pass of a microbatch through one of its chunks."""

    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


class Result(NamedTuple):
    """What an action yields, wherever it runs."""

    kind: Kind
    microbatch: int
    virtual_stage: int


class Message(NamedTuple):
    """A result on its way from one stage to another."""

    result: Result
    source: int
    target: int

    @property
    def channel(self) -> tuple[Kind, int, int]:
        """Messages of one channel arrive in the order in which they are sent."""
        return self.result.kind, self.source, self.target


class Step(NamedTuple):
    """An action as the stage that runs it sees it."""

    action: Action
    result: Result
    source: Result | None
    """The tensor that it takes, wherever that comes from; None for tokens, for the loss and for weight gradients."""
    incoming: Message | None
    """The message that brings it, if another stage does."""
    outgoing: Message | None
    """The message that carries the result to another stage."""


@dataclass(frozen=True)
class Placement:
    """Which stage holds which part of the model.

    ``loop``: virtual stages go round the stages, V times. ``v``: they go down the stages and come back, so that the
    first stage holds the two ends of the model.
    """

    num_stages: int
    num_chunks: int = 1
    shape: PlacementShape = "loop"

    def __post_init__(self) -> None:
        assert self.shape == "loop" or self.num_chunks == 2, self

    @property
    def num_virtual_stages(self) -> int:
        """Chunks on all stages together."""
        return self.num_stages * self.num_chunks

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """The place of a stage's ``chunk`` in the order of the layers."""
        if self.shape == "v" and chunk == 1:
            return 2 * self.num_stages - 1 - stage
        return chunk * self.num_stages + stage

    def location(self, virtual_stage: int) -> tuple[int, int]:
        """The inverse of :meth:`virtual_stage`: (stage, chunk)."""
        return pipeline_rank(virtual_stage, self.num_stages, self.shape), virtual_stage // self.num_stages


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage for one global batch."""

    name: str
    placement: Placement
    num_microbatches: int
    kinds: tuple[Kind, ...]
    """What it does with every microbatch on every chunk."""
    actions: tuple[tuple[Action, ...], ...]
    """By stage, in the order in which the stage runs them."""

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return "W" in self.kinds

    def result(self, stage: int, action: Action) -> Result:
        """What ``action`` of ``stage`` yields."""
        return Result(action.kind, action.microbatch, self.placement.virtual_stage(stage, action.chunk))

    def requirements(self, stage: int, action: Action) -> tuple[Result, ...]:
        """What must be there before ``action`` can run on ``stage``."""
        kind, microbatch, virtual_stage = self.result(stage, action)
        source = self.source(stage, action)
        needed = () if source is None else (source,)
        if kind == "B":
            return (Result("F", microbatch, virtual_stage), *needed)
        return (Result("B", microbatch, virtual_stage),) if kind == "W" else needed

    def source(self, stage: int, action: Action) -> Result | None:
        """The requirement whose tensor is the input of ``action``: an activation or a gradient of another chunk."""
        kind, microbatch, virtual_stage = self.result(stage, action)
        neighbour = virtual_stage + {"F": -1, "B": 1, "W": 0}[kind]
        is_there = neighbour != virtual_stage and 0 <= neighbour < self.placement.num_virtual_stages
        return Result(kind, microbatch, neighbour) if is_there else None

    def incoming(self, stage: int, action: Action) -> Message | None:
        """What another stage must send before ``action`` can run on ``stage``."""
        source = self.source(stage, action)
        if source is None:
            return None
        sender, _ = self.placement.location(source.virtual_stage)
        return Message(source, sender, stage) if sender != stage else None

    def outgoing(self, stage: int, action: Action) -> Message | None:
        """What ``stage`` sends to another after ``action``."""
        result = self.result(stage, action)
        next_virtual_stage = result.virtual_stage + {"F": 1, "B": -1, "W": 0}[action.kind]
        if not 0 <= next_virtual_stage < self.placement.num_virtual_stages:
            return None
        target, _ = self.placement.location(next_virtual_stage)
        return Message(result, stage, target) if target != stage else None

    def steps(self, stage: int) -> tuple[Step, ...]:
        """The actions of ``stage`` with what they take and give."""
        return tuple(
            Step(
                action,
                self.result(stage, action),
                self.source(stage, action),
                self.incoming(stage, action),
                self.outgoing(stage, action),
            )
            for action in self.actions[stage]
        )

    def forward_only(self) -> "Schedule":
        """The forward passes alone, in the same order, for evaluation."""
        forwards = tuple(tuple(action for action in actions if action.kind == "F") for actions in self.actions)
        return Schedule(self.name, self.placement, self.num_microbatches, ("F",), forwards)
