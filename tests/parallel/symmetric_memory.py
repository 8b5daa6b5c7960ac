"""PyTorch's operators of asynchronous tensor parallelism on CPUs: what they compute, by ordinary collectives."""

from functools import cache

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from megatron.core.communication import Communicator
from megatron.core.tensor_parallel.collectives import SymmetricMemoryOverlap


@cache
def _operators() -> torch.library.Library:
    """Lets this process call the operators with tensors of the CPU; torch itself has them for GPUs."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback)
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback)
    return library


def symmetric_memory_overlap_on_cpu(ranks: Communicator) -> SymmetricMemoryOverlap:
    """The overlap by symmetric memory, for a test of how it is called."""
    _operators()
    return SymmetricMemoryOverlap(ranks)
