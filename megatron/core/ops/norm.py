"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467).

The gain is the weight, or one plus the weight (``is_zero_centered``).
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.device import Compiler, inductor
from megatron.core.gradient import accumulate_main_grad
from megatron.core.ops.fp8 import DelayedQuantization
from megatron.core.precision import QuantizedActivation, QuantizedTensor


class RMSNormKernel(Protocol):
    """The two passes of RMSNorm over the last dim, ``h``; autograd saves the inputs and the inverse RMS.

    ``weight`` ``[h]`` is the gain, whose dtype may be wider than the inputs'.
    """

    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """The output ``[..., h]`` in the inputs' dtype, and the inverse RMS of every token in any shape that
        ``backward`` accepts."""

    def quantized(
        self, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        """The output, quantised, and the inverse RMS."""

    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the inputs ``[..., h]`` and of the weight ``[h]``, which may have a wider dtype. Must not change
        its arguments."""


def normalise(inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``inputs / rms(inputs) * weight`` with statistics in fp32 or wider, and the inverse RMS ``[..., 1]``."""
    wide = inputs.to(_compute_dtype(inputs))
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return ((wide * inverse_rms).to(inputs.dtype) * weight).to(inputs.dtype), inverse_rms


def normalise_backward(gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of :func:`normalise`; the weight's gradient is in fp32 or wider."""
    gradient, wide_weight = gradient.to(inverse_rms.dtype), weight.to(inverse_rms.dtype)
    normalised = inputs * inverse_rms
    scaled = gradient * wide_weight
    # With y = x / rms(x) and dy: dx = (dy - y mean(dy y)) / rms(x), because rms(x) depends on every x.
    mean = (scaled * normalised).mean(dim=-1, keepdim=True)
    grad_inputs = (scaled - normalised * mean) * inverse_rms
    return grad_inputs.to(inputs.dtype), (gradient * normalised).flatten(0, -2).sum(dim=0)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class NormThenQuantization:
    """:meth:`RMSNormKernel.quantized` of kernels that write the output, which another kernel quantises."""

    def quantized(
        self: RMSNormKernel, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        output, inverse_rms = self.forward(inputs, weight, epsilon)
        return quantization.quantize(output), inverse_rms


class EagerRMSNorm(NormThenQuantization):
    """Few passes over the activations, in place where possible."""

    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=_compute_dtype(inputs))
        inverse_rms = norm.square_().div_(inputs.shape[-1]).add_(epsilon).rsqrt_()
        return (inputs * inverse_rms).to(inputs.dtype).mul_(weight), inverse_rms

    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        gradient, wide_weight = gradient.to(inverse_rms.dtype), weight.to(inverse_rms.dtype)
        normalised = inputs * inverse_rms  # [..., h]
        product = gradient * normalised
        grad_weight = product.flatten(0, -2).sum(dim=0)  # [h]
        mean = (product @ wide_weight).div_(inputs.shape[-1]).unsqueeze(-1)
        grad_inputs = torch.mul(gradient, wide_weight, out=product)
        grad_inputs.addcmul_(normalised, mean, value=-1).mul_(inverse_rms)
        return grad_inputs.to(inputs.dtype), grad_weight


class CompiledRMSNorm(NormThenQuantization):
    def __init__(self, compiler: Compiler = inductor) -> None:
        self._compiler = compiler
        self.forward = compiler(normalise)
        self.backward = compiler(normalise_backward)


class _RMSNorm(Function):
    """Saves its input and one number per token."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        epsilon: float,
        kernel: RMSNormKernel,
        is_zero_centered: bool,
        quantization: DelayedQuantization | None,
    ) -> tuple[Tensor, QuantizedTensor | None]:
        # The sum is wider than a bf16 weight: rounded to bf16 it would lose the bits that the small weight has.
        gain = weight.to(_compute_dtype(weight)) + 1.0 if is_zero_centered else weight  # [h]
        quantized = None
        if quantization is None:
            output, inverse_rms = kernel.forward(inputs.detach(), gain.detach(), epsilon)
        else:
            quantized, inverse_rms = kernel.quantized(inputs.detach(), gain.detach(), epsilon, quantization)
            # Autograd's edge to the linear layer, which receives its gradient: one element that is expanded.
            output = inputs.new_empty(()).expand(inputs.shape)
        ctx.save_for_backward(inputs, inverse_rms)
        ctx.weight, ctx.gain, ctx.kernel = weight, gain, kernel
        return output, quantized

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        inputs, inverse_rms = ctx.saved_tensors
        kernel: RMSNormKernel = ctx.kernel
        # The gradient of the gain is the gradient of the weight, in both forms.
        grad_inputs, grad_gain = kernel.backward(gradients[0], inputs.detach(), inverse_rms, ctx.gain.detach())
        return grad_inputs, accumulate_main_grad(ctx.weight, grad_gain), None, None, None, None


def rms_norm(
    inputs: Tensor,
    weight: Tensor,
    epsilon: float,
    kernel: RMSNormKernel,
    is_zero_centered: bool = False,
    quantization: DelayedQuantization | None = None,
) -> Tensor | QuantizedActivation:
    """RMSNorm over the last dim ``[..., h]``; statistics, and a gain ``1 + weight``, in fp32 or wider. With a
    ``quantization`` the output is quantised at once for the linear layer after it."""
    output, quantized = _RMSNorm.apply(inputs, weight, epsilon, kernel, is_zero_centered, quantization)
    return output if quantized is None else QuantizedActivation(output, quantized)
