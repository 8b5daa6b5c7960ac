"""The collectives in which ranks wait for long work of one rank: an index, a file, the commit of a checkpoint. An
action that fails on one rank raises its error on every rank.

They use gloo on every device, with a timeout of hours. The collectives of training (:class:`Communicator`) have the
timeout of ``--distributed-timeout-minutes``, and under NCCL a wait is a kernel on the GPU that a watchdog aborts.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.errors import UserError
from megatron.torch_compat import set_group_timeout

CONTROL_TIMEOUT = timedelta(hours=4)
"""A rank that ends closes its connections, which ends the wait of the others immediately. Only a rank that hangs, or a
host that disappears without closing them, makes the others wait this long."""


class ControlGroup:
    """Collectives of objects over ``ranks``; ``rank`` is this process's global rank.

    Objects are pickled into host memory, never onto a GPU. All ranks must use it for the first time in the same order
    as other groups; ``connect_timeout`` applies to that first use.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        connect_timeout: timedelta | None = None,
        timeout: timedelta = CONTROL_TIMEOUT,
    ) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank)
        self._connect_timeout = connect_timeout
        self._timeout = timeout

    @cached_property
    def process_group(self) -> Any:
        """The ``torch.distributed`` group, created on first use by its members alone; None for one rank."""
        if self.size == 1:
            return None
        assert dist.is_initialized(), "a control group of several ranks needs torch.distributed"
        group = dist.new_group(
            self.ranks,
            timeout=self._connect_timeout,
            backend="gloo",
            use_local_synchronization=True,
            group_desc="control",
        )
        # Ranks may connect at their first message (TORCH_GLOO_LAZY_INIT), which must have the timeout of connecting. A
        # barrier sends over distances of powers of two, like every later collective of objects.
        dist.barrier(group=group)
        set_group_timeout(group, self._timeout)
        return group

    def open(self) -> None:
        _ = self.process_group

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value`` in rank order; for small control data."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The ``value`` of the group's rank ``source``; for small control data."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, self.ranks[source], group=self.process_group)
        return values[0]


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
