"""Attention by its definition."""

import math

import torch
from torch import Tensor

from megatron.core.ops.attention_interface import Gradients

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
Shape = tuple[int, int, int, int, int]
"""Batch, query heads, key-value heads, length, head size."""


def inputs(shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the gradient of the output, in fp64."""
    batch, heads, groups, length, size = shape
    generator = torch.Generator().manual_seed(seed)
    query, key, value, grad = (
        torch.randn(batch, number, length, size, dtype=torch.float64, generator=generator)
        for number in (heads, groups, groups, heads)
    )
    return query, key, value, grad


def definition(
    shape: Shape,
    starts: Tensor | None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    visible: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Output and gradients by autograd on the whole matrix of scores, of inputs that are rounded to ``dtype``;
    ``visible`` ``[b, query, key]`` replaces the mask of the documents that begin at ``starts``."""
    query, key, value, grad = (tensor.to(dtype).double() for tensor in inputs(shape, seed))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    repeats = shape[1] // shape[2]
    keys, values = (tensor.repeat_interleave(repeats, dim=1) for tensor in leaves[1:])
    mask = torch.ones(shape[3], shape[3], dtype=torch.bool).tril()
    if starts is not None:
        number = starts.long().cumsum(dim=1)
        mask = mask & (number[:, None, :, None] == number[:, None, None, :])
    if visible is not None:
        mask = visible[:, None]
    scores = (query @ keys.transpose(-1, -2) / math.sqrt(shape[4])).masked_fill(~mask, -math.inf)
    output = scores.softmax(dim=-1) @ values
    output.backward(grad)
    grads = [leaf.grad for leaf in leaves]
    assert grads[0] is not None and grads[1] is not None and grads[2] is not None
    return output.detach(), (grads[0], grads[1], grads[2])


def begins(shape: Shape, *places: int) -> Tensor:
    """Documents that begin at ``places`` in the first row, and one later in every further row."""
    starts = torch.zeros(shape[0], shape[3], dtype=torch.bool)
    for row in range(shape[0]):
        for place in places:
            starts[row, min(place + row, shape[3] - 1)] = True
    return starts


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Errors count relative to inputs, which are of the order of 1: differences of them may be much smaller."""
    assert found.shape == expected.shape
    error = (found.double() - expected).abs().max() / max(1.0, float(expected.abs().max()))
    assert error < TOLERANCE[dtype], f"off by {error:.1e}"
