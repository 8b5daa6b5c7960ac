"""The edges of a tensor-parallel region, without and with sequence parallelism, and their overlap with GEMMs.

The all-gather of a region's input and the reduction of its output are adjoint: the backward pass of one is the other.
The layers' autograd functions call both, so that a collective can overlap with computation.

The rows of a GEMM are independent, and each rank has its part of the rows of the input or of the output. So a rank
multiplies its own rows while it receives the others, and sends one part of a sum while it multiplies the next. Sources:
Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023); PyTorch's async tensor
parallelism, which copies between GPU memories.
"""

# Rank 0 of four; p0 are the rows of rank 0:
#
#     gather_gemm    receive      p3 | p2 | p1               gemm_reduce    multiply   p1 | p2 | p3 | p0
#                    multiply     p0 | p3 | p2 | p1                         send            p1 | p2 | p3 | add

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication import Communicator, Work, add_in_order
from megatron.core.control import ControlGroup
from megatron.core.precision import QuantizedTensor
from megatron.torch_compat import symmetric_memory_operators

RowGemm = Callable[[QuantizedTensor], Tensor]
"""A GEMM of some rows with a fixed matrix, ``[..., k] -> [..., n]``."""


class TPOverlap(Protocol):
    """The GEMM and collective where a region begins (all-gather, GEMM) and where it ends (GEMM, reduction).

    ``matrix`` ``[k, n]`` is the matrix of ``gemm`` for unquantised rows; None if the rows are quantised.
    """

    @property
    def name(self) -> str:
        """The implementation, and why it was chosen, for the log."""

    def gather_gemm(
        self, rows: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor]:
        """The GEMM ``[s, b, n]`` of all ranks' rows, and these rows, from this rank's rows ``[s/tp, b, k]``."""

    def gemm_reduce(self, inputs: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None) -> Work[Tensor]:
        """Start the GEMM of ``[s, b, k]`` and its sum over the ranks: this rank's rows ``[s/tp, b, n]``."""


class P2POverlap:
    """Point-to-point messages, part by part, on every backend; sums are in rank order. Each rank sends as many bytes as
    in an all-gather or a reduce-scatter. ``reason`` is why it was chosen."""

    def __init__(self, ranks: Communicator, reason: str = "") -> None:
        self._ranks = ranks
        self.name = f"pipelined ({reason})" if reason else "pipelined"

    def _partners(self) -> list[tuple[int, int]]:
        """(source, target) of each step: a different pair at every step, so that no rank has two requests at once."""
        rank, size = self._ranks.rank, self._ranks.size
        return [((rank - step) % size, (rank + step) % size) for step in range(1, size)]

    def gather_gemm(
        self, rows: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor]:
        # This rank's rows are multiplied first, the others as they arrive. One exchange is under way at a time: with
        # one hardware queue a second one would wait for the first and block the GEMM that is launched after it.
        ranks, size = self._ranks, self._ranks.size
        own = rows.with_rows([tensor.contiguous() for tensor in rows.row_tensors])
        # Empty tensors for the rows of all ranks.
        whole = rows.with_rows([one.new_empty((size * one.shape[0], *one.shape[1:])) for one in rows.row_tensors])
        parts = whole.chunk(size)

        def start_exchange(source: int, target: int) -> Work[QuantizedTensor]:
            sent_and_received = zip(own.row_tensors, parts[source].row_tensors)
            works = [ranks.start_exchange(sent, target, received, source) for sent, received in sent_and_received]
            return Work.all_of(works, own.with_rows)

        partners = self._partners()
        arriving = start_exchange(*partners[0])
        for tensor, target_rows in zip(own.row_tensors, parts[ranks.rank].row_tensors):
            target_rows.copy_(tensor)
        first = gemm(own)  # [s/tp, b, n]
        output = first.new_empty((size * first.shape[0], *first.shape[1:]))  # [s, b, n]
        outputs = output.chunk(size)
        outputs[ranks.rank].copy_(first)
        for (source, _), following in zip(partners, (*partners[1:], None)):
            current = arriving
            if following is not None:
                arriving = start_exchange(*following)
            outputs[source].copy_(gemm(current.wait()))
        return output, whole

    def gemm_reduce(self, inputs: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None) -> Work[Tensor]:
        # The rows of other ranks are multiplied first; each part is sent while the next is multiplied.
        ranks = self._ranks
        parts = inputs.chunk(ranks.size)
        summands: dict[int, Work[Tensor]] = {}
        for source, target in self._partners():
            partial = gemm(parts[target])
            summands[source] = ranks.start_exchange(partial, target, torch.empty_like(partial), source)
        own = gemm(parts[ranks.rank])
        summands[ranks.rank] = Work((), lambda: own)
        return Work.all_of([summands[rank] for rank in range(ranks.size)], add_in_order)


class SymmetricMemoryOverlap:
    """PyTorch's asynchronous tensor parallelism: GPUs of a host copy from each other's memory, without using
    multiprocessors. Quantised rows use :class:`P2POverlap`."""

    name = "PyTorch's symmetric memory"

    def __init__(self, ranks: Communicator) -> None:
        self._ranks, self._quantized = ranks, P2POverlap(ranks)
        self._operators = symmetric_memory_operators()

    def gather_gemm(
        self, rows: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor]:
        if matrix is None:
            return self._quantized.gather_gemm(rows, gemm, matrix)
        self._ranks.record("all_gather", rows.data.nbytes * self._ranks.size)
        whole, (output,) = self._operators.fused_all_gather_matmul(
            rows.data, [matrix], 0, self._ranks.process_group.group_name
        )
        return output, rows.with_rows([whole])

    def gemm_reduce(self, inputs: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None) -> Work[Tensor]:
        if matrix is None:
            return self._quantized.gemm_reduce(inputs, gemm, matrix)
        self._ranks.record("reduce_scatter", inputs.data.nbytes // inputs.data.shape[-1] * matrix.shape[1])
        output: Tensor = self._operators.fused_matmul_reduce_scatter(
            inputs.data, matrix, "sum", 0, self._ranks.process_group.group_name
        )
        return Work((), lambda: output)


@dataclass(frozen=True)
class RankDevice:
    """The host and device of a rank."""

    host: str
    device: int
    """Its number on the host, as the rank sees it."""
    capability: tuple[int, int]
    backend: str


def obstacle_to_symmetric_memory(ranks: Communicator, control: ControlGroup, device: torch.device) -> str | None:
    """Why not all ``ranks`` can share memory; None if they can. Collective over all ranks of the run."""
    if device.type != "cuda":
        return "symmetric memory needs GPUs"
    index = torch.cuda.current_device() if device.index is None else device.index
    backend = dist.get_backend(ranks.process_group)
    own = RankDevice(socket.gethostname(), index, torch.cuda.get_device_capability(device), backend)

    def can_access(own: int, other: int) -> bool:
        # False if this process does not see both GPUs.
        return other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(own, other)

    everyone = control.all_gather_object(own)
    devices = [everyone[rank] for rank in ranks.ranks]
    # All ranks must choose the same overlap.
    obstacles = control.all_gather_object(obstacle_between(devices, ranks.rank, can_access))
    return next((obstacles[rank] for rank in ranks.ranks if obstacles[rank] is not None), None)


def choose_overlap(
    ranks: Communicator,
    control: ControlGroup,
    device: torch.device,
    find_obstacle: Callable[[Communicator, ControlGroup, torch.device], str | None] = obstacle_to_symmetric_memory,
) -> TPOverlap:
    """The best overlap that all ``ranks`` support. Collective over all ranks of the run (``control``). Layers of
    Transformer Engine have an overlap of that package."""
    obstacle = find_obstacle(ranks, control, device)
    return SymmetricMemoryOverlap(ranks) if obstacle is None else P2POverlap(ranks, obstacle)


def obstacle_between(devices: Sequence[RankDevice], rank: int, can_access: Callable[[int, int], bool]) -> str | None:
    """Why ``rank`` cannot share memory with all others; None if it can."""
    own = devices[rank]
    if own.backend != "nccl":
        return f"symmetric memory needs NCCL, not {own.backend}"
    if own.capability < (9, 0):
        return f"symmetric memory is used from compute capability 9.0 on, not {own.capability[0]}.{own.capability[1]}"
    others = [device for number, device in enumerate(devices) if number != rank]
    if any(other.host != own.host for other in others):
        return "symmetric memory needs all tensor-parallel ranks on one host"
    if not all(other.device != own.device and can_access(own.device, other.device) for other in others):
        return "not every GPU reads the memory of every other"
    return None


class TensorParallel:
    """The sharding of a layer: the ranks, whether the sequence is sharded between parallel regions (Korthikanti et al.,
    arXiv 2205.05198), and how the collectives of sequence parallelism overlap with GEMMs."""

    def __init__(
        self, communicator: Communicator, sequence_parallel: bool = False, overlap: TPOverlap | None = None
    ) -> None:
        self.communicator, self.sequence_parallel = communicator, sequence_parallel
        self.overlap: TPOverlap = overlap or NoOverlap(self)
        self.has_overlap = overlap is not None

    @property
    def size(self) -> int:
        return self.communicator.size

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def sequence_parts(self) -> int:
        """The number of parts into which the sequence is sharded between parallel regions."""
        return self.size if self.sequence_parallel else 1

    def gather_input(self, rows: QuantizedTensor) -> Work[QuantizedTensor]:
        """Start the all-gather of a region's input under sequence parallelism, ``[s/tp, b, h] -> [s, b, h]``; otherwise
        every rank has the whole input."""
        if self.sequence_parallel:
            return rows.start_all_gather(self.communicator)
        return Work((), lambda: rows)

    def reduce_output(self, partial: Tensor) -> Work[Tensor]:
        """Start the sum of a region's partial outputs ``[s, b, h]`` over the ranks; overwrites ``partial``.

        ``[s/tp, b, h]`` under sequence parallelism (reduce-scatter), else ``[s, b, h]`` (all-reduce).
        """
        if self.sequence_parallel:
            return self.communicator.start_reduce_scatter(partial)
        return self.communicator.start_all_reduce(partial)


class NoOverlap:
    """The collective before or after the GEMM; with or without sequence parallelism."""

    name = "none"

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def gather_gemm(
        self, rows: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor]:
        whole = self._parallel.gather_input(rows).wait()
        return gemm(whole), whole

    def gemm_reduce(self, inputs: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None) -> Work[Tensor]:
        return self._parallel.reduce_output(gemm(inputs))
