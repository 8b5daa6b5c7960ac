"""SwiGLU (Shazeer, arXiv 2002.05202): ``silu(gate) * up``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def swiglu_reference(gate_and_up: Tensor) -> Tensor:
    """``silu(gate) * up`` with ``[..., 2f] = [gate, up] -> [..., f]``."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(Function):
    """Keeps its input only, and computes the activation again in backward."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad_input = torch.empty_like(gate_and_up)
        grad_gate, grad_up = grad_input.chunk(2, dim=-1)
        activated = F.silu(gate)
        torch.mul(gradients[0], activated, out=grad_up)
        torch.mul(gradients[0], up, out=activated)
        torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=grad_gate)
        return grad_input


def swiglu(gate_and_up: Tensor) -> Tensor:
    """``silu(gate) * up`` with ``[..., 2f] = [gate, up] -> [..., f]``."""
    output: Tensor = _SwiGLU.apply(gate_and_up)
    return output
