"""The optimizer's kernels; optional packages provide others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SquaredNorm = Callable[[list[Tensor]], Tensor]
"""The sum of the squares of all elements of tensors of one dtype (at least one tensor), in fp64."""

AdamBuilder = Callable[[Sequence[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""An AdamW of parameter groups, with betas and epsilon."""


def torch_squared_norm(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)).double().square().sum()


def torch_adam(groups: Sequence[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(groups), lr=0.0, betas=betas, eps=epsilon, fused=True)


@dataclass(frozen=True)
class OptimizerKernels:
    adam: AdamBuilder = torch_adam
    squared_norm: SquaredNorm = torch_squared_norm
