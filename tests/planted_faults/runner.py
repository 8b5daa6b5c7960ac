"""Plants faults in clones, one at a time in each, and runs the tests that should see them."""

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.planted_faults.fault import Fault, read
from tests.planted_faults.trace import test_environment

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a fault."""

    fault: Fault
    seen_by: str | None
    """The first test that failed; None: all passed."""
    seconds: float
    files: int
    """Test files that were run."""


def make_clone(place: Path) -> Path:
    """A copy of the files of the repository that git knows or would take, as they are now."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (REPOSITORY / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, place / name)
    return place


def try_fault(clone: Path, fault: Fault, tests: Sequence[str], most_seconds: float) -> Outcome:
    """Plant ``fault``, run the files ``tests`` one after the other until one fails, and take it out again."""
    path, _ = fault.find(clone)
    before, start = read(path), time.monotonic()
    fault.plant(clone)
    try:
        for number, test in enumerate(tests):
            left = most_seconds - (time.monotonic() - start)
            if left <= 0:
                return Outcome(fault, None, time.monotonic() - start, number)
            failed = first_failure(clone, test, left)
            if failed is not None:
                return Outcome(fault, failed, time.monotonic() - start, number + 1)
        return Outcome(fault, None, time.monotonic() - start, len(tests))
    finally:
        path.write_text(before, encoding="utf-8")


def first_failure(clone: Path, test: str, most_seconds: float) -> str | None:
    """The first test of a file or folder that fails, or what ended it."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", f"tests/{test}"]
    words += ["-m", "not slow and not whole_matrix"]  # the default tier, also of a file that is named
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, cwd=clone, env=test_environment(clone), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(most_seconds)
        except subprocess.TimeoutExpired:
            return f"{test} (it hangs, or is slow)"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ranks that a test has left
            process.wait()
        output.seek(0)
        text = output.read()
    if code in (0, 5):  # 5: all tests of the file are slow
        return None
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", text, re.MULTILINE)
    return found[1] if found else f"{test} (exit code {code})"


def try_faults(
    faults: Iterable[tuple[Fault, Sequence[str]]], place: Path, jobs: int, most_seconds: float
) -> Iterator[Outcome]:
    """The outcomes as they come, with ``jobs`` clones below ``place``."""
    clones: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(jobs):
        clones.put(make_clone(place / str(number)))

    def run(fault: Fault, tests: Sequence[str]) -> Outcome:
        clone = clones.get()
        try:
            return try_fault(clone, fault, tests, most_seconds)
        finally:
            clones.put(clone)

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, fault, tests) for fault, tests in faults]):
            yield future.result()
