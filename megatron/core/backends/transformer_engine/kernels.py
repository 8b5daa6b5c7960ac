"""Kernels of Transformer Engine that are used without its layers.

Read against the sources of version 2. Not run on a GPU so far.
"""

from torch import Tensor

from megatron.core.backends.apex import fused_adam, multi_tensor_norm
from megatron.core.device import load
from megatron.core.ops.norm import NormThenQuantization
from megatron.core.optimizer.kernels import AdamBuilder, SquaredNorm


class RMSNorm(NormThenQuantization):
    """Transformer Engine's fused RMSNorm; the inverse RMS is ``[tokens]``. The gain is rounded to the inputs' dtype,
    which its gradient has."""

    def __init__(self) -> None:
        # The package loads the extension's library, so it is imported first.
        self._formats = load("transformer_engine.pytorch.constants", "Transformer Engine").TE_DType
        self._kernels = load("transformer_engine_torch", "Transformer Engine")

    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        rows, gain = inputs.contiguous().flatten(0, -2), weight.to(inputs.dtype)
        no_output = no_quantizer = None
        sm_margin, zero_centered = 0, False
        output, _, inverse_rms = self._kernels.rmsnorm_fwd(
            rows, gain, epsilon, no_output, no_quantizer, self._formats[inputs.dtype], sm_margin, zero_centered
        )
        return output.view(inputs.shape), inverse_rms

    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows, grad_rows = (tensor.contiguous().flatten(0, -2) for tensor in (inputs, gradient))
        sm_margin, zero_centered = 0, False
        grad_inputs, grad_weight = self._kernels.rmsnorm_bwd(
            grad_rows, rows, inverse_rms, weight.to(inputs.dtype), sm_margin, zero_centered
        )
        return grad_inputs.view(inputs.shape), grad_weight


def squared_norm() -> SquaredNorm:
    kernels = load("transformer_engine.pytorch.optimizers", "Transformer Engine")
    return multi_tensor_norm(kernels.multi_tensor_applier, kernels.multi_tensor_l2norm)


def adam() -> AdamBuilder:
    return fused_adam(load("transformer_engine.pytorch.optimizers", "Transformer Engine").FusedAdam)
