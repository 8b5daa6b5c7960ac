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
        ctx.function, ctx.random_state = function, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient for each argument of :meth:`forward`, None for those that have none.

        ``gradient`` is that of the output. Gradients of the parameters that ``function`` uses are added to their
        ``grad``. Autograd calls this with gradients disabled.
        """
        inputs = [one.detach().requires_grad_(one.requires_grad) for one in ctx.saved_tensors]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.random_state)
            output = ctx.function(*inputs)
        torch.autograd.backward(output, gradient)
        return None, *(one.grad for one in inputs)


def checkpointed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, with the same gradients, of which the graph keeps the ``inputs`` alone.

    One or more of the inputs have a gradient, others may not, such as token ids. If ``function`` draws random numbers
    (dropout), it draws the same ones again in the backward pass, after which the random state is what it was before it.
    """
    output: Tensor = Checkpoint.apply(function, *inputs)
    return output
