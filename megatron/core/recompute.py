"""Activation recomputation: a segment of the model saves only its input, and runs again in the backward pass.

Sources: Chen et al., arXiv 1604.06174; for segments of a layer Korthikanti et al., arXiv 2205.05198, section 5.

The second run and its backward pass happen inside the backward pass of one autograd function, so weight gradients are
accumulated, or deferred, as without recomputation. Non-reentrant ``torch.utils.checkpoint`` passes weights to the
backward pass as new tensors, which have no main gradient.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from megatron.core.communication import Communicator

#     forward          run the segment; save its input alone
#     backward         run it again, with its graph, without the last GEMM
#                      backward of this graph: gradient of the input, weight gradients to the main gradients


class SkippableLinear(Protocol):
    """A linear layer that can build its graph without multiplying."""

    skip_output: bool


class Recomputed(nn.Module):
    """Runs ``segment``, saves its first argument alone, and runs it again in the backward pass.

    In the second run nothing reads the output of the segment. A class whose ``forward`` ends with a linear layer, or
    with its sum with something else, names that layer in ``last_linear``, which then does not multiply. ``shards`` are
    ranks with the same input; each saves an equal part, gathered in backward.
    """

    def __init__(self, segment: nn.Module, shards: Communicator | None = None) -> None:
        super().__init__()
        self.segment, self.shards = segment, shards

    @property
    def last_linear(self) -> SkippableLinear | None:
        return last_linear_of(self.segment)

    def forward(self, inputs: Tensor, *arguments: Any) -> Tensor:
        """The output of the segment; only ``inputs`` has a gradient."""
        if not torch.is_grad_enabled():
            return cast(Tensor, self.segment(inputs, *arguments))
        assert inputs.requires_grad, "without a gradient of the input, autograd does not reach the segment"
        output: Tensor = _Recompute.apply(inputs, self, arguments)
        return output


def last_linear_of(segment: nn.Module) -> SkippableLinear | None:
    """The linear layer whose output ``segment`` adds or returns, if its class says so.

    A class that overrides ``forward`` without ``last_linear`` has not said it: it may multiply the output, whose values
    are then needed.
    """
    for kind in type(segment).__mro__:
        if "last_linear" in vars(kind) or "forward" in vars(kind):
            break
    says_so = "last_linear" in vars(kind) or "last_linear" in segment._modules
    return cast(SkippableLinear | None, segment.last_linear) if says_so else None


@contextmanager
def skipping_output(linear: SkippableLinear | None) -> Iterator[None]:
    """Let ``linear`` build its graph alone."""
    if linear is None:
        yield
        return
    linear.skip_output = True
    try:
        yield
    finally:
        linear.skip_output = False


class _Recompute(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, module: Recomputed, arguments: tuple[Any, ...]) -> Tensor:
        shards = module.shards
        # The shard is a copy, so that the whole input can be freed.
        saved = inputs if shards is None else shards.own_part(inputs.flatten()).clone()
        ctx.save_for_backward(saved.detach())
        ctx.module, ctx.arguments, ctx.shape = module, arguments, inputs.shape
        return cast(Tensor, module.segment(inputs, *arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (inputs,) = ctx.saved_tensors
        module: Recomputed = ctx.module
        if module.shards is not None:
            inputs = module.shards.all_gather(inputs).view(ctx.shape)
        inputs = inputs.detach().requires_grad_()
        # The node of the graph may live longer than this pass; it must not keep the arguments alive.
        arguments, ctx.arguments = ctx.arguments, ()
        with torch.enable_grad(), skipping_output(module.last_linear):
            root = get_gradient_edge(module.segment(inputs, *arguments))
        torch.autograd.backward(root, gradients[0])
        return inputs.grad, None, None


def recompute_modules(layer: nn.Module, modules: frozenset[str]) -> None:
    """Wrap the segments of the parts of ``layer`` that ``modules`` names. A part (attention, MLP, experts) has a table
    ``segments``: the path of the submodule that each choice of ``--recompute-modules`` recomputes; empty: the part."""
    for name, part in list(layer.named_children()):
        segments: Mapping[str, str] = getattr(part, "segments", {})
        paths = {segments[module] for module in modules if module in segments}
        for path in {""} if "" in paths else paths:
            whole = f"{name}.{path}" if path else name
            layer.set_submodule(whole, Recomputed(layer.get_submodule(whole)))


class LayerGroup(nn.Module):
    """Transformer layers that run as one."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def last_linear(self) -> SkippableLinear | None:
        return last_linear_of(self.layers[-1])

    def forward(self, hidden: Tensor, *arguments: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, *arguments)
        return hidden
