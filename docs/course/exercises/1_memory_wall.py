"""Exercise 1: activation checkpointing as an autograd function. The page is docs/course/1_memory_wall.md.

Fill the two holes, then: megatron-llama course check 1
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Checkpoint(torch.autograd.Function):
    """Keeps the inputs of a function instead of its activations, and runs it again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The output of ``function``. ``ctx`` carries what :meth:`backward` needs; autograd records nothing in here."""
        raise NotImplementedError("fill this hole")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient for each argument of :meth:`forward`, None for those that have none.

        ``gradient`` is that of the output. Gradients of the parameters that ``function`` uses are added to their
        ``grad``. Autograd calls this with gradients disabled.
        """
        raise NotImplementedError("fill this hole")


def checkpointed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, with the same gradients, of which the graph keeps the ``inputs`` alone.

    One or more of the inputs have a gradient, others may not, such as token ids. If ``function`` draws random numbers
    (dropout), it draws the same ones again in the backward pass, after which the random state is what it was before it.
    """
    output: Tensor = Checkpoint.apply(function, *inputs)
    return output
