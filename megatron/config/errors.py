"""Errors that a person can mend.

Everything raised as a :class:`UserError` reaches the terminal as one sentence on rank 0, without a
traceback; any other exception is our own mistake and keeps its traceback.
"""

import sys
import time


class UserError(Exception):
    """A mistake that the user can mend; the message says what is wrong and what to do."""

    is_local = False
    """Whether only the rank that raises it knows of it, so that it must speak for itself."""


class ConfigError(UserError):
    """A flag, or a combination of flags, that cannot be honoured."""


class DataError(UserError):
    """A data file, index or tokenizer that cannot be used as it is."""


class TokenizerMismatchError(UserError):
    """Two libraries that should give a text the same ids, but do not."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another model."""


class RankError(UserError):
    """A mistake that only the rank that raises it knows of."""

    is_local = True


def report(error: UserError, rank: int) -> None:
    """Say what is wrong, once: on rank 0, or on the only rank that knows of it."""
    if rank == 0 or error.is_local:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks as soon as one has failed: leave rank 0 the time to say why.
        time.sleep(10)
