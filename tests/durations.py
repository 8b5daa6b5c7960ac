"""Where the seconds of a test run go: by folder, and the slowest tests."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

SLOWEST = 20
LEAST_TESTS = 1000
"""Of a run that shows this: of a few files pytest's own ``--durations`` says enough."""


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


def lines_of(phases: Iterable[tuple[str, float]]) -> list[str]:
    """The summary of (test, seconds) of set-up, call and tear-down; empty for a short run."""
    seconds: dict[str, float] = defaultdict(float)
    for test, spent in phases:
        seconds[test] += spent
    if len(seconds) < LEAST_TESTS:
        return []
    folders = by_folder(seconds)
    lines = [f"{sum(seconds.values()):8.0f} s in {len(seconds):,} tests, of all workers together"]
    lines += [f"{spent:8.0f} s  {folder} ({number:,})" for folder, (spent, number) in folders.items()]
    lines += [f"{SLOWEST} slowest:"]
    lines += [f"{seconds[test]:8.1f} s  {test}" for test in sorted(seconds, key=lambda one: -seconds[one])[:SLOWEST]]
    return lines
