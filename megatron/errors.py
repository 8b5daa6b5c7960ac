"""User errors, and the exit codes of ``pretrain_llama.py`` and of ``python -m megatron.operation.launch``.

A :class:`UserError` is printed as one sentence on rank 0, without a traceback. Any other exception is a bug and keeps
its traceback.
"""

import errno
import json
import sys
import time
from collections.abc import Mapping, Sequence
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
    """Several attempts in a row ended without a new checkpoint, or training is unstable: find the cause."""


# Codes after which a launcher does not restart the ranks. If ranks end with several codes, the first listed counts.
FINAL = (ExitCode.NO_PROGRESS, ExitCode.ACTION_REQUIRED, ExitCode.STOPPED)

# The time by which other ranks end after the rank that causes the error of all.
FIRST_RANK_SECONDS = 10.0
"""Seconds after which rank 0 has printed the error of all ranks."""
CULPRIT_SECONDS = 2.0

# Numbers of an OSError for which a disk or a file system is at fault.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE})

# Numbers of an OSError that no later attempt can mend: the path itself is wrong.
_PATH = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR})


class UserError(Exception):
    """An error that the user can correct; the message names the cause and the remedy."""

    is_local = False
    """Whether only one rank raises the error, so that this rank must print it."""
    exit_code = ExitCode.CRASH
    """Exit code of the process that ends with this error."""
    cause = "user_error"
    """Class of the cause in failure.json (megatron/operation/causes.py)."""
    culprit: int | None = None
    """The rank that causes an error which all ranks raise."""


class ConfigError(UserError):
    """An invalid flag, or an invalid combination of flags."""

    exit_code = ExitCode.ACTION_REQUIRED

    def __init__(self, *sentences: str) -> None:
        # The message of several sentences is a list with a line for each.
        self.sentences = tuple(dict.fromkeys(sentences))
        # The errors that were collected in this one.
        self.causes: tuple[ConfigError, ...] = ()
        if len(self.sentences) > 1:
            super().__init__("\n- ".join([f"{len(self.sentences)} corrections are needed:", *self.sentences]))
        else:
            super().__init__(*self.sentences)

    @classmethod
    def of(cls, errors: "Sequence[ConfigError]") -> "ConfigError":
        """One error for all ``errors``."""
        if len(errors) == 1:
            return errors[0]
        whole = cls(*(sentence for error in errors for sentence in error.sentences))
        whole.causes = tuple(errors)
        return whole


class DataError(UserError):
    """An unusable data file, index or tokenizer."""

    exit_code = ExitCode.ACTION_REQUIRED
    cause = "data"


class LoaderError(DataError):
    """The data loader cannot read, or does not deliver; a restart may succeed."""

    exit_code = ExitCode.CRASH


class TokenizerMismatchError(UserError):
    """Two tokenizer libraries gave different ids for the same text."""

    exit_code = ExitCode.ACTION_REQUIRED


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of another model."""

    exit_code = ExitCode.ACTION_REQUIRED


class DirectoryInUseError(CheckpointError):
    """A directory of the run belongs to another run; this one must not write there, not even its failure."""

    cause = "in_use"


class NoProgressError(UserError):
    """Several attempts in a row ended without a new checkpoint."""

    exit_code = ExitCode.NO_PROGRESS
    cause = "no_progress"


class NotFiniteError(UserError):
    """The loss, a gradient or the training state is not finite."""

    cause = "not_finite"


class SilentCorruptionError(UserError):
    """A rank has computed or stored wrong bits. ``ranks`` are those that may be the cause."""

    cause = "silent_corruption"

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.culprit = ranks[0] if len(ranks) == 1 else None


class UnstableError(UserError):
    """Training is unstable beyond the limits of its policies; ``cause`` is ``spike`` or ``not_finite``."""

    exit_code = ExitCode.NO_PROGRESS

    def __init__(self, message: str, cause: str = "spike") -> None:
        super().__init__(message)
        self.cause = cause


class PreflightError(UserError):
    """A check of the nodes before the run failed; ``culprit`` is a rank whose node is at fault."""

    exit_code = ExitCode.ACTION_REQUIRED

    def __init__(self, message: str, culprit: int | None = None, cause: str = UserError.cause) -> None:
        super().__init__(message)
        self.culprit, self.cause = culprit, cause


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
        is_local = error.is_local or error.culprit == rank
        if error.culprit is not None and not is_local:
            # The launcher reads the error files when the first rank ends, and records that rank.
            time.sleep(CULPRIT_SECONDS)
        # torchrun compares whole seconds. This time is before the crashes of other ranks that follow from this exit.
        facts: dict[str, str | bool] = {"cause": cause_of(error), "is_local": is_local}
        write_error_file(Path(error_file), f"ERROR: {error}", int(time.time()) - 1, facts)
    if rank == 0 or error.is_local:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
    elif not error_file:
        # Other launchers may terminate rank 0 when this rank exits: give rank 0 time to print.
        time.sleep(FIRST_RANK_SECONDS)


def report_crash(traceback: str, error: BaseException, error_file: str | None) -> None:
    """Write the ``traceback`` of any other ``error`` to torchrun's ``error_file``."""
    if error_file:
        write_error_file(Path(error_file), traceback, int(time.time()), {"cause": cause_of(error), "is_local": True})


def user_error_of(error: Exception) -> UserError | None:
    """The error that the user can correct: ``error`` itself, or the wrong path that it names; None for a bug."""
    if isinstance(error, OSError) and error.errno in _PATH and error.filename:
        return ConfigError(f"{error.filename} cannot be used ({error.strerror}): correct the path.")
    return error if isinstance(error, UserError) else None


def cause_of(error: BaseException) -> str:
    """Class of the cause, also from the error that ``error`` was raised from."""
    one: BaseException | None = error
    while one is not None:
        # The class is compared by name: torch is not imported here, and has several such classes.
        lacks_memory = isinstance(one, MemoryError) or type(one).__name__ == "OutOfMemoryError"
        if lacks_memory or (isinstance(one, RuntimeError) and "can't allocate memory" in str(one)):
            return "out_of_memory"
        if isinstance(one, OSError) and one.errno in _DISK:
            return "disk"
        one = one.__cause__
    return error.cause if isinstance(error, UserError) else "exception"


def write_error_file(path: Path, text: str, timestamp: int, facts: Mapping[str, str | bool] | None = None) -> None:
    """Write the error of a failed rank in torchrun's format, with ``facts`` for our launcher."""
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(timestamp), **(facts or {})}}
    draft = path.with_suffix(".draft")
    try:
        draft.write_text(json.dumps({"message": message}), encoding="utf-8")
        # Atomically: torchrun crashes on an incomplete file, and may terminate this process at any time.
        draft.replace(path)
    except OSError as error:
        print(f"WARNING: the error file {path} cannot be written ({error.strerror}).", file=sys.stderr, flush=True)
