"""What the tools share: flags, a sentence for an error, the exit code, and files that appear as a whole."""

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from megatron.command_line.parser import parse, parse_command
from megatron.errors import ConfigError, report, user_error_of


def run_tool(
    flags: type[Any] | Mapping[str, type[Any]],
    work: Callable[[Any], int | None],
    description: str | None,
    arguments: Sequence[str] | None = None,
    interrupted: str = "",
) -> int:
    """Call ``work`` with the dataclass ``flags``, or with one of several by the first word, parsed from ``arguments``
    (default: ``sys.argv``).

    Returns the exit code: that of ``work`` (None: 0), or of a :class:`UserError`, after its sentence.
    ``interrupted`` says what Ctrl-C leaves behind, for a tool that removes incomplete files.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        if isinstance(flags, Mapping):
            config = parse_command(flags, description or "", arguments)
        else:
            config = parse(flags, description, arguments, print_messages=rank == 0)
        if interrupted:
            # A terminated run, too, removes its incomplete files: the exception passes through their context managers.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        code = work(config) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `head` or a pager has what it wants; what is buffered must not fail at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell reports a process that SIGPIPE ended
    except Exception as raised:
        error = user_error_of(raised)
        if error is None:
            raise
        report(error, rank, os.environ.get("TORCHELASTIC_ERROR_FILE"))
        return error.exit_code
    except KeyboardInterrupt:
        if not interrupted:
            raise
        print(f"ERROR: interrupted; {interrupted} been written.", file=sys.stderr)
        return 130  # as the shell reports a process that SIGINT ended


def run_on_ranks(
    flags: type[Any],
    work: Callable[[Any, int], int | None],
    description: str | None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Call ``work`` like :func:`run_tool`, with the rank as second argument, alone or under torchrun."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return run_tool(flags, lambda config: work(config, rank), description, arguments)
    except KeyboardInterrupt:
        return 130


class HeldSignals:
    """A context in which SIGINT and SIGTERM wait for :meth:`raise_received`.

    Their handlers raise. From within a lock or a join of a pool of processes this would leave it locked, or half joined
    (``Thread.join`` takes a thread for ended when it is interrupted), and from within a finalizer it would be lost.
    """

    def __init__(self) -> None:
        self._received: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # in which alone Python handles signals
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, lambda *received: self._received.append(received))
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self.raise_received()

    def raise_received(self) -> None:
        """Call the handler of the first signal that has arrived."""
        if self._received:
            number, frame = self._received[0]
            self._handlers[number](number, frame)


def exit_at_once(exit_code: int) -> NoReturn:
    """End the process without Python's exit.

    With several processes an orderly exit now and then ends in an abort among torch's threads, after all is done (some
    2 % of runs with torch 2.13 and gloo).
    """
    sys.stdout.flush()
    os._exit(exit_code)


def write_file(flag: str, path: str | Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all; raises :class:`ConfigError` if it cannot be written."""
    target, data = Path(path), content.encode() if isinstance(content, str) else content
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or (target.exists() and not target.is_file()):
            target.write_bytes(data)  # /dev/stdout and links are written to, not replaced
            return
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(data)
            os.replace(partial, target)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written ({error.strerror}): choose another path.") from error


def write_json(path: str, content: Any, flag: str = "--json") -> None:
    """Write ``content`` as JSON, as :func:`write_file`; ``-`` is standard output."""
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:  # JSON has no infinity
        raise ConfigError(f"{flag} {path} would have a number that is not finite: use smaller values.") from error
    print(text) if path == "-" else write_file(flag, path, text + "\n")


def import_pyplot(flag: str) -> Any:
    """matplotlib's pyplot, which draws to files; raises :class:`ConfigError` if this extra of ``flag`` is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"{flag} needs matplotlib: pip install matplotlib.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def write_figure(flag: str, path: str | Path, figure: Any) -> None:
    """Write a figure of matplotlib in the format of the suffix of ``path``, as :func:`write_file`."""
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=Path(path).suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError(f"{flag} {path} cannot be written ({error}): use another suffix.") from error
    write_file(flag, path, content.getvalue())
