"""Kernels of apex, Transformer Engine and FlashAttention 3, behind the interfaces of ours.

Read against the sources of apex (master of 2025; the package of that name on PyPI is another), Transformer Engine 2.x
and flash-attention's ``hopper`` directory (interface of late 2025). Unmeasured by us so far.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.choice import Unavailable
from megatron.core.ops.attention_kernels import Gradients, PartialAttention

SquaredNorm = Callable[[list[Tensor]], Tensor]
"""The sum of the squares of all elements of tensors of one format, a number in fp64; there is one tensor at least."""

AdamBuilder = Callable[[Sequence[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]
"""An AdamW of parameter groups, with betas and epsilon."""


def load(module: str, package: str) -> Any:
    """The ``module`` of ``package``; raises :class:`Unavailable`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise Unavailable(f"{package} is not installed (no module {module})") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"{package} is installed but cannot be imported ({error})") from error


class ApexRMSNorm:
    """apex's fused RMSNorm; the gradient of the weight has the weight's format."""

    def __init__(self) -> None:
        self._kernels = load("fused_layer_norm_cuda", "apex")

    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Output, and inverse RMS ``[tokens]``."""
        output, inverse_rms = self._kernels.rms_forward_affine(inputs.contiguous(), weight.shape, weight, epsilon)
        return output, inverse_rms

    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of inputs and weight."""
        is_memory_efficient = False  # What is passed are the inputs, not the output.
        grads: tuple[Tensor, Tensor] = self._kernels.rms_backward_affine(
            gradient.contiguous(),
            inverse_rms,
            inputs.contiguous(),
            weight.shape,
            weight,
            1e-5,  # Epsilon, which only the memory-efficient way reads.
            is_memory_efficient,
        )
        return grads


class TransformerEngineRMSNorm:
    """Transformer Engine's fused RMSNorm; the gradient of the weight has the weight's format."""

    def __init__(self) -> None:
        # The package first: it is what loads the library of the extension.
        self._formats = load("transformer_engine.pytorch.constants", "Transformer Engine").TE_DType
        self._kernels = load("transformer_engine_torch", "Transformer Engine")

    def forward(self, inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Output, and inverse RMS ``[tokens]``."""
        rows = inputs.contiguous().flatten(0, -2)
        no_output = no_quantizer = None
        sm_margin, zero_centered = 0, False
        output, _, inverse_rms = self._kernels.rmsnorm_fwd(
            rows, weight, epsilon, no_output, no_quantizer, self._formats[inputs.dtype], sm_margin, zero_centered
        )
        return output.view(inputs.shape), inverse_rms

    def backward(self, gradient: Tensor, inputs: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of inputs and weight."""
        rows, grad_rows = (tensor.contiguous().flatten(0, -2) for tensor in (inputs, gradient))
        sm_margin, zero_centered = 0, False
        grad_inputs, grad_weight = self._kernels.rmsnorm_bwd(
            grad_rows, rows, inverse_rms, weight, sm_margin, zero_centered
        )
        return grad_inputs.view(inputs.shape), grad_weight


class ApexWeightGradient:
    """apex's product that adds to an fp32 buffer."""

    def __init__(self) -> None:
        self._kernels = load("fused_weight_gradient_mlp_cuda", "apex")

    def write(self, buffer: Tensor, grad_outputs: Tensor, inputs: Tensor, accumulate: bool) -> None:
        """It can only add."""
        if not accumulate:
            buffer.zero_()
        rows, grad_rows = (tensor.contiguous().flatten(0, -2) for tensor in (inputs, grad_outputs))
        self._kernels.wgrad_gemm_accum_fp32(rows, grad_rows, buffer)


def torch_squared_norm(tensors: list[Tensor]) -> Tensor:
    """By torch's multi-tensor kernels."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)).double().square().sum()


def apex_squared_norm() -> SquaredNorm:
    """By apex's multi-tensor kernel."""
    kernel = load("amp_C", "apex").multi_tensor_l2norm
    return _multi_tensor_norm(load("apex.multi_tensor_apply", "apex").multi_tensor_applier, kernel)


def transformer_engine_squared_norm() -> SquaredNorm:
    """By Transformer Engine's multi-tensor kernel."""
    kernels = load("transformer_engine.pytorch.optimizers", "Transformer Engine")
    return _multi_tensor_norm(kernels.multi_tensor_applier, kernels.multi_tensor_l2norm)


def _multi_tensor_norm(apply: Callable[..., Any], kernel: Callable[..., Any]) -> SquaredNorm:
    def squared_norm(tensors: list[Tensor]) -> Tensor:
        overflow, per_tensor = torch.zeros(1, dtype=torch.int32, device=tensors[0].device), False
        norm: Tensor = apply(kernel, overflow, [tensors], per_tensor)[0]
        return norm.double().square().sum()

    return squared_norm


def torch_adam(groups: Sequence[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> torch.optim.Optimizer:
    """torch's fused AdamW."""
    return torch.optim.AdamW(list(groups), lr=0.0, betas=betas, eps=epsilon, fused=True)


def apex_adam() -> AdamBuilder:
    """apex's FusedAdam."""
    load("amp_C", "apex")
    return _fused_adam(load("apex.optimizers", "apex").FusedAdam)


def transformer_engine_adam() -> AdamBuilder:
    """Transformer Engine's FusedAdam."""
    return _fused_adam(load("transformer_engine.pytorch.optimizers", "Transformer Engine").FusedAdam)


def _fused_adam(make: Callable[..., torch.optim.Optimizer]) -> AdamBuilder:
    def build(groups: Sequence[dict[str, Any]], betas: tuple[float, float], epsilon: float) -> torch.optim.Optimizer:
        optimizer = make(list(groups), lr=0.0, betas=betas, eps=epsilon, bias_correction=True, adam_w_mode=True)
        optimizer.register_step_pre_hook(_tell_groups_the_step)
        optimizer.register_step_post_hook(_count_step)
        return optimizer

    return build


def _tell_groups_the_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """These optimizers count steps in their groups; torch's, and our checkpoints, beside each weight (on the host)."""
    for group in optimizer.param_groups:
        steps = [optimizer.state[weight]["step"] for weight in group["params"] if weight in optimizer.state]
        group["step"] = int(steps[0]) if steps else 0


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] += 1


class FlashAttention3:
    """FlashAttention 3 (arXiv 2407.08608), for half precisions on Hopper; groups are not repeated."""

    name = "FlashAttention 3"
    returns_log_sum_exp = True

    def __init__(self) -> None:
        self._interface = load("flash_attn_interface", "FlashAttention 3")

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Half precisions on a GPU."""
        return device.type == "cuda" and dtype.itemsize == 2

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> PartialAttention:
        """Outputs and the log-sum-exp of the scores."""
        output, log_sum_exp, *_ = self._interface._flash_attn_forward(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            softmax_scale=1 / math.sqrt(query.shape[-1]),
            causal=is_causal,
        )
        return PartialAttention(output.transpose(1, 2), log_sum_exp)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: PartialAttention, is_causal: bool
    ) -> Gradients:
        """Scores are computed again, block by block."""
        assert attended.log_sum_exp is not None
        by_position = [tensor.transpose(1, 2) for tensor in (grad, query, key, value, attended.output)]
        grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in by_position[1:4]]
        self._interface._flash_attn_backward(
            *by_position,
            attended.log_sum_exp.contiguous(),
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            softmax_scale=1 / math.sqrt(query.shape[-1]),
            is_causal=is_causal,
            # Queries' gradients are otherwise added up in whatever order blocks come (--deterministic-mode).
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query, grad_key, grad_value = (tensor.transpose(1, 2) for tensor in grads)
        return grad_query, grad_key, grad_value
