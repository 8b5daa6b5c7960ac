"""Differentiable communication of rows in two halves, start and wait, between which other work overlaps.

The backward of the wait starts the adjoint communication, the backward of the start waits for it. Autograd runs what
was computed between the two halves between them again, because it prefers the functions that ran last. A
:class:`BackwardOverlap` has what else runs there.
"""

#     forward     start ------ shared experts ----------------------- wait - experts
#     backward    wait for the adjoint - shared experts, overlap - start the adjoint - experts     (right to left)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.communication import Communicator, Work, add_in_order


@dataclass(frozen=True)
class Transfer:
    """A linear communication of rows among ``ranks``, and its adjoint."""

    ranks: Communicator
    start: Callable[[Tensor], Work[Tensor]]
    """Starts the communication of rows."""
    start_adjoint: Callable[[Tensor], Work[Tensor]]
    """Starts the communication of the result's gradient; returns the gradient of the rows."""

    @property
    def adjoint(self) -> "Transfer":
        return Transfer(self.ranks, self.start_adjoint, self.start)


def even_gather(ranks: Communicator) -> Transfer:
    """All-gather of equal numbers of rows; the adjoint is a reduce-scatter."""
    return Transfer(ranks, ranks.start_all_gather, ranks.start_reduce_scatter)


def uneven_gather(ranks: Communicator, counts: Sequence[int]) -> Transfer:
    """All-gather of ``counts[i]`` rows of rank i; the adjoint is a reduce-scatter, added in rank order."""

    def start(rows: Tensor) -> Work[Tensor]:
        output = rows.new_empty((sum(counts), *rows.shape[1:]))
        return ranks.start_exchange_parts([rows] * ranks.size, output.split(list(counts))).then(lambda _: output)

    def start_adjoint(gradient: Tensor) -> Work[Tensor]:
        parts = gradient.split(list(counts))
        own = parts[ranks.rank]
        received = [own if rank == ranks.rank else torch.empty_like(own) for rank in range(ranks.size)]
        return ranks.start_exchange_parts(parts, received).then(add_in_order)

    return Transfer(ranks, start, start_adjoint)


def row_exchange(ranks: Communicator, sent: Sequence[int], received: Sequence[int]) -> Transfer:
    """``sent[i]`` rows to rank i and ``received[i]`` rows from it (uneven all-to-all); the adjoint is the way back."""
    start = ranks.start_exchange_rows
    return Transfer(ranks, partial(start, sent=sent, received=received), partial(start, sent=received, received=sent))


class BackwardOverlap:
    """Computation whose result no other function of the backward pass needs: it runs during an adjoint transfer that
    starts later."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], None]] = []

    def put(self, task: Callable[[], None]) -> None:
        """Run ``task`` during the transfer."""
        self._tasks.append(task)

    def run(self) -> None:
        """Run the tasks in order; each is dropped before the next, with the tensors that it holds."""
        while self._tasks:
            self._tasks.pop(0)()


class AsyncTransfer:
    """A transfer of ``rows`` that has started. Call :meth:`wait` once; ``rows`` must not change until then."""

    def __init__(self, transfer: Transfer, rows: Tensor) -> None:
        self.transfer = transfer
        self.work: Work[Tensor] | None = None
        """The communication under way, forward or backward."""
        self.overlap: BackwardOverlap | None = None
        """Work that overlaps with the adjoint; None if there is no adjoint."""
        self._edge: Tensor | None = rows
        if transfer.ranks.size > 1:
            self.overlap = BackwardOverlap() if rows.requires_grad else None
            self._edge = _Start.apply(rows, self)

    def wait(self) -> Tensor:
        edge, self._edge = self._edge, None
        assert edge is not None
        result: Tensor = edge if self.transfer.ranks.size == 1 else _Wait.apply(edge, self)
        return result

    def begin(self, work: Work[Tensor]) -> None:
        assert self.work is None
        self.work = work

    def finish(self) -> Tensor:
        assert self.work is not None
        work, self.work = self.work, None
        return work.wait()


def communicate(transfer: Transfer, rows: Tensor) -> Tensor:
    return AsyncTransfer(transfer, rows).wait()


class _Start(Function):
    """Returns a tensor without elements, which connects the start and the wait in the graph."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, started: AsyncTransfer) -> Tensor:
        ctx.started = started
        started.begin(started.transfer.start(rows))
        return rows.new_empty(0)  # [0]: the edge in the graph from the start to the wait

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        started: AsyncTransfer = ctx.started
        assert started.overlap is not None
        started.overlap.run()
        return started.finish(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, started: AsyncTransfer) -> Tensor:
        ctx.started = started
        return started.finish()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        started: AsyncTransfer = ctx.started
        started.begin(started.transfer.start_adjoint(gradients[0].contiguous()))
        return gradients[0].new_empty(0), None
