"""Kernels of apex, and the interface of its multi-tensor kernels, which Transformer Engine has taken over.

Read against its sources (master of 2025; the package of that name on PyPI is another). Not run on a GPU so far.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import load
from megatron.core.ops.norm import NormThenQuantization
from megatron.core.optimizer import AdamBuilder, SquaredNorm


class RMSNorm(NormThenQuantization):
    """apex's fused RMSNorm; the inverse RMS is ``[tokens]``. The gain is rounded to the inputs' dtype, which its
    gradient has."""

    def __init__(self) -> None:
        self._kernels = load("fused_layer_norm_cuda", "apex")

    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        gain = weight.to(inputs.dtype)
        output, inverse_rms = self._kernels.rms_forward_affine(inputs.contiguous(), gain.shape, gain, epsilon)
        return output, inverse_rms

    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        is_memory_efficient = False  # True would require the output instead of the inputs.
        grads: tuple[Tensor, Tensor] = self._kernels.rms_backward_affine(
            gradient.contiguous(),
            inverse_rms,
            inputs.contiguous(),
            weight.shape,
            weight.to(inputs.dtype),
            1e-5,  # epsilon, unused unless memory efficient
            is_memory_efficient,
        )
        return grads


class WeightGradient:
    """apex's GEMM, which accumulates in an fp32 buffer."""

    def __init__(self) -> None:
        self._kernels = load("fused_weight_gradient_mlp_cuda", "apex")

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        if not accumulate:
            buffer.zero_()
        rows, grad_rows = (tensor.contiguous().flatten(0, -2) for tensor in (inputs, grad_outputs))
        self._kernels.wgrad_gemm_accum_fp32(rows, grad_rows, buffer)


def squared_norm() -> SquaredNorm:
    kernel = load("amp_C", "apex").multi_tensor_l2norm
    return multi_tensor_norm(load("apex.multi_tensor_apply", "apex").multi_tensor_applier, kernel)


def adam() -> AdamBuilder:
    load("amp_C", "apex")
    return fused_adam(load("apex.optimizers", "apex").FusedAdam)


def multi_tensor_norm(apply: Callable[..., Any], kernel: Callable[..., Any]) -> SquaredNorm:
    """The squared norm by the package's ``multi_tensor_l2norm`` kernel."""

    def squared_norm(tensors: list[Tensor]) -> Tensor:
        overflow, per_tensor = torch.zeros(1, dtype=torch.int32, device=tensors[0].device), False
        norm: Tensor = apply(kernel, overflow, [tensors], per_tensor)[0]
        return norm.double().square().sum()

    return squared_norm


def fused_adam(make: Callable[..., torch.optim.Optimizer]) -> AdamBuilder:
    """An AdamW by the package's ``FusedAdam``, whose groups count steps; torch and our checkpoints store the step with
    each weight, on the host."""

    def set_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            steps = [optimizer.state[weight]["step"] for weight in group["params"] if weight in optimizer.state]
            group["step"] = int(steps[0]) if steps else 0

    def increment_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] += 1

    def build(groups: Sequence[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> torch.optim.Optimizer:
        optimizer = make(list(groups), lr=0.0, betas=betas, eps=epsilon, bias_correction=True, adam_w_mode=True)
        optimizer.register_step_pre_hook(set_step)
        optimizer.register_step_post_hook(increment_step)
        return optimizer

    return build
