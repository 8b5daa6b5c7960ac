"""Run an action on all ranks or on rank 0; if it fails on one rank, every rank raises the error."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from megatron.core.control import ControlGroup
from megatron.errors import UserError

T = TypeVar("T")


def run_on_all_ranks(control: ControlGroup, action: Callable[[], T], first: bool = False) -> T:
    """Run ``action``, which must not communicate, on every rank; if one rank fails, all ranks raise its error.

    With ``first`` rank 0 runs it before the others, to write files that they then read.
    """
    result: list[T] = []
    for turn in (control.rank == 0, control.rank > 0) if first else (True,):
        error: UserError | None = None
        if turn:
            try:
                result.append(action())
            except UserError as raised:
                error = raised
        for failure in control.all_gather_object(error):
            if failure is not None:
                raise failure
    return result[0]


def first_failure(failures: Iterable[str | None]) -> str | None:
    """The first failure of all ranks, with its rank."""
    return next((f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None), None)


def run_on_rank0(control: ControlGroup, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 alone; every rank returns its (small) result, or raises its error."""
    result: T | UserError | None = None
    if control.rank == 0:
        try:
            result = action()
        except UserError as error:
            result = error
    result = control.broadcast_object(result)
    if isinstance(result, UserError):
        raise result
    return result
