"""Dtypes of weights and gradients."""

from dataclasses import dataclass

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class NumberFormats:
    weight: torch.dtype
    """Dtype of the model's weights and activations."""
    gradient: torch.dtype
    """Dtype in which main gradients are accumulated and reduced over ranks."""
    master: torch.dtype
    """Dtype of the master weights."""

    @classmethod
    def uniform(cls, dtype: torch.dtype) -> "NumberFormats":
        return cls(dtype, dtype, dtype)


def number_formats(precision: PrecisionConfig, optimizer: OptimizerConfig) -> NumberFormats:
    if precision.fp64:
        return NumberFormats.uniform(torch.float64)
    gradient = torch.bfloat16 if precision.grad_reduce_in_bf16 else DTYPES[optimizer.main_grads_dtype]
    return NumberFormats(weight=DTYPES[precision.name], gradient=gradient, master=torch.float32)
