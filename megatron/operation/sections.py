"""The marker of the sections of an iteration, at the places of the timers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from megatron.metrics.timers import Timers
from megatron.operation.heartbeat import Heartbeat, Section

SECTION_OF_TIMER = {
    "batch-generator": Section.DATA,
    "evaluation-data": Section.DATA,
    "forward-backward": Section.FORWARD_BACKWARD,
    "grads-reduce": Section.GRADS_REDUCE,
    "optimizer": Section.OPTIMIZER,
    "evaluation": Section.EVALUATION,
    "save-checkpoint": Section.SAVE,
}


class Sections(Timers):
    """Timers that also write the section to the heartbeat, whatever the timers' level."""

    def __init__(self, heartbeat: Heartbeat, level: int, synchronize: Callable[[], None] | None = None) -> None:
        super().__init__(level, synchronize)
        self._heartbeat = heartbeat

    def __call__(self, name: str, level: int = 1) -> AbstractContextManager[None]:
        timer = super().__call__(name, level)
        section = SECTION_OF_TIMER.get(name)
        return timer if section is None else _TimedSpan(self._heartbeat, section, timer)


class _TimedSpan(AbstractContextManager[None]):
    """A section with its timer."""

    __slots__ = ("_heartbeat", "_previous", "_section", "_timer")

    def __init__(self, heartbeat: Heartbeat, section: Section, timer: AbstractContextManager[None]) -> None:
        self._heartbeat, self._section, self._timer = heartbeat, section, timer

    def __enter__(self) -> None:
        self._previous = self._heartbeat.enter(self._section)
        self._timer.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.__exit__(kind, error, trace)
        # After an error the rank stays in the section where it failed, for the report.
        if kind is None:
            self._heartbeat.enter(self._previous)
