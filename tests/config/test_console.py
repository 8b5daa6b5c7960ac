"""A log that cannot be written costs the log, never the run."""

import errno
import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.console import DroppingFile, print_warning
from tests.checkpoint.file_faults import NotAllowed, small_disk
from tests.end_to_end.run_process import REPOSITORY
from tests.forked import fork_context
from tests.metrics.reported_run import Terminal

pytestmark = pytest.mark.processes


def full_pipe() -> tuple[int, int]:
    """The two ends of a pipe that takes nothing more at present."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        return reader, writer


def test_lines_that_find_no_room_are_counted_and_the_next_that_does_says_so() -> None:
    reader, writer = full_pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(DroppingFile(writer)), encoding="utf-8")
    for number in range(3):
        print("lost", number, file=stream, flush=True)
    print("lost\nlost", file=stream, flush=True)
    os.read(reader, 1 << 20)
    print("kept", file=stream, flush=True)
    print("kept, too", file=stream, flush=True)
    text = os.read(reader, 1 << 20).decode()
    reason = os.strerror(errno.EAGAIN)
    assert text == f"WARNING: 5 lines of this log are missing here ({reason}).\nkept\nkept, too\n"
    for end in (reader, writer):
        os.close(end)


def fill_and_free(place: Path, report: Path) -> None:
    """Write a log on a small disk that becomes full, and has room again later."""
    try:
        leave = small_disk(place)
    except NotAllowed as error:
        report.write_text(f"skip {error}")
        return
    log = os.open(place / "log", os.O_CREAT | os.O_WRONLY)
    stream = io.TextIOWrapper(io.BufferedWriter(DroppingFile(log)), encoding="utf-8")
    leave(2 * 4096)
    for number in range(1000):
        print(f"line {number:04d}", file=stream, flush=True)
    leave(-1)
    print("the end", file=stream, flush=True)
    report.write_bytes((place / "log").read_bytes())


def test_a_log_on_a_full_disk_goes_on_when_there_is_room(tmp_path: Path) -> None:
    place, report = tmp_path / "place", tmp_path / "report"
    place.mkdir()
    process = fork_context().Process(target=fill_and_free, args=(place, report))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    text = report.read_text()
    if text.startswith("skip "):
        pytest.skip(text)
    *kept, torn, notice, end = text.splitlines()
    assert 100 < len(kept) < 900 and kept == [f"line {number:04d}" for number in range(len(kept))]
    assert len(torn) < len("line 0000") and end == "the end"
    assert notice == f"WARNING: {1000 - len(kept)} lines of this log are missing here (No space left on device)."


PROGRAM = """
import logging, sys, warnings
from megatron.console import protect_console
if sys.argv[1] == "protected":
    protect_console()
for number in range(20000):
    print(number)
print("flushed", flush=True)
print("an error", file=sys.stderr)
logging.getLogger("test").warning("a warning")
warnings.warn("another")
sys.exit(int(sys.argv[2]))
"""

REDIRECTIONS = ["> /dev/full", "> /dev/full 2>&1", "2>&1 | head -n 1", "2> /dev/full | head -n 1", ">&- 2>&-"]


@pytest.mark.parametrize("redirection", REDIRECTIONS)
@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_stays_what_it_is(redirection: str, code: int) -> None:
    assert exit_code("protected", code, redirection) == code


def test_without_protection_the_exit_code_changes() -> None:
    assert exit_code("plain", 0, "> /dev/full") != 0
    assert exit_code("plain", 0, "2>&1 | head -n 1") != 0


def exit_code(kind: str, code: int, redirection: str) -> int:
    """Of the program, not of what reads its output."""
    command = f'"$0" -c "$1" {kind} {code} {redirection}; exit ${{PIPESTATUS[0]}}'
    words = ["bash", "-c", command, sys.executable, PROGRAM]
    return subprocess.run(words, cwd=REPOSITORY, timeout=60, stdout=subprocess.DEVNULL).returncode


def test_a_warning_starts_its_line_and_is_bold_and_yellow_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, line in ((io.StringIO(), "WARNING: look\n"), (Terminal(), "\033[1;33mWARNING: look\033[0m\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        print_warning("look")
        assert stream.getvalue() == line
