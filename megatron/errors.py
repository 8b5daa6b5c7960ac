"""User errors, and the exit codes of ``pretrain_llama.py`` and of ``python -m megatron.operation.launch``.

A :class:`UserError` is printed as one sentence on rank 0, without a traceback. Any other exception is a bug and keeps
its traceback.
"""

import json
import sys
import time
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Result of the process, and what the caller should do next."""

    COMPLETE = 0
    """The run is complete: do nothing."""
    CRASH = 1
    """A process crashed, or an iteration failed: start the same command again."""
    ACTION_REQUIRED = 2
    """A flag, a data file or a checkpoint is wrong: correct it; the same command would fail again."""
    STOPPED = 75
    """Stopped on request and saved, before the run was complete: start the same command again (``EX_TEMPFAIL``)."""
    NO_PROGRESS = 93
    """Several attempts in a row ended without a new checkpoint: find the cause."""


FINAL = (ExitCode.NO_PROGRESS, ExitCode.ACTION_REQUIRED, ExitCode.STOPPED)
"""Codes after which a launcher does not restart the ranks. If ranks end with several codes, the first listed counts."""


class UserError(Exception):
    """An error that the user can correct; the message names the cause and the remedy."""

    is_local = False
    """Whether only one rank raises the error, so that this rank must print it."""
    exit_code = ExitCode.CRASH
    """Exit code of the process that ends with this error."""


class ConfigError(UserError):
    """An invalid flag, or an invalid combination of flags."""

    exit_code = ExitCode.ACTION_REQUIRED


class DataError(UserError):
    """An unusable data file, index or tokenizer."""

    exit_code = ExitCode.ACTION_REQUIRED


class LoaderError(DataError):
    """A data loader process ended or stopped responding; a restart may succeed."""

    exit_code = ExitCode.CRASH


class TokenizerMismatchError(UserError):
    """Two tokenizer libraries gave different ids for the same text."""

    exit_code = ExitCode.ACTION_REQUIRED


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of another model."""

    exit_code = ExitCode.ACTION_REQUIRED


class NoProgressError(UserError):
    """Several attempts in a row ended without a new checkpoint."""

    exit_code = ExitCode.NO_PROGRESS


class RankError(UserError):
    """An error that only one rank raises."""

    is_local = True

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ACTION_REQUIRED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def report(error: UserError, rank: int, error_file: str | None = None) -> None:
    """Print the message on rank 0, or on the rank of a local error, and write it to torchrun's ``error_file``.

    torchrun and ``megatron.operation.launch`` print the error file of the first failed rank as the "Root Cause" at the
    end. They terminate all ranks as soon as one has failed, possibly before rank 0 has printed.
    """
    if error_file:
        # torchrun compares whole seconds. This time is before the crashes of other ranks that follow from this exit.
        write_error_file(Path(error_file), f"ERROR: {error}", int(time.time()) - 1)
    if rank == 0 or error.is_local:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
    elif not error_file:
        # Other launchers may terminate rank 0 when this rank exits: give rank 0 time to print.
        time.sleep(10)


def report_crash(traceback: str, error_file: str | None) -> None:
    """Write the ``traceback`` of any other exception to torchrun's ``error_file``."""
    if error_file:
        write_error_file(Path(error_file), traceback, int(time.time()))


def write_error_file(path: Path, text: str, timestamp: int) -> None:
    """Write the error of a failed rank in torchrun's format."""
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(timestamp)}}
    draft = path.with_suffix(".draft")
    try:
        draft.write_text(json.dumps({"message": message}), encoding="utf-8")
        # Atomically: torchrun crashes on an incomplete file, and may terminate this process at any time.
        draft.replace(path)
    except OSError as error:
        print(f"WARNING: the error file {path} cannot be written ({error.strerror}).", file=sys.stderr, flush=True)
