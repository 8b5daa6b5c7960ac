"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.gradient import deliver_gradient


def rms_norm_reference(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``inputs / rms(inputs) * weight`` over the last dim ``[..., h]``, computed in fp32 or wider."""
    wide = inputs.to(_compute_dtype(inputs))
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return normalised.to(inputs.dtype) * weight


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _RMSNorm(Function):
    """Keeps its input and one number per token; few passes over the activations."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        dtype = _compute_dtype(inputs)
        norm = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=dtype)
        inverse_rms = norm.square_().div_(inputs.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(inputs, inverse_rms)
        ctx.weight = weight
        return (inputs * inverse_rms).to(inputs.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        inputs, inverse_rms = ctx.saved_tensors
        weight: Tensor = ctx.weight
        gradient = gradients[0].to(inverse_rms.dtype)
        wide_weight = weight.to(inverse_rms.dtype)
        normalised = inputs * inverse_rms
        product = gradient * normalised
        grad_weight = product.flatten(0, -2).sum(dim=0)
        mean = (product @ wide_weight).div_(inputs.shape[-1]).unsqueeze(-1)
        grad_inputs = torch.mul(gradient, wide_weight, out=product)
        grad_inputs.addcmul_(normalised, mean, value=-1).mul_(inverse_rms)
        return grad_inputs.to(inputs.dtype), deliver_gradient(weight, grad_weight), None


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``inputs / rms(inputs) * weight`` over the last dim ``[..., h]``; statistics in fp32 or wider."""
    output: Tensor = _RMSNorm.apply(inputs, weight, epsilon)
    return output
