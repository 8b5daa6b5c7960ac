"""The implementations of the grouped GEMMs of experts in order of preference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.kernels.choice import Candidate
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm
from megatron.core.ops.matmul import WeightGradientKernel

if TYPE_CHECKING:
    from megatron.core.kernels.selection import Setting


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a layer on one rank."""

    count: int
    hidden_size: int
    width: int
    """``f / etp``."""


def grouped_gemm_candidates(
    setting: "Setting", weight_gradient: WeightGradientKernel
) -> Sequence[Candidate[GroupedGemm]]:
    return [Candidate("loop", lambda: LoopGroupedGemm(weight_gradient), "a GEMM for each expert")]
