"""The optimizer's kernels; optional packages provide others."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.torch_compat import construct_optimizers_without_compiler

SquaredNorm = Callable[[list[Tensor]], Tensor]
"""The sum of the squares of all elements of tensors of one dtype (at least one tensor), in fp64."""

AdamBuilder = Callable[[Sequence[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""An AdamW of parameter groups, with betas and epsilon."""


_ROW = 4096


def torch_squared_norm(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    rest, of_rows = tensors, []
    if tensors[0].device.type == "cpu":
        # There torch adds the elements of a tensor one after the other: in fp32 the norm of 2^28 elements is 4 % too
        # small, and depends on the shards. So of larger tensors only rows are added in fp32. GPUs add in a tree.
        rest = []
        for tensor in tensors:
            rows = tensor.numel() // _ROW if tensor.numel() >= 16 * _ROW else 0
            if rows:
                table = tensor.view(-1)[: rows * _ROW].view(rows, _ROW)
                of_rows.append(torch.linalg.vector_norm(table, dim=1, dtype=wide).double().square().sum())
            rest.append(tensor.view(-1)[rows * _ROW :])
    total = torch.stack(torch._foreach_norm(rest, 2, dtype=wide)).double().square().sum()
    return total + torch.stack(of_rows).sum() if of_rows else total


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose own ``step`` imports torch's compiler, for most of a second, to exclude itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


def torch_adam(groups: Sequence[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> torch.optim.Optimizer:
    construct_optimizers_without_compiler()
    return AdamW(list(groups), lr=0.0, betas=betas, eps=epsilon, fused=True)


@dataclass(frozen=True)
class OptimizerKernels:
    adam: AdamBuilder = torch_adam
    squared_norm: SquaredNorm = torch_squared_norm
