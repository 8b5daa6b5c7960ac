"""Which test files execute the lines at which faults are drawn.

A clone has a call before each of these lines; one run of the default tier writes which of them was reached when, and by
which worker, and the tests say when they started. So processes that a test starts, or that outlive it, are covered.
"""

import os
import shlex
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tests.planted_faults.drawn import Mutation
from tests.planted_faults.fault import read

_PROBE = """import os, time
_last = {{}}
def reached(number):
    now = time.time()
    if now - _last.get(number, 0.0) > 0.5:
        _last[number] = now
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        with open(os.path.join({directory!r}, f"reached.{{os.getpid()}}"), "a") as file:
            file.write(f"{{number}} {{now}} {{worker}}\\n")
"""
_CLOCK = """import os, time
def pytest_runtest_logstart(nodeid, location):
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        with open(os.path.join({directory!r}, "tests"), "a") as file:
            file.write(f"{{time.time()}} {{worker}} {{nodeid.partition('::')[0]}}\\n")
"""


def trace(clone: Path, mutations: Sequence[Mutation], directory: Path, pytest: Sequence[str]) -> dict[int, list[str]]:
    """The test files that reach each of ``mutations`` of ``clone``, by number, the quickest first; runs ``pytest``
    there, and writes to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    (clone / "megatron/planted_probe.py").write_text(_PROBE.format(directory=str(directory)))
    (clone / "planted_clock.py").write_text(_CLOCK.format(directory=str(directory)))
    by_file: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for number, one in enumerate(mutations):
        by_file[one.path].append((one.line, number))
    for path, places in by_file.items():
        lines = read(path).splitlines(keepends=True)
        for line, number in sorted(places, reverse=True):
            indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
            lines.insert(line - 1, f'{indent}__import__("megatron.planted_probe").planted_probe.reached({number})\n')
        path.write_text("".join(lines))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "planted_clock", "-p", "no:cacheprovider", *pytest]
    print("+", shlex.join(words), flush=True)
    subprocess.run(words, cwd=clone, env=test_environment(clone))
    return attribute(
        (directory / "tests").read_text().splitlines(),
        [line for path in directory.glob("reached.*") for line in path.read_text().splitlines()],
    )


def attribute(tests: Sequence[str], reached: Sequence[str]) -> dict[int, list[str]]:
    """From the lines ``time worker file`` of the tests that started and ``number time worker`` of what was reached."""
    starts: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for line in sorted(tests):
        moment, worker, file = line.split()
        starts[worker].append((float(moment), file))
    seconds: dict[str, float] = defaultdict(float)
    for events in starts.values():
        for (begin, file), (end, _) in pairwise(events):
            seconds[file] += end - begin
    found: dict[int, set[str]] = defaultdict(set)
    for line in reached:
        number, moment, *of_worker = line.split(" ")
        for worker in of_worker if of_worker[0] else starts:
            place = bisect_right(starts[worker], (float(moment), "~")) - 1
            if place >= 0:
                found[int(number)].add(starts[worker][place][1])
    return {number: sorted(files, key=lambda file: (seconds[file], file)) for number, files in found.items()}


def test_environment(clone: Path) -> Mapping[str, str]:
    """The environment of tests in a clone: its packages come first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "PYTHONPATH": str(clone),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
