"""Runs lines one after the other, each in a process of its own, within a limit of its own and one of all."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.gpu_lines.gpu_state import GpuWatch
from benchmarks.gpu_lines.line import (
    BROKEN,
    SEVERITY,
    STARTED,
    WHOLE,
    Figures,
    Line,
    Result,
    Verdict,
    append,
    figures_of,
    own_results,
    read_results,
)
from benchmarks.gpu_lines.table import as_text, row_text

REPOSITORY = Path(__file__).resolve().parents[2]
SESSIONS, TABLE, ARCHIVE = "sessions.jsonl", "table.txt", "all.tgz"
"""Files of a directory: when its lines were started, and by which command; the table; all other files in one."""
GRACE = 2.0
"""Seconds in which a process prints its stacks after SIGABRT."""
MOST_PROCESSES = 20
"""Processes that a line which resumes may start."""
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
"""With it an error is raised by the kernel that causes it."""


class LineProcess(Protocol):
    """A process that runs a line, and leads a process group."""

    pid: int

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal; raises :class:`subprocess.TimeoutExpired`."""
        ...


@dataclass(frozen=True)
class Session:
    """Where lines run, and where their results go."""

    out: Path
    device: str
    is_tiny: bool
    seconds: float
    """Seconds for all lines together."""
    command: str
    """What the user has typed, for the record."""
    archive: Path | None = None
    """Written after every line (default: :data:`ARCHIVE` in ``out``)."""


Start = Callable[[Session, Line, float, Path], LineProcess]
"""Starts the process of a line that is ended after so many seconds, and prints to a file."""


class Outcome(NamedTuple):
    """How the process of a line has ended."""

    verdict: Verdict
    error: str | None = None
    where: str | None = None


def start_process(session: Session, line: Line, seconds: float, log: Path) -> LineProcess:
    """A new Python, so that no line has another's CUDA context, caches or settings."""
    command = [sys.executable, "-m", "benchmarks.gpu_lines", json.dumps(asdict(line)), "--out", str(session.out)]
    command += ["--device", session.device, "--seconds", f"{seconds:.1f}", *(["--tiny"] if session.is_tiny else [])]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.getenv("PYTHONPATH")]))
    variables = line.variables if session.device == "cuda" else {}  # they are settings of CUDA
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def run_lines(session: Session, lines: Sequence[Line], start: Start = start_process) -> None:
    """Run ``lines`` in order. A line whose GPU has failed runs once more at the end, one kernel at a time, so that the
    kernel at fault is known."""
    session.out.mkdir(parents=True, exist_ok=True)
    record = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "command": session.command}
    with (session.out / SESSIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    end, failed = time.monotonic() + session.seconds, []
    with GpuWatch() as watch:
        for line in lines:
            if run_line(session, line, end, watch, start) == BROKEN and not line.resumes:
                variables = {**line.variables, **BLOCKING}
                failed.append(replace(line, name=f"{line.name}, blocking", variables=variables, expects=None))
        for line in failed:
            run_line(session, line, end, watch, start)


def run_line(session: Session, line: Line, end: float, watch: GpuWatch, start: Start) -> int | None:
    """Run a line until ``end`` at most, and write its last result, the table and the archive; returns the exit code of
    its process."""
    out, started, exit_code = session.out, time.monotonic(), None
    left = end - started
    append(out, Result(line.name, STARTED, Verdict.RIGHT, {"resumes": line.resumes}))
    if left < line.seconds / 2:
        error = f"{max(0.0, left):.0f} s were left, and it takes {line.seconds:.0f}"
        append(out, Result(line.name, WHOLE, Verdict.NOT_STARTED, error=error))
    else:
        # The next sign of the line may be minutes away.
        print(f"{line.name} ... {line.answers}".rstrip(), flush=True)
        before = watch.read()
        exit_code, outcome = run_processes(session, line, started + min(line.limit, left), start)
        seconds, after = time.monotonic() - started, watch.read()
        figures: Figures = {
            "expected_seconds": line.seconds,
            "before": None if before is None else before.figures(),
            "after": None if after is None else after.figures(),
            **watch.since(started),
        }
        if not session.is_tiny:
            found = comparison(line, read_results(out))
            expected = found.pop("verdict", outcome.verdict)
            figures |= found
            outcome = outcome._replace(verdict=max(outcome.verdict, expected, key=SEVERITY.index))
        append(
            out,
            Result(line.name, WHOLE, outcome.verdict, figures, outcome.error, outcome.where, round(seconds, 1)),
        )
    results = read_results(out)
    print(row_text(line.name, results[line.name]), flush=True)
    (out / TABLE).write_text(as_text(results), encoding="utf-8")
    write_archive(out, session.archive or out / ARCHIVE)
    return exit_code


def comparison(line: Line, results: dict[str, list[Result]]) -> Figures:
    """The line's figure, its expectation and the verdict; the expectation alone without a figure."""
    expects = line.expects
    if expects is None:
        return {}
    figures = figures_of(results, line.name)
    value = None if figures is None else figures.get(expects.figure)
    if expects.relative_to and value is not None:
        other = (figures_of(results, expects.relative_to) or {}).get(expects.figure)
        value = None if not other else value / other
    expected = {"expected": expects.text, "figure_name": expects.name}
    if value is None:
        return expected
    return expected | {"figure": value, "verdict": expects.verdict(value)}


def run_processes(session: Session, line: Line, deadline: float, start: Start) -> tuple[int | None, Outcome]:
    """Run the process of a line, or its processes if it resumes; the exit code of the last one and its outcome."""
    log = session.out / log_name(line)
    log.unlink(missing_ok=True)
    exit_code: int | None = None
    for _ in range(MOST_PROCESSES if line.resumes else 1):
        started = time.monotonic()
        process = start(session, line, deadline - started, log)
        try:
            exit_code = process.wait(deadline - started)
        except subprocess.TimeoutExpired:
            end_group(process)
            place = last_place(log)
            return None, Outcome(Verdict.HUNG, f"ended after {time.monotonic() - started:.0f} s", place)
        finally:
            kill_group(process)
        if exit_code == 0 or deadline - time.monotonic() < line.seconds / 10:
            break
    if exit_code in (0, BROKEN):
        return exit_code, outcome_of(own_results(read_results(session.out)[line.name]))
    assert exit_code is not None
    how = f"exit code {exit_code}" if exit_code > 0 else f"ended by {signal.Signals(-exit_code).name}"
    return exit_code, Outcome(Verdict.CRASHED, f"{how}: see {log.name}", last_place(log))


def outcome_of(results: Sequence[Result]) -> Outcome:
    """The worst of a line's results."""
    if not results:
        return Outcome(Verdict.CRASHED, "it has no result")
    worst = max(results, key=lambda result: SEVERITY.index(result.verdict))
    error = worst.error
    if error is not None and len(results) > 1:
        failed = sum(result.verdict != Verdict.RIGHT for result in results)
        error = f"{failed} of {len(results)} results: {worst.name}: {error}"
    return Outcome(worst.verdict, error, worst.where)


def end_group(process: LineProcess) -> None:
    """Let the process print its stacks and end."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def kill_group(process: LineProcess) -> None:
    """Kill the process, and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10.0)


def log_name(line: Line) -> str:
    return re.sub(r"[^\w.-]+", "-", line.name) + ".log"


def last_place(log: Path) -> str | None:
    """The innermost function of this repository in the stacks that a process has printed when it was ended; None
    without any."""
    text = log.read_text(encoding="utf-8", errors="replace").rpartition("Fatal Python error")[2]
    _, _, stack = text.rpartition("Current thread")
    places = re.findall(rf'File "{re.escape(str(REPOSITORY))}/([^"]+)", line (\d+) in (\S+)', stack or text)
    outside = (place for place in places if not place[0].startswith(".venv"))
    return next((f"{file}:{number} {name}" for file, number, name in outside), None)


# --- one archive of all results, small enough to be copied from the machine as one file ------------------------------
MOST_BYTES = 15 * 2**20
"""The largest archive."""
LEFT_OUT = "left_out.txt"
"""The file in the archive that names what it does not have."""
_MOST_READ, _FAST = 256 * 2**20, 2**20
"""Larger files are not compressed to see whether they fit; compressed fast, because the session waits."""


def write_archive(directory: Path, archive: Path, most_bytes: int = MOST_BYTES) -> None:
    """Replace ``archive`` by one of the files of ``directory``, the smallest first, as many as ``most_bytes`` hold.

    Every file is a gzip member of its own, so its compressed size is known before it is added.
    """
    partial = archive.with_name(f".{archive.name}.partial")
    files = [file for file in directory.rglob("*") if file.is_file() and file not in (archive, partial)]
    left_out: list[str] = []
    with partial.open("wb") as output:
        for file in sorted(files, key=lambda file: file.stat().st_size):
            size = file.stat().st_size
            member = b"" if left_out or size > _MOST_READ else _member(directory, file)
            if member and output.tell() + len(member) <= most_bytes:
                output.write(member)
            else:
                left_out.append(f"{file.relative_to(directory)}: {size} bytes\n")
        if left_out:
            output.write(_entry(LEFT_OUT, "".join(left_out).encode()))
        output.write(gzip.compress(bytes(2 * tarfile.BLOCKSIZE)))  # the end of a tar archive
    os.replace(partial, archive)


def _member(directory: Path, file: Path) -> bytes:
    return _entry(str(file.relative_to(directory)), file.read_bytes())


def _entry(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    padding = bytes(-len(content) % tarfile.BLOCKSIZE)
    return gzip.compress(info.tobuf() + content + padding, compresslevel=6 if len(content) < _FAST else 1)


def read_archive(archive: Path, directory: Path, names: Sequence[str]) -> None:
    """Extract the files ``names`` of ``archive``, if it has them, into ``directory``."""
    with tarfile.open(archive, "r:gz") as tar:
        for name in set(names) & set(tar.getnames()):
            content = tar.extractfile(name)
            if content is not None:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(content.read())
