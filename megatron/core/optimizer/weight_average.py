"""The exponential moving average (EMA) of the master weights, over this rank's shards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.update_rules.rule import SLICE


class WeightAverage:
    """``average <- decay * average + (1 - decay) * weight`` after every update.

    ``weights`` are the 1-D master weights, which :meth:`update` reads; the averages have their dtype, and start as a
    copy.
    """

    def __init__(self, decay: float, weights: Sequence[Tensor]) -> None:
        self._decay, self._weights = decay, list(weights)
        self.averages = [weight.detach().clone() for weight in weights]

    def update(self) -> None:
        if self.averages:
            torch._foreach_lerp_(self.averages, self._weights, 1.0 - self._decay)

    def reset(self) -> None:
        """Let the average begin with the current weights."""
        for average, weight in zip(self.averages, self._weights):
            average.copy_(weight)

    def exchange(self) -> None:
        """Swap the averages with the weights, a slice at a time."""
        for average, weight in zip(self.averages, self._weights):
            for one, other in zip(average.split(SLICE), weight.split(SLICE)):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
