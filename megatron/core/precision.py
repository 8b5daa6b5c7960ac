"""Number formats of weights and gradients."""

from dataclasses import dataclass

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Formats by the names that flags give them."""


@dataclass(frozen=True)
class NumberFormats:
    """Which numbers are kept, computed and sent in which format."""

    weight: torch.dtype
    """In which the model computes."""
    gradient: torch.dtype
    """In which gradients are accumulated."""
    reduction: torch.dtype
    """In which gradients are sent and added up over ranks."""
    master: torch.dtype
    """Of the weights that the optimizer updates."""

    @classmethod
    def uniform(cls, dtype: torch.dtype) -> "NumberFormats":
        """One format for all."""
        return cls(dtype, dtype, dtype, dtype)


def number_formats(precision: PrecisionConfig, optimizer: OptimizerConfig) -> NumberFormats:
    """The formats of the flags."""
    if precision.fp64:
        return NumberFormats.uniform(torch.float64)
    gradient = DTYPES[optimizer.main_grads_dtype]
    return NumberFormats(
        weight=DTYPES[precision.name],
        gradient=gradient,
        reduction=torch.bfloat16 if precision.grad_reduce_in_bf16 else gradient,
        master=torch.float32,
    )
