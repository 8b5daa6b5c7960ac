"""Seconds and memory of a call in a process of its own."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    seconds: float
    bytes: int
    """Peak of the resident memory during the call, above that before it."""


def cost_of(call: Callable[[], T]) -> tuple[T, Cost]:
    """Run ``call`` in a forked process, which has what this process has; its result is pickled."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(call, theirs))
    process.start()
    theirs.close()
    try:
        result, cost = ours.recv()
    finally:
        process.join()
    return result, cost


def _measure(call: Callable[[], T], answer: Connection) -> None:
    # The peak so far counts from here on (Linux).
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    answer.send((result, Cost(seconds, _memory("VmHWM") - before)))


def _memory(kind: str) -> int:
    """Bytes of this process."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, kind
    return int(found[1]) * 1024
