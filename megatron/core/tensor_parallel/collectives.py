"""The edges of a tensor-parallel region, without and with sequence parallelism.

The all-gather of a region's input and the reduction of its output are adjoint: the backward pass of one is the other.
The layers' autograd functions call both, so that a collective can overlap with computation.
"""

from torch import Tensor

from megatron.core.communication import Communicator, Work
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.collectives import RowGemm, TPOverlap


class TensorParallel:
    """How a layer is sharded: the ranks, whether the sequence is sharded between parallel regions (Korthikanti et al.,
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
        """Into how many parts the sequence is sharded between parallel regions."""
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
