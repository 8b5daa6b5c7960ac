"""SwiGLU (Shazeer, arXiv 2002.05202): ``silu(gate) * up``."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megatron.core.device import Compiler, inductor
from megatron.core.ops.fp8 import DelayedQuantization
from megatron.core.precision import QuantizedActivation, QuantizedTensor


class SwiGLUKernel(Protocol):
    """The two passes of SwiGLU on ``[..., 2f] = [gate, up]``; neither may change its arguments."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """``silu(gate) * up``, ``[..., f]``."""

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        """The output, quantised."""

    def backward(self, gradient: Tensor, gate_and_up: Tensor) -> Tensor:
        """The gradient of the inputs, ``[..., 2f]``."""


def swiglu_reference(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(gradient: Tensor, gate_and_up: Tensor) -> Tensor:
    """The derivative of :func:`swiglu_reference`, computed in fp32 or wider."""
    wide = torch.promote_types(gate_and_up.dtype, torch.float32)
    gate, up = gate_and_up.to(wide).chunk(2, dim=-1)
    gradient, sigmoid = gradient.to(wide), torch.sigmoid(gate)
    activated = gate * sigmoid
    # silu'(g) = s(g) + g s(g) (1 - s(g))
    grad_gate = gradient * up * (sigmoid + activated * (1 - sigmoid))
    return torch.cat((grad_gate, gradient * activated), dim=-1).to(gate_and_up.dtype)


class SwiGLUThenQuantization:
    """:meth:`SwiGLUKernel.quantized` of kernels that write the output, which another kernel quantises."""

    def quantized(self: SwiGLUKernel, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        return quantization.quantize(self.forward(gate_and_up))


class EagerSwiGLU(SwiGLUThenQuantization):
    """Few passes, in place where possible."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def backward(self, gradient: Tensor, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad_input = torch.empty_like(gate_and_up)
        grad_gate, grad_up = grad_input.chunk(2, dim=-1)
        activated = F.silu(gate)
        # Three passes write into the halves of one tensor; ``activated`` is used as memory for gradient * up.
        torch.mul(gradient, activated, out=grad_up)
        torch.mul(gradient, up, out=activated)
        torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=grad_gate)
        return grad_input


class CompiledSwiGLU(SwiGLUThenQuantization):
    def __init__(self, compiler: Compiler = inductor) -> None:
        self._compiler = compiler
        self.forward = compiler(swiglu_reference)
        self.backward = compiler(swiglu_backward)


class _SwiGLU(Function):
    """Saves its input only; backward computes the activation again."""

    @staticmethod
    def forward(
        ctx: Any, gate_and_up: Tensor, kernel: SwiGLUKernel, quantization: DelayedQuantization | None
    ) -> tuple[Tensor, QuantizedTensor | None]:
        ctx.save_for_backward(gate_and_up)
        ctx.kernel = kernel
        if quantization is None:
            return kernel.forward(gate_and_up.detach()), None
        # Autograd's edge to the linear layer, without memory for the output.
        edge = gate_and_up.new_empty(()).expand(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2)
        return edge, kernel.quantized(gate_and_up.detach(), quantization)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (gate_and_up,) = ctx.saved_tensors
        kernel: SwiGLUKernel = ctx.kernel
        return kernel.backward(gradients[0], gate_and_up.detach()), None, None


def swiglu(
    gate_and_up: Tensor, kernel: SwiGLUKernel, quantization: DelayedQuantization | None = None
) -> Tensor | QuantizedActivation:
    """``silu(gate) * up`` with ``[..., 2f] = [gate, up] -> [..., f]``. With a ``quantization`` the output is quantised
    at once for the linear layer after it."""
    output, quantized = _SwiGLU.apply(gate_and_up, kernel, quantization)
    return output if quantized is None else QuantizedActivation(output, quantized)
