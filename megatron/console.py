"""Standard output and standard error whose write errors cannot end a run.

On a full disk, or after the reader of a pipe has exited, every write to the log raises ``OSError``. It would end
training at the next ``print``, or change the exit code to 120 when the interpreter flushes. :func:`protect_console`
replaces both streams once, at the entry point: a failed write is dropped and its lines are counted. Later writes are
still tried, and the first successful one reports the number of missing lines.
"""

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class DroppingFile(io.RawIOBase):
    """Writes to a file descriptor without ever raising or closing it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lost_lines = 0
        self._reason = ""
        # Whether the last byte written was not a line end.
        self._is_mid_line = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content: "ReadableBuffer", /) -> int:
        text = bytes(content)
        # A notice comes first. Where it finds no room either, these lines are lost, too.
        if self._lost_lines:
            line_end = "\n" if self._is_mid_line else ""
            notice = f"{line_end}WARNING: {self._lost_lines} lines of this log are missing here ({self._reason}).\n"
            if self._write_out(notice.encode()):
                self._lost_lines += _lines(text)
                return len(text)
            self._lost_lines = 0
        self._lost_lines = _lines(self._write_out(text))
        return len(text)

    def _write_out(self, text: bytes) -> bytes:
        """Write ``text``; returns the rest that could not be written."""
        try:
            while text:
                written = os.write(self._descriptor, text)
                self._is_mid_line = not text[:written].endswith(b"\n")
                text = text[written:]
        except OSError as error:
            self._reason = error.strerror or str(error)
        return text


def _lines(text: bytes) -> int:
    return max(text.count(b"\n"), 1) if text else 0


def print_warning(text: str) -> None:
    """Print a line that starts with WARNING, bold and yellow on a terminal."""
    line = f"WARNING: {text}"
    print(f"\033[1;33m{line}\033[0m" if sys.stdout.isatty() else line, flush=True)


def protect_console() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that drop failed writes."""
    sys.stdout, sys.stderr = _protected(sys.stdout), _protected(sys.stderr)


def _protected(stream: TextIO | None) -> TextIO:
    if stream is None:
        # Closed when the process started: another file may have its descriptor now.
        return open(os.devnull, "w", encoding="utf-8")
    with suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(DroppingFile(stream.fileno()))
    is_line_buffered = stream is sys.stderr or stream.isatty()
    return io.TextIOWrapper(
        buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=is_line_buffered
    )
