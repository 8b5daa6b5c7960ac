"""The edges of a tensor-parallel region, without and with sequence parallelism.

Entering and leaving are adjoint to each other: the backward of a layer that enters a region leaves it, and the
other way round. The layers' autograd functions call both, so that a collective can overlap with computation.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from megatron.core.communication import Communicator, Pending
from megatron.core.ops.matmul import Operand, RowProduct
from megatron.core.tensor_parallel.overlap import EdgeProducts


@dataclass(frozen=True)
class TensorParallel:
    """How a layer is shared: the ranks, and whether the sequence is split between parallel regions."""

    communicator: Communicator
    sequence_parallel: bool = False
    overlap: EdgeProducts | None = None
    """Products behind which the collectives of sequence parallelism run; None: one after the other."""

    @property
    def size(self) -> int:
        """Ranks that share the layer."""
        return self.communicator.size

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.communicator.rank

    @property
    def sequence_parts(self) -> int:
        """Parts into which the sequence is split between parallel regions."""
        return self.size if self.sequence_parallel else 1

    @property
    def edges(self) -> EdgeProducts:
        """How linear layers multiply where a region begins and ends."""
        return self.overlap or OneAfterAnother(self)

    def enter(self, tensor: Tensor) -> Pending:
        """Start making the whole input of a region.

        ``[s/tp, b, h] -> [s, b, h]`` by an all-gather under sequence parallelism; otherwise it is there already.
        """
        if self.sequence_parallel:
            return self.communicator.start_all_gather(tensor)
        return Pending((), lambda: tensor)

    def leave(self, partial: Tensor) -> Pending:
        """Start summing a region's partial outputs ``[s, b, h]`` over the ranks; overwrites ``partial``.

        The result is ``[s/tp, b, h]`` under sequence parallelism (reduce-scatter), else whole (all-reduce).
        """
        if self.sequence_parallel:
            return self.communicator.start_reduce_scatter(partial)
        return self.communicator.start_all_reduce(partial)


@dataclass(frozen=True)
class OneAfterAnother:
    """The whole collective before or after the whole product; with or without sequence parallelism."""

    parallel: TensorParallel
    name = "none"

    def enter_and_multiply(self, part: Operand, product: RowProduct) -> tuple[Tensor, Operand]:
        """Gather, then multiply."""
        whole = replace(part, data=self.parallel.enter(part.data).wait())
        return product.of(whole), whole

    def multiply_and_leave(self, inputs: Operand, product: RowProduct) -> Pending:
        """Multiply, then start the sum."""
        return self.parallel.leave(product.of(inputs))
