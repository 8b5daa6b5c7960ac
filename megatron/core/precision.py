"""Number formats of weights and gradients."""

import torch

from megatron.config.optimizer import PrecisionConfig


def weight_dtype(config: PrecisionConfig) -> torch.dtype:
    """Format in which the model computes."""
    if config.fp64:
        return torch.float64
    return torch.bfloat16 if config.bf16 else torch.float32


def gradient_dtype(config: PrecisionConfig) -> torch.dtype:
    """Format in which gradients are accumulated and reduced, and of master weights and moments."""
    return torch.float64 if config.fp64 else torch.float32
