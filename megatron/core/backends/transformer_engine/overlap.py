"""Collectives of tensor parallelism behind products, by Transformer Engine: through buffers that GPUs share, which it
calls userbuffers. What it takes for granted is checked in :mod:`megatron.config.run`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.precision import PrecisionConfig
from megatron.core.backends.transformer_engine.package import TransformerEngine, UnavailableError
from megatron.core.communication import Communicator


@contextmanager
def shared_buffers(
    engine: TransformerEngine, precision: PrecisionConfig, ranks: Communicator, rows: int, hidden_size: int
) -> Iterator[None]:
    """Inside, layers that tensor-parallel ``ranks`` divide can overlap; their whole activations are
    ``[rows, hidden_size]``. All ranks of the run enter together. Raises :class:`UnavailableError`."""
    try:
        engine.pytorch.initialize_ub(
            [rows, hidden_size],
            ranks.size,
            quantization_modes=_quantization_modes(engine, precision),
            dtype=torch.bfloat16,
            # By default it would prefer MPI's, which processes that torchrun has started do not have.
            bootstrap_backend=dist.get_backend(ranks.process_group),
        )
    # 2.9 asserts what newer versions raise.
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise UnavailableError(f"cannot share buffers between GPUs ({reason})") from error
    try:
        yield
    finally:
        engine.pytorch.destroy_ub()


def _quantization_modes(engine: TransformerEngine, precision: PrecisionConfig) -> list[Any]:
    """Of the buffers: those of FP8 layers, those of others, or both."""
    modes = engine.pytorch.UserBufferQuantizationMode
    if precision.fp8_format is None:
        return [modes.NONE]
    return [modes.FP8, modes.NONE] if precision.first_last_layers_bf16 else [modes.FP8]


def column_overlap(name: str) -> dict[str, Any]:
    """What the column-parallel layer ``name`` is told: gather while multiplying forward; backward gather the input
    behind the product of the input's gradient, and reduce that behind the product of the weight's."""
    return {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "ub_name": _buffer_of(name)}


def row_overlap(name: str) -> dict[str, Any]:
    """What the row-parallel layer ``name`` is told: reduce while multiplying forward, gather so backward."""
    return {"ub_overlap_rs": True, "ub_overlap_ag": True, "ub_name": _buffer_of(name)}


def _buffer_of(name: str) -> str:
    """Their name for the layer: qkv, proj, fc1 or fc2; all transformer layers have the same."""
    return name.rpartition(".linear_")[2]
