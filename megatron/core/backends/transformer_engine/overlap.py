"""Tensor-parallel overlap by Transformer Engine's user buffers. Its requirements are checked in
:mod:`megatron.config.run`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.precision import PrecisionConfig
from megatron.core.backends.transformer_engine import TransformerEngine, UnavailableError
from megatron.core.communication import Communicator


@contextmanager
def shared_buffers(
    engine: TransformerEngine, precision: PrecisionConfig, ranks: Communicator, rows: int, hidden_size: int
) -> Iterator[None]:
    """Allocate the user buffers of ``ranks`` for activations ``[rows, hidden_size]``. Collective over all ranks of the
    run. Raises :class:`UnavailableError`."""
    modes = engine.pytorch.UserBufferQuantizationMode
    used = [modes.NONE] if precision.fp8_format is None else [modes.FP8]
    if precision.fp8_format is not None and precision.first_last_layers_bf16:
        used.append(modes.NONE)
    try:
        engine.pytorch.initialize_ub(
            [rows, hidden_size],
            ranks.size,
            quantization_modes=used,
            dtype=torch.bfloat16,
            # The default prefers MPI, which is not available under torchrun.
            bootstrap_backend=dist.get_backend(ranks.process_group),
        )
    # 2.9 asserts where newer versions raise.
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise UnavailableError(f"cannot share buffers between GPUs ({reason})") from error
    try:
        yield
    finally:
        engine.pytorch.destroy_ub()


def column_overlap(name: str) -> dict[str, Any]:
    """Arguments of the column-parallel layer ``name``: overlap the all-gather with the forward GEMM, the all-gather of
    the input with the dgrad GEMM, and the reduce-scatter with the wgrad GEMM."""
    return {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "ub_name": _buffer_of(name)}


def row_overlap(name: str) -> dict[str, Any]:
    """Arguments of the row-parallel layer ``name``: overlap the reduce-scatter forward, the all-gather backward."""
    return {"ub_overlap_rs": True, "ub_overlap_ag": True, "ub_name": _buffer_of(name)}


def _buffer_of(name: str) -> str:
    """The buffer's name: qkv, proj, fc1 or fc2; all transformer layers share it."""
    return name.rpartition(".linear_")[2]
