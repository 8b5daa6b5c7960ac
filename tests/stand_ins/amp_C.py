"""Stands in for apex's extension: what we call of it, in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors, ``[1]`` in fp32."""
    assert noop_flag.dtype == torch.int32 and noop_flag.shape == (1,) and not per_tensor
    total = sum(tensor.double().square().sum() for tensor in tensor_lists[0])
    return torch.as_tensor(total).sqrt().float().view(1), torch.empty(0)
