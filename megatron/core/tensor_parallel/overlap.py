"""Products at the edges of a tensor-parallel region, with the collectives of sequence parallelism behind them.

Rows of a product are independent of each other, and each rank has, or is to have, its part of the rows. So the own part
can be multiplied while the others come, and a part can go to its rank while the next is multiplied. Sources: Wang et
al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023); PyTorch's async tensor
parallelism, which does the same with copies between the memories of GPUs.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import Communicator, Pending, add_in_order
from megatron.core.ops.matmul import Operand, RowProduct


class EdgeProducts(Protocol):
    """How a linear layer multiplies where a region begins (gather and multiply) and ends (multiply and sum)."""

    @property
    def name(self) -> str:
        """Which way this is, and why, for the log."""

    def enter_and_multiply(self, part: Operand, product: RowProduct) -> tuple[Tensor, Operand]:
        """From this rank's rows ``[s/tp, b, k]`` the product of all ranks' rows, ``[s, b, n]``, and these rows."""

    def multiply_and_leave(self, inputs: Operand, product: RowProduct) -> Pending:
        """Start the product of ``[s, b, k]``, summed over the ranks: this rank's rows ``[s/tp, b, n]``."""


class PipelinedEdges:
    """Rows go from rank to rank part by part, with sends that every backend has; sums are in the order of ranks.

    Each rank sends as much as it does in an all-gather or a reduce-scatter. ``why`` this way was chosen is told.
    """

    def __init__(self, ranks: Communicator, why: str = "") -> None:
        self._ranks = ranks
        self.name = f"pipelined ({why})" if why else "pipelined"

    def _partners(self) -> Iterator[tuple[int, int]]:
        """(whom to receive from, whom to send to), a different one at every step, so that no rank is asked twice."""
        ranks = self._ranks
        for step in range(1, ranks.size):
            yield (ranks.rank - step) % ranks.size, (ranks.rank + step) % ranks.size

    def enter_and_multiply(self, part: Operand, product: RowProduct) -> tuple[Tensor, Operand]:
        """All sends start at once; the own rows are multiplied first, the others as they come."""
        ranks, own = self._ranks, part.data.contiguous()
        whole = _all_rows(own, ranks.size)
        parts = whole.chunk(ranks.size)
        arriving = {
            source: ranks.start_exchange(own, target, parts[source], source) for source, target in self._partners()
        }
        parts[ranks.rank].copy_(own)
        first = product.of(replace(part, data=own))
        output = _all_rows(first, ranks.size)
        outputs = output.chunk(ranks.size)
        outputs[ranks.rank].copy_(first)
        for source, rows in arriving.items():
            outputs[source].copy_(product.of(replace(part, data=rows.wait())))
        return output, replace(part, data=whole)

    def multiply_and_leave(self, inputs: Operand, product: RowProduct) -> Pending:
        """The rows of other ranks are multiplied first, and each part goes while the next is multiplied."""
        ranks = self._ranks
        parts = inputs.data.chunk(ranks.size)
        summands: dict[int, Pending] = {}
        for source, target in self._partners():
            partial = product.of(replace(inputs, data=parts[target]))
            summands[source] = ranks.start_exchange(partial, target, torch.empty_like(partial), source)
        own = product.of(replace(inputs, data=parts[ranks.rank]))
        summands[ranks.rank] = Pending((), lambda: own)
        return Pending.all_of([summands[rank] for rank in range(ranks.size)], add_in_order)


def _all_rows(part: Tensor, size: int) -> Tensor:
    """Memory for the rows of ``size`` ranks, of which each has as many as ``part``."""
    return part.new_empty((size * part.shape[0], *part.shape[1:]))


class SymmetricMemoryEdges:
    """PyTorch's asynchronous tensor parallelism: GPUs of a host copy from each other's memory, without kernels that
    take part of the GPU from the product.

    Scaled operands go the pipelined way.
    """

    name = "PyTorch's symmetric memory"

    def __init__(self, ranks: Communicator) -> None:
        # Defines the operators.
        import torch.distributed._symmetric_memory

        self._ranks, self._scaled = ranks, PipelinedEdges(ranks)
        self._operators: Any = torch.ops.symm_mem

    def enter_and_multiply(self, part: Operand, product: RowProduct) -> tuple[Tensor, Operand]:
        """In one operator."""
        if product.matrix is None:
            return self._scaled.enter_and_multiply(part, product)
        self._ranks.record("all_gather", part.data.nbytes * self._ranks.size)
        whole, (output,) = self._operators.fused_all_gather_matmul(
            part.data, [product.matrix], 0, self._ranks.process_group.group_name
        )
        return output, replace(part, data=whole)

    def multiply_and_leave(self, inputs: Operand, product: RowProduct) -> Pending:
        """In one operator, which adds in the order of ranks."""
        if product.matrix is None:
            return self._scaled.multiply_and_leave(inputs, product)
        width = product.matrix.shape[1]
        self._ranks.record("reduce_scatter", inputs.data.nbytes // inputs.data.shape[-1] * width)
        output: Tensor = self._operators.fused_matmul_reduce_scatter(
            inputs.data, product.matrix, "sum", 0, self._ranks.process_group.group_name
        )
        return Pending((), lambda: output)


@dataclass(frozen=True)
class Seat:
    """Where a rank runs, and on what."""

    host: str
    device: int
    """Its number on the host, as the rank sees it."""
    capability: tuple[int, int]
    backend: str


def choose_overlap(ranks: Communicator, device: torch.device) -> EdgeProducts:
    """The best overlap that all ``ranks`` can do; all of them call it. Layers of Transformer Engine bring their own."""
    obstacle = _obstacle_to_symmetric_memory(ranks, device)
    return SymmetricMemoryEdges(ranks) if obstacle is None else PipelinedEdges(ranks, obstacle)


def _obstacle_to_symmetric_memory(ranks: Communicator, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "symmetric memory needs GPUs"
    index = torch.cuda.current_device() if device.index is None else device.index
    backend = dist.get_backend(ranks.process_group)
    seat = Seat(socket.gethostname(), index, torch.cuda.get_device_capability(device), backend)
    seats = ranks.all_gather_object(seat)
    # What one rank cannot do none does.
    obstacles = ranks.all_gather_object(obstacle_between(seats, ranks.rank, peer_access))
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)


def peer_access(mine: int, other: int) -> bool:
    """Whether the GPU ``mine`` reads the memory of ``other``, as far as this process sees both."""
    return other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(mine, other)


def obstacle_between(seats: Sequence[Seat], rank: int, can_access: Callable[[int, int], bool]) -> str | None:
    """Why ``rank`` of ``seats`` cannot share memory with all others; None if it can."""
    mine = seats[rank]
    if mine.backend != "nccl":
        return f"symmetric memory needs NCCL, not {mine.backend}"
    if mine.capability < (9, 0):
        return f"symmetric memory is used from compute capability 9.0 on, not {mine.capability[0]}.{mine.capability[1]}"
    others = [seat for other, seat in enumerate(seats) if other != rank]
    if any(seat.host != mine.host for seat in others):
        return "symmetric memory needs all tensor-parallel ranks on one host"
    if not all(seat.device != mine.device and can_access(mine.device, seat.device) for seat in others):
        return "not every GPU reads the memory of every other"
    return None
