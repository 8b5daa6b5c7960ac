"""Stands in for apex's extension: what we call of it, in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Output, and inverse RMS of every row."""
    assert input.is_contiguous() and tuple(normalized_shape) == (input.shape[-1],)
    rows = input.flatten(0, -2).float()
    inverse = torch.rsqrt(rows.square().mean(-1) + epsilon)
    return ((rows * inverse[:, None]).to(input.dtype) * weight).view(input.shape), inverse


def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    gamma: Tensor,
    epsilon: float,
    memory_efficient: bool,
) -> tuple[Tensor, Tensor]:
    """By autograd on the definition."""
    assert dout.is_contiguous() and not memory_efficient
    with torch.enable_grad():
        rows = input_or_output.flatten(0, -2).double().detach().requires_grad_()
        weight = gamma.double().detach().requires_grad_()
        # With the epsilon that the inverse RMS was made with.
        plus = 1 / invvar.double().square() - rows.detach().square().mean(-1)
        output = rows * torch.rsqrt(rows.square().mean(-1) + plus)[:, None] * weight
        grads = torch.autograd.grad(output, (rows, weight), dout.flatten(0, -2).double())
    return grads[0].view(dout.shape).to(dout.dtype), grads[1].to(gamma.dtype)
