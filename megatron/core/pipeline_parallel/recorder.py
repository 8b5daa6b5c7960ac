"""When the actions of a stage really ran."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from megatron.schedules.schedule import Action
from megatron.schedules.simulator import Span


class Recorder(Protocol):
    """Is told what runs as which action."""

    def span(self, stage: int, action: Action) -> AbstractContextManager[None]: ...


class NamedActions:
    """Names the actions in traces of torch's profiler and of nsys: ``F`` or ``B`` or ``W``, microbatch, chunk."""

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        with torch.profiler.record_function(str(action)):
            yield


class ActionRecorder:
    """Records start and end of actions, in seconds since its construction; on a GPU by events, without a host sync."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type != "cpu"
        self._origin = self._mark()
        self._marks: list[tuple[int, Action, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def _mark(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        """Record what runs inside as ``action``."""
        start = self._mark()
        yield
        self._marks.append((stage, action, start, self._mark()))

    def spans(self) -> tuple[Span, ...]:
        """Everything recorded; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return tuple(
            Span(stage, action, self._since_origin(start), self._since_origin(end))
            for stage, action, start, end in self._marks
        )

    def _since_origin(self, mark: "float | torch.cuda.Event") -> float:
        if isinstance(self._origin, float) and isinstance(mark, float):
            return mark - self._origin
        assert isinstance(self._origin, torch.cuda.Event) and isinstance(mark, torch.cuda.Event)
        return float(self._origin.elapsed_time(mark)) / 1e3
