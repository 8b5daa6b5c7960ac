"""Wall-clock timers of the phases of an iteration, and their report over ranks, without communication."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

TimingOption = Literal["max", "minmax", "all"]

_OFF: AbstractContextManager[None] = nullcontext()
_NAME_WIDTH = 48


class Timers:
    """Named timers up to a level of detail: ``with timers("forward-backward", level=1): ...``.

    A timer above ``level`` costs one comparison. ``synchronize`` waits for the GPU before each reading of the clock,
    which slows training (None on the CPU).
    """

    def __init__(self, level: int, synchronize: Callable[[], None] | None = None) -> None:
        self._level = level
        self._synchronize = synchronize
        # Seconds of every finished span since the last call of elapsed, by name.
        self._spans: dict[str, list[float]] = {}
        self._running: set[str] = set()

    def __call__(self, name: str, level: int = 1) -> AbstractContextManager[None]:
        """A context that adds its wall time to ``name``, or does nothing above the level."""
        return _OFF if level > self._level else self._measure(name)

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        if name in self._running:
            raise RuntimeError(f"Timer {name!r} is already running: it cannot be nested in itself.")
        self._running.add(name)
        spans = self._spans.setdefault(name, [])
        try:
            start = self._now()
            yield
            # Not after an error: the GPU may not answer any more, and the span means nothing.
            spans.append(self._now() - start)
        finally:
            self._running.remove(name)

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def elapsed(self, iterations: int = 1) -> dict[str, float]:
        """Milliseconds by name of all spans that finished since the last call, divided by ``iterations``."""
        measured = {name: sum(spans) * 1e3 / iterations for name, spans in self._spans.items() if spans}
        for spans in self._spans.values():
            spans.clear()
        return measured


def _by_name(local: list[dict[str, float]]) -> dict[str, dict[int, float]]:
    """Milliseconds by phase and rank; a rank that did not run the phase is left out."""
    table: dict[str, dict[int, float]] = {}
    for rank, measured in enumerate(local):
        for name, milliseconds in measured.items():
            table.setdefault(name, {})[rank] = milliseconds
    return table


def combine(local: list[dict[str, float]], option: TimingOption) -> dict[str, tuple[float, float]]:
    """Least and greatest milliseconds over the ranks that ran each phase; with ``max`` the slowest rank twice.

    ``local`` is ``elapsed()`` of every rank, in rank order.
    """
    ends = {}
    for name, times in _by_name(local).items():
        slowest = max(times.values())
        ends[name] = (slowest if option == "max" else min(times.values()), slowest)
    return ends


def format_timer_report(local: list[dict[str, float]], option: TimingOption) -> str:
    """Megatron-LM's text on the timers of all ranks (``local`` as in :func:`combine`); empty without timers.

    ``max`` shows the slowest rank, ``minmax`` the fastest and the slowest, ``all`` a line per rank.
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
