"""Matrix products of linear layers.

On x86 CPUs torch multiplies fp32 matrices with MKL, which does not use the wide vectors of every processor;
oneDNN does (measured: 2.3 times as fast on a Zen 5 core, see ``docs/performance.md``). torch exposes oneDNN's
fp32 product as the operator that its compiler uses; where it is missing, the ordinary product serves.

fp16 matrices CPUs multiply in fp32, and round the result: what GPUs do, too, where torch's own product for CPUs takes
7 to 30 times as long (measured on a Zen 5 core, which has no arithmetic in fp16).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


def _onednn_linear() -> Callable[..., Any] | None:
    if not torch.backends.mkldnn.is_available():
        return None
    operators = torch.ops.mkldnn
    return operators._linear_pointwise if hasattr(operators, "_linear_pointwise") else None


_ONEDNN_LINEAR = _onednn_linear()


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
        output: Tensor = _ONEDNN_LINEAR(inputs, weight, None, "none", [], "")
        return output
    return F.linear(inputs, weight)


def weight_gradient(grad_outputs: Tensor, inputs: Tensor) -> Tensor:
    """``grad_outputs [..., n]^T @ inputs [..., k]``, summed over all other dims: ``[n, k]``, maybe a view."""
    if _is_widened(inputs):
        return weight_gradient(grad_outputs.float(), inputs.float()).half()
    grad_outputs, inputs = grad_outputs.flatten(0, -2), inputs.flatten(0, -2)
    if not _uses_onednn(inputs):
        return grad_outputs.t() @ inputs
    # oneDNN copies its first operand when it is transposed, so that should be the smaller one.
    if inputs.shape[1] < grad_outputs.shape[1]:
        return linear(inputs.t(), grad_outputs.t()).t()
    return linear(grad_outputs.t(), inputs.t())


@dataclass(frozen=True)
class Operand:
    """A tensor in the form in which products take it."""

    data: Tensor
    inverse_scale: Tensor | None = None
    """What ``data`` is to be multiplied by, a number in fp32, where it is scaled (:mod:`megatron.core.ops.fp8`)."""


class LinearProducts(Protocol):
    """The three products of a linear layer with ``weight`` ``[n, k]``, and the form in which they take its input
    ``[..., k]`` and the gradient of its output ``[..., n]``."""

    is_plain: bool
    """Whether operands are the tensors themselves, in the format of the weight."""

    def prepare_input(self, inputs: Tensor) -> Operand:
        """The layer's input, or a part of it, as an operand, which is also what backward keeps."""

    def prepare_gradient(self, grad_outputs: Tensor) -> Operand:
        """The gradient of the layer's output, or a part of it, as an operand."""

    def output(self, inputs: Operand, weight: Tensor) -> Tensor:
        """``inputs @ weight^T``, ``[..., n]``."""

    def input_gradient(self, grad_outputs: Operand, weight: Tensor) -> Tensor:
        """``grad_outputs @ weight``, ``[..., k]``."""

    def weight_gradient(self, grad_outputs: Operand, inputs: Operand) -> Tensor:
        """``grad_outputs^T @ inputs``, ``[n, k]``; may be wider than the weight."""


@dataclass(frozen=True)
class RowProduct:
    """A product whose rows need not be multiplied together: ``[..., k] -> [..., n]``."""

    of: Callable[[Operand], Tensor]
    """The product of some of the rows."""
    matrix: Tensor | None
    """``[k, n]``, by which ``of`` multiplies tensors as they are; None where operands are scaled."""


def output_product(products: LinearProducts, weight: Tensor) -> RowProduct:
    """The layer's output, from its input."""
    return RowProduct(lambda inputs: products.output(inputs, weight), weight.t() if products.is_plain else None)


def input_gradient_product(products: LinearProducts, weight: Tensor) -> RowProduct:
    """The gradient of the layer's input, from that of its output."""
    return RowProduct(lambda grads: products.input_gradient(grads, weight), weight if products.is_plain else None)


class PlainProducts:
    """Products of tensors as they are."""

    is_plain = True

    def prepare_input(self, inputs: Tensor) -> Operand:
        """``inputs`` themselves."""
        return Operand(inputs)

    def prepare_gradient(self, grad_outputs: Tensor) -> Operand:
        """``grad_outputs`` themselves."""
        return Operand(grad_outputs)

    def output(self, inputs: Operand, weight: Tensor) -> Tensor:
        """``inputs @ weight^T``."""
        return linear(inputs.data, weight)

    def input_gradient(self, grad_outputs: Operand, weight: Tensor) -> Tensor:
        """``grad_outputs @ weight``."""
        return linear(grad_outputs.data, weight.t())

    def weight_gradient(self, grad_outputs: Operand, inputs: Operand) -> Tensor:
        """``grad_outputs^T @ inputs``."""
        return weight_gradient(grad_outputs.data, inputs.data)
