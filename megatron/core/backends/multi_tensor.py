"""The interface of the multi-tensor optimizer and norm of apex and Transformer Engine."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.kernels import AdamBuilder, SquaredNorm


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
