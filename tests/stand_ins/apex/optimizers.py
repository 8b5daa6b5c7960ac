"""Stands in for apex's and Transformer Engine's: their arguments, and their step counts, which are the groups'."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """AdamW."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        assert bias_correction and adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update."""
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                adamw(
                    [weight],
                    [weight.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(group["step"] - 1))],
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
