"""Activation recomputation: of a piece of the model only the input is kept, and it runs again before its backward pass.

Sources: Chen et al., arXiv 1604.06174; for pieces of a layer Korthikanti et al., arXiv 2205.05198, section 5.

The second run happens inside the backward pass of an autograd function, and so does the backward pass through it.
``torch.utils.checkpoint`` without reentrance hands weights to the backward pass as new tensors, which have lost their
gradient slots.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from megatron.core.communication import Communicator


class Piece(Protocol):
    """A part of a forward pass with one input that needs a gradient, the same whenever it runs."""

    def __call__(self, inputs: Tensor, *, graph_only: bool = False) -> Tensor:
        """The output; with ``graph_only`` it runs again on the same ``inputs`` to have a graph, and the values of its
        output are not needed."""


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, piece: Piece, sharers: Communicator | None) -> Tensor:
        outputs = piece(inputs)
        # Detached: the piece may have changed them in place, which autograd allows views of products no more.
        ctx.save_for_backward(inputs.detach() if sharers is None else _own_part(inputs, sharers))
        ctx.piece, ctx.sharers, ctx.shape = piece, sharers, inputs.shape
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (inputs,) = ctx.saved_tensors
        if ctx.sharers is not None:
            inputs = ctx.sharers.all_gather(inputs).view(ctx.shape)
        inputs = inputs.detach().requires_grad_()
        piece, ctx.piece = ctx.piece, None
        with torch.enable_grad():
            root = get_gradient_edge(piece(inputs, graph_only=True))
        torch.autograd.backward(root, gradients[0])
        return inputs.grad, None, None


def _own_part(inputs: Tensor, sharers: Communicator) -> Tensor:
    """This rank's part of a tensor that all ``sharers`` have, in memory of its own."""
    return inputs.flatten().chunk(sharers.size)[sharers.rank].clone()


def recompute(piece: Piece, inputs: Tensor, sharers: Communicator | None = None) -> Tensor:
    """The output of ``piece``, which runs again in the backward pass.

    ``sharers`` are ranks that all have the same ``inputs``, divide what is kept of them evenly, and gather it again.
    """
    if not torch.is_grad_enabled():
        return piece(inputs)
    assert inputs.requires_grad, "weights alone do not make autograd come back to what is recomputed"
    outputs: Tensor = _Recomputed.apply(inputs, piece, sharers)
    return outputs


def in_sequence(*functions: Callable[[Tensor], Tensor], last: Piece) -> Piece:
    """``functions`` and ``last``, one after another."""

    def run(inputs: Tensor, *, graph_only: bool = False) -> Tensor:
        for function in functions:
            inputs = function(inputs)
        return last(inputs, graph_only=graph_only)

    return run
