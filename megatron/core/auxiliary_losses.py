"""Losses that modules add inside a stage, beside the loss of the output layer.

The gradient of a step is ``scale`` times that of a sum over tokens (:mod:`megatron.training.loop.step`), which is
divided by the unmasked tokens of the global batch in the end. So an auxiliary loss is a sum over this rank's tokens as
well. Its gradient begins where it was computed: no stage sends losses to the last one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class AuxiliaryLosses:
    """The auxiliary losses of a rank in a step. ``names`` are their metrics, the same on all ranks: ranks whose stage
    has none of these losses add to their sums, too."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = list(names)
        self._scale = 0.0
        self._sums: dict[str, Tensor] = {}

    def start_step(self, scale: float) -> None:
        """Reset the sums; ``scale`` is the gradient of the sum of token losses."""
        self._scale = scale
        self._sums.clear()

    def add(
        self, name: str, hidden: Tensor, values: Tensor, weight: float | Tensor = 1.0, count: Tensor | None = None
    ) -> Tensor:
        """``hidden``, whose backward pass adds the gradient of ``weight`` times the sum of ``values``.

        ``values`` are of this rank's tokens, of all tokens on every tensor-parallel rank without sequence parallelism.
        The metric ``name`` is their mean over the global batch, over ``count`` if only some of them are not zero.

        Without gradients nothing is added: evaluation would count, and recomputed layers would count twice.
        """
        if not torch.is_grad_enabled():
            return hidden
        total = values.sum()
        self.record(name, total, total.new_full((), values.numel()) if count is None else count)
        return self.attach(hidden, total * weight)

    def attach(self, hidden: Tensor, loss: Tensor) -> Tensor:
        """``hidden``, whose backward pass adds the gradient of ``loss``, a scalar without a metric."""
        result: Tensor = _WithLoss.apply(hidden, loss, self._scale)
        return result

    def record(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add to the sums of the metric ``name``, which is the mean ``total / count``."""
        assert name in self.names, f"{name} is not among the names of the auxiliary losses, {self.names}"
        added = torch.stack((total.detach(), count)).double()
        self._sums[name] = self._sums[name] + added if name in self._sums else added

    def sums(self, device: torch.device) -> Tensor:
        """Sums and counts of this rank, ``[2 names]`` in fp64."""
        if not self.names:
            return torch.empty(0, dtype=torch.float64, device=device)
        zeros = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.cat([self._sums.get(name, zeros) for name in self.names])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics of a step from the :meth:`sums` of all ranks; NaN where nothing was counted. Tensor-parallel
        ranks with the same tokens all add them, which changes no mean."""
        return {
            name: total / count if count else float("nan")
            for name, total, count in zip(self.names, sums[::2], sums[1::2], strict=True)
        }


class _WithLoss(Function):
    """Identity on activations; the loss gets the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.loss_gradient = torch.full_like(loss, scale)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.loss_gradient, None
