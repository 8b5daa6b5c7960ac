"""How something grows: measured points, the order of growth that follows from them, and memory of a process (Linux)."""

import gc
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression
from typing import Literal, NamedTuple, ParamSpec, TypeVar, get_args

Kind = Literal["seconds", "bytes"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Point:
    """One measurement."""

    size: float
    seconds: float
    bytes: int
    """Peak memory or size; 0 if not measured."""


@dataclass(frozen=True)
class Curve:
    """Measurements of one quantity over sizes."""

    name: str
    """What grows, for example "order of documents"."""
    unit: str
    """The unit of the size, for example "documents"."""
    points: tuple[Point, ...]
    goal: str = ""
    order: float = 1.0
    """The largest accepted order of growth, of seconds and of bytes."""


def order_of_growth(curve: Curve, value: Kind) -> float:
    """Slope of the least-squares line through the points in log-log, without values of 0; NaN for fewer than two."""
    known = [(point.size, getattr(point, value)) for point in curve.points if getattr(point, value) > 0]
    if len(known) < 2:
        return math.nan
    sizes, values = ([math.log(number) for number in column] for column in zip(*known, strict=True))
    return linear_regression(sizes, values).slope


# --- a process of its own -------------------------------------------------------------------------------------------
P = ParamSpec("P")
T = TypeVar("T")

PRELOADED = ("benchmarks.lib.scaling_data", "benchmarks.lib.scaling_metrics")
"""Modules that the server imports once, so that a process starts in milliseconds."""


class Memory(NamedTuple):
    """Bytes of this process."""

    private: int
    """Anonymous memory, which no other process shares."""
    mapped: int
    """Pages of mapped files, which all processes of a machine share, and the kernel drops when memory is short."""
    peak: int
    """The largest sum of both since the start, or since :func:`reset_peak`."""


def memory() -> Memory:
    """What this process has now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    values = {key: value for key, _, value in (line.partition(":") for line in lines)}
    private, mapped, peak = (int(values[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "VmHWM"))
    return Memory(private, mapped, peak)


def reset_peak() -> None:
    """Let :attr:`Memory.peak` begin with what the process has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def in_fresh_process(task: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """The result of ``task``, which a module must define; an error is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with ProcessPoolExecutor(1, mp_context=context, initializer=gc.freeze) as executor:
        return executor.submit(task, *arguments, **keywords).result()


class Cost(NamedTuple):
    """The cost of a call."""

    seconds: float
    bytes: int
    """Peak of the resident memory during the call, above that before it."""


def cost_of(call: Callable[[], T]) -> tuple[T, Cost]:
    """Run ``call``, which may be a closure, in a fork of this process; its result is pickled."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(call, theirs))
    process.start()
    theirs.close()
    try:
        result, cost = ours.recv()
    finally:
        process.join()
    return result, cost


def _measure(call: Callable[[], object], answer: Connection) -> None:
    # A full garbage collection visits all imported modules, which takes a third of a second here, and whether one falls
    # into the call depends on what was allocated before it. Frozen objects are not visited.
    gc.freeze()
    reset_peak()
    before = memory()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    answer.send((result, Cost(seconds, memory().peak - before.private - before.mapped)))
