"""Where the seconds of a test run go, and whether they have grown beyond what the machine explains.

Seconds differ by a factor of two between machines and days, and within a run. So with ``--compare-seconds`` each worker
times a fixed load between its tests again and again, and the seconds of the tests are compared with it.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

SLOWEST = 20
LEAST_TESTS = 1000
"""Of a run that shows this: of a few files pytest's own ``--durations`` says enough."""
RECORDED = Path(__file__).with_name("recorded_seconds.json")
"""How many times the reference load the default tier takes."""
MOST_GROWTH = 1.3
REFERENCE = "seconds of the reference load"
"""The property of a test before which it was timed."""
REFERENCE_INTERVAL = 20.0
"""Seconds between two timings in a worker, each of about a third of a second."""
REFERENCE_ROUNDS = 1500


def seconds_of(phases: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by test, from (test, seconds) of set-up, call and tear-down."""
    seconds: dict[str, float] = defaultdict(float)
    for test, spent in phases:
        seconds[test] += spent
    return seconds


def by_folder(seconds: Mapping[str, float]) -> dict[str, tuple[float, int]]:
    """Seconds and number of the tests in each folder below ``tests``, the longest first; ``seconds`` are by test."""
    total: dict[str, float] = defaultdict(float)
    number: dict[str, int] = defaultdict(int)
    for test, spent in seconds.items():
        parts = PurePosixPath(test.partition("::")[0]).parts
        folder = parts[1] if len(parts) > 2 else parts[0]
        total[folder] += spent
        number[folder] += 1
    return {folder: (total[folder], number[folder]) for folder in sorted(total, key=lambda one: -total[one])}


def lines_of(seconds: Mapping[str, float]) -> list[str]:
    """The summary of ``seconds`` by test; empty for a short run."""
    if len(seconds) < LEAST_TESTS:
        return []
    lines = [f"{sum(seconds.values()):8.0f} s in {len(seconds):,} tests, of all workers together"]
    lines += [f"{spent:8.0f} s  {folder} ({number:,})" for folder, (spent, number) in by_folder(seconds).items()]
    lines += [f"{SLOWEST} slowest:"]
    lines += [f"{seconds[test]:8.1f} s  {test}" for test in sorted(seconds, key=lambda one: -seconds[one])[:SLOWEST]]
    return lines


def time_reference_load() -> float:
    """Seconds of a fixed load of what tests are made of: objects and text of Python, and small products in fp64."""
    import torch

    start = time.perf_counter()
    weight = torch.full((64, 64), 1e-3, dtype=torch.float64, requires_grad=True)
    record = {str(number): [number, str(number)] for number in range(200)}
    for _ in range(REFERENCE_ROUNDS):
        (weight @ weight).tanh().sum().backward()
        record = json.loads(json.dumps(record))
    return time.perf_counter() - start


def compare(total: float, reference: float, recorded: float) -> tuple[bool, str]:
    """Whether ``total`` seconds of tests are within the limit, ``recorded`` times ``reference`` and what may be added;
    and a sentence."""
    times = total / reference
    growth = times / recorded
    sentence = f"{times:.0f} times the reference load of {reference:.3f} s; recorded were {recorded:.0f} times"
    if growth <= MOST_GROWTH:
        return True, f"{sentence}."
    return False, (
        f"{sentence}, of which this is {growth:.2f} times: make tests quicker, mark rare ones slow, or record the new"
        f" figure in tests/{RECORDED.name}."
    )


def recorded_times() -> float:
    """The recorded multiple of the reference load."""
    return float(json.loads(RECORDED.read_text(encoding="utf-8"))["times_reference_load"])
