"""Wall-clock timers of the phases of an iteration, and their report over ranks.

Nothing here communicates: the caller gathers ``elapsed()`` of every rank's :class:`Timers`, and :func:`combine` and
:func:`format_timer_report` turn the list into numbers and text.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal

TimingOption = Literal["max", "minmax", "all"]

_OFF: AbstractContextManager[None] = nullcontext()
_NAME_WIDTH = 48


class _Timer:
    """Accumulates the wall time of one named phase; entered and left many times, never nested in itself."""

    def __init__(self, name: str, synchronize: Callable[[], None] | None) -> None:
        self._name = name
        self._synchronize = synchronize
        self._start: float | None = None
        self.seconds = 0.0
        self.spans = 0

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def __enter__(self) -> None:
        if self._start is not None:
            raise RuntimeError(f"Timer {self._name!r} is already running: it cannot be nested in itself.")
        self._start = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._start is not None
        start, self._start = self._start, None
        # After an error the accelerator may not answer any more, and the span means nothing.
        if kind is None:
            self.seconds += self._now() - start
            self.spans += 1

    def reset(self) -> None:
        self.seconds = 0.0
        self.spans = 0


class Timers:
    """Named timers up to a level of detail: ``with timers("forward-backward", level=1): ...``.

    A timer above ``level`` costs one comparison. ``synchronize`` is called before each reading of the clock, to wait
    for an accelerator that runs behind the host (None where the host computes); it slows training, so it depends on
    the level.
    """

    def __init__(self, level: int, synchronize: Callable[[], None] | None = None) -> None:
        self._level = level
        self._synchronize = synchronize
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, level: int = 1) -> AbstractContextManager[None]:
        """A context that adds its wall time to ``name``, or does nothing above the level."""
        if level > self._level:
            return _OFF
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = _Timer(name, self._synchronize)
        return timer

    def elapsed(self, reset: bool = True, iterations: int = 1) -> dict[str, float]:
        """Milliseconds by name of all finished spans since the last reset, divided by ``iterations``.

        A span still running counts in full when it ends.
        """
        finished = {name: timer for name, timer in self._timers.items() if timer.spans}
        measured = {name: timer.seconds * 1e3 / iterations for name, timer in finished.items()}
        if reset:
            for timer in self._timers.values():
                timer.reset()
        return measured


def _by_name(local: list[dict[str, float]]) -> dict[str, dict[int, float]]:
    """Turn one dict per rank into rank → milliseconds by name; a rank without the phase is left out."""
    table: dict[str, dict[int, float]] = {}
    for rank, measured in enumerate(local):
        for name, milliseconds in measured.items():
            table.setdefault(name, {})[rank] = milliseconds
    return table


def combine(local: list[dict[str, float]], option: TimingOption) -> dict[str, tuple[float, float]]:
    """Least and greatest milliseconds over the ranks that ran each phase; with ``max`` the slowest rank twice.

    ``local`` is ``elapsed()`` of every rank, in rank order.
    """
    ends = {name: (min(times.values()), max(times.values())) for name, times in _by_name(local).items()}
    if option == "max":
        return {name: (slowest, slowest) for name, (_, slowest) in ends.items()}
    return ends


def format_timer_report(local: list[dict[str, float]], option: TimingOption) -> str:
    """Text of the timers of all ranks, in Megatron-LM's form; empty when nothing was measured.

    ``local`` is ``elapsed()`` of every rank, in rank order. ``max`` shows the slowest rank, ``minmax`` both ends,
    ``all`` a line per rank.
    """
    table = _by_name(local)
    if not table:
        return ""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, times in table.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {milliseconds:.2f}" for rank, milliseconds in times.items()]
        return "\n".join(lines)
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, (fastest, slowest) in combine(local, option).items():
        figures = f"{slowest:.2f}" if option == "max" else f"({fastest:.2f}, {slowest:.2f})"
        lines.append(f"    {(name + ' ').ljust(_NAME_WIDTH, '.')}: {figures}")
    return "\n".join(lines)
