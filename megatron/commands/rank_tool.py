"""The end of a tool that runs on ranks, alone or under torchrun: one sentence for an error, and the exit code."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron.errors import UserError, report


def exit_code_of(work: Callable[[], None], rank: int) -> int:
    """The exit code after ``work``; rank 0 prints the sentence of a :class:`UserError`."""
    try:
        work()
    except UserError as error:
        report(error, rank, os.environ.get("TORCHELASTIC_ERROR_FILE"))
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # as the shell reports a process that SIGINT ended
    return 0


def exit_at_once(exit_code: int) -> NoReturn:
    """End the process without Python's exit.

    With several processes an orderly exit now and then ends in an abort among torch's threads, after all is done (some
    2 % of runs with torch 2.13 and gloo).
    """
    sys.stdout.flush()
    os._exit(exit_code)
