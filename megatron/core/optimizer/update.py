"""The update rules: torch's, and its AdamW for gradients and moments in narrow formats."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.config.optimizer import OptimizerConfig
from megatron.core.kernels.third_party import AdamBuilder, torch_adam
from megatron.core.precision import DTYPES

_SLICE = 1 << 22


class PrecisionAwareAdamW(torch.optim.Optimizer):
    """AdamW whose gradients and moments may be narrower than its weights, in which it computes.

    It widens a slice of 4 million elements at a time, so that the wide copies take no memory to speak of.
    ``gradients`` belong to the weights of ``groups``, which have no ``.grad``.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        gradients: Mapping[Tensor, Tensor],
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._gradients = gradients

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in self._gradients:
                    self._update(weight, self._gradients[weight], group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        moments = state["exp_avg"], state["exp_avg_sq"]
        for weight_part, gradient_part, *narrow in zip(*(one.split(_SLICE) for one in (weight, gradient, *moments))):
            wide = [moment.to(weight.dtype) for moment in narrow]
            adamw(
                [weight_part],
                [gradient_part.to(weight.dtype)],
                [wide[0]],
                [wide[1]],
                [],
                [state["step"].clone()],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            torch._foreach_copy_(narrow, wide)
        state["step"] += 1


def build_torch_optimizer(
    config: OptimizerConfig,
    groups: list[dict[str, Any]],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    adam: AdamBuilder = torch_adam,
) -> torch.optim.Optimizer:
    """The optimizer of ``groups``, in which are ``weights``, 1-D, with their ``gradients``.

    Its state is there from the start, so that it can be counted, saved and loaded before the first step.
    """
    # A rank whose shard is all padding owns nothing; torch refuses an empty list.
    groups = groups or [{"params": [torch.zeros(0)]}]
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer: torch.optim.Optimizer
    if config.use_precision_aware_optimizer:
        optimizer = PrecisionAwareAdamW(groups, dict(zip(weights, gradients)), betas, config.adam_eps)
    else:
        for weight, gradient in zip(weights, gradients):
            weight.grad = gradient
        if config.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
        else:
            optimizer = adam(groups, betas, config.adam_eps)
    for weight in weights:
        optimizer.state[weight] = _fresh_state(config, weight)
        if adam is not torch_adam:
            # They are told the step from the host, which should not wait for the device.
            optimizer.state[weight]["step"] = torch.zeros((), dtype=torch.float32)
    return optimizer


def _fresh_state(config: OptimizerConfig, weight: Tensor) -> dict[str, Tensor]:
    if config.optimizer == "sgd":
        return {"momentum_buffer": torch.zeros_like(weight)} if config.sgd_momentum else {}
    moments = {"exp_avg": weight.dtype, "exp_avg_sq": weight.dtype}
    if config.use_precision_aware_optimizer:
        moments = {"exp_avg": DTYPES[config.exp_avg_dtype], "exp_avg_sq": DTYPES[config.exp_avg_sq_dtype]}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=weight.device),
        **{name: torch.zeros_like(weight, dtype=dtype) for name, dtype in moments.items()},
    }
