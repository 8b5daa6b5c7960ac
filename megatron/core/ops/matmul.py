"""GEMMs of linear layers.

On x86 CPUs torch multiplies fp32 matrices with MKL, which does not use the wide vectors of every processor; oneDNN does
(measured: 2.3 times as fast on a Zen 5 core, see ``docs/performance_cpu.md``). torch exposes oneDNN's fp32 GEMM as the
operator that its compiler uses.

On CPUs fp16 matrices are multiplied in fp32 and the result is rounded, as on GPUs; torch's own fp16 GEMM for CPUs takes
7 to 30 times as long (measured on a Zen 5 core, which has no fp16 arithmetic).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.gradient import Gradient, add_or_overwrite
from megatron.core.ops.fp8 import DelayedQuantization, Fp8Role
from megatron.core.precision import Layout, QuantizedTensor
from megatron.torch_compat import onednn_linear

_ONEDNN_LINEAR = onednn_linear()


def _uses_onednn(tensor: Tensor) -> bool:
    return _ONEDNN_LINEAR is not None and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_widened(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """``inputs [..., k] @ weight [n, k]^T``; either may be a transposed view."""
    if _is_widened(inputs):
        return linear(inputs.float(), weight.float()).half()
    if _uses_onednn(inputs):
        assert _ONEDNN_LINEAR is not None
        return _ONEDNN_LINEAR(inputs, weight, None, "none", [], "")
    return F.linear(inputs, weight)


def write_linear(output: Tensor, inputs: Tensor, weight: Tensor) -> None:
    """:func:`linear` of ``inputs [m, k]`` into ``output [m, n]``."""
    if not inputs.shape[0]:
        return
    if _is_widened(inputs) or _uses_onednn(inputs):
        # These GEMMs write new tensors only.
        output.copy_(linear(inputs, weight))
    else:
        torch.mm(inputs, weight.t(), out=output)


def weight_gradient(grad_outputs: Tensor, inputs: Tensor) -> Tensor:
    """``grad_outputs [..., n]^T @ inputs [..., k]``, summed over all other dims: ``[n, k]``, possibly a view."""
    if _is_widened(inputs):
        return weight_gradient(grad_outputs.float(), inputs.float()).half()
    grad_outputs, inputs = grad_outputs.flatten(0, -2), inputs.flatten(0, -2)  # [m, n], [m, k]
    if not _uses_onednn(inputs):
        return grad_outputs.t() @ inputs
    # oneDNN copies a transposed first operand, so the smaller one comes first.
    if inputs.shape[1] < grad_outputs.shape[1]:
        return linear(inputs.t(), grad_outputs.t()).t()
    return linear(grad_outputs.t(), inputs.t())


class WeightGradientKernel(Protocol):
    """The weight-gradient GEMM into a buffer ``[n, k]``, whose dtype may be wider than the operands' dtype."""

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        """Add ``grad_outputs [..., n]^T @ inputs [..., k]`` to ``buffer``, or overwrite it."""


class SeparateWeightGradient:
    """A GEMM in the operands' dtype, then a sum: one more pass, and memory for the product."""

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        add_or_overwrite(buffer, weight_gradient(grad_outputs, inputs), accumulate)


class InPlaceWeightGradient:
    """The GEMM accumulates in the buffer, without rounding to the operands' dtype. A buffer wider than the operands
    must be fp32 on a GPU."""

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        left, right = grad_outputs.flatten(0, -2).t(), inputs.flatten(0, -2)
        # beta 0 overwrites, also a NaN.
        if buffer.dtype == inputs.dtype:
            buffer.addmm_(left, right, beta=float(accumulate))
        elif accumulate:
            torch.ops.aten.addmm.dtype_out(buffer, left, right, buffer.dtype, out=buffer)
        else:
            torch.ops.aten.mm.dtype_out(left, right, buffer.dtype, out=buffer)


@dataclass(frozen=True)
class WeightGradientProduct:
    """A :class:`~megatron.core.gradient.GradientProduct` by ``kernel``."""

    grad_outputs: Tensor
    inputs: Tensor
    kernel: WeightGradientKernel

    def value(self) -> Tensor:
        return weight_gradient(self.grad_outputs, self.inputs)

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        self.kernel.write(buffer, self.grad_outputs, self.inputs, accumulate)


class Gemm(Protocol):
    """The three GEMMs of a linear layer ``y = x W^T`` with ``W`` ``[n, k]``, and the dtype of their operands."""

    is_plain: bool
    """Whether the operands are not quantised."""

    def quantize(self, role: Fp8Role, tensor: Tensor, layout: Layout) -> QuantizedTensor:
        """``x`` ``[..., k]`` or ``dy`` ``[..., n]``, or this rank's rows of it. A GEMM that does not quantise ignores
        ``layout``."""

    def input_quantization(self, layout: Layout) -> DelayedQuantization | None:
        """:meth:`quantize` of ``x`` for the operation before the layer; None if the scale follows from the input, or
        there is none."""

    def output(self, inputs: QuantizedTensor, weight: Tensor) -> Tensor:
        """``x W^T`` ``[..., n]``; rows are independent."""

    def input_gradient(self, grad_outputs: QuantizedTensor, weight: Tensor) -> Tensor:
        """``dy W`` ``[..., k]``; rows are independent."""

    def weight_gradient(self, grad_outputs: QuantizedTensor, inputs: QuantizedTensor) -> Gradient:
        """``dy^T x`` ``[n, k]`` of the whole or the kept operands (:attr:`QuantizedTensor.kept`), possibly not
        multiplied yet; its dtype may be wider than the weight's."""


class PlainGemm:
    """GEMMs of unquantised tensors."""

    is_plain = True

    def __init__(self, kernel: WeightGradientKernel | None = None) -> None:
        self._kernel = kernel or SeparateWeightGradient()

    def quantize(self, role: Fp8Role, tensor: Tensor, layout: Layout) -> QuantizedTensor:
        return QuantizedTensor(tensor)

    def input_quantization(self, layout: Layout) -> None:
        """The input is not quantised."""

    def output(self, inputs: QuantizedTensor, weight: Tensor) -> Tensor:
        return linear(inputs.data, weight)

    def input_gradient(self, grad_outputs: QuantizedTensor, weight: Tensor) -> Tensor:
        return linear(grad_outputs.data, weight.t())

    def weight_gradient(self, grad_outputs: QuantizedTensor, inputs: QuantizedTensor) -> Gradient:
        return WeightGradientProduct(grad_outputs.data, inputs.data, self._kernel)
