"""Activations that are not kept on the device: recomputed in the backward pass, or copied to the host and back.

Recompute: a segment of the model saves only its input, and runs again in the backward pass (Chen et al., arXiv
1604.06174; for segments of a layer Korthikanti et al., arXiv 2205.05198, section 5). The second run and its backward
pass happen inside the backward pass of one autograd function, so weight gradients are accumulated, or deferred, as
without recomputation. Non-reentrant ``torch.utils.checkpoint`` passes weights to the backward pass as new tensors,
which have no main gradient.

CPU offload: saved tensors of some layers are copied to host memory after the forward pass, and back before their
backward pass. They pass through :func:`torch.autograd.graph.saved_tensors_hooks`. On CUDA the copies run on streams of
their own and host memory is pinned; elsewhere they are plain copies, which prove that nothing else changes.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from megatron.core.communication import Communicator

# Recompute
#
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

    last_linear = "segment"

    def __init__(self, segment: nn.Module, shards: Communicator | None = None) -> None:
        super().__init__()
        self.segment, self.shards = segment, shards

    def forward(self, inputs: Tensor, *arguments: Any) -> Tensor:
        """The output of the segment; only ``inputs`` has a gradient."""
        if not torch.is_grad_enabled():
            return cast(Tensor, self.segment(inputs, *arguments))
        assert inputs.requires_grad, "without a gradient of the input, autograd does not reach the segment"
        output: Tensor = _Recompute.apply(inputs, self, arguments)
        return output


def last_linear_of(segment: nn.Module) -> SkippableLinear | None:
    """The linear layer whose output ``segment`` adds or returns, if its class says so: ``last_linear`` is the path of
    the submodule that is this layer or ends with it.

    A class that overrides ``forward`` without ``last_linear`` has not said it: it may multiply the output, whose values
    are then needed.
    """
    if hasattr(segment, "skip_output"):
        return cast(SkippableLinear, segment)
    for kind in type(segment).__mro__:
        if "last_linear" in vars(kind) or "forward" in vars(kind):
            break
    path = cast(str | None, segment.last_linear) if "last_linear" in vars(kind) else None
    return None if path is None else last_linear_of(segment.get_submodule(path))


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
        with torch.enable_grad(), skipping_output(last_linear_of(module)):
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
    def last_linear(self) -> str:
        return f"layers.{len(self.layers) - 1}"

    def forward(self, hidden: Tensor, *arguments: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, *arguments)
        return hidden


# CPU offload. Layer 0 and 1 are offloaded, layer 2 is not:
#
#     computation   F0 | F1 | F2 ........ B2 | B1 | B0
#     out             copy 0 | copy 1                      device memory of 0 is free when the copy of 1 starts
#     back                        fetch 1 | fetch 0        1 is fetched when B2 starts, 0 when B1 starts

TensorPair = tuple[Tensor, Tensor]
"""Target and source."""


class CopyEvent(Protocol):
    """The completion of copies."""

    def wait(self) -> None:
        """Make the current stream wait for it."""

    def synchronize(self) -> None:
        """Make the host wait for it."""


class CopyStream(Protocol):
    """Copies in order, concurrent with computation."""

    def copy(self, pairs: Sequence[TensorPair]) -> CopyEvent | None:
        """Start copies after the computation so far; None if they are complete on return."""


class PlainCopies:
    """Copies that are complete on return."""

    def copy(self, pairs: Sequence[TensorPair]) -> None:
        for target, source in pairs:
            target.copy_(source)


class CudaCopyStream:
    """Copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[TensorPair]) -> torch.cuda.Event:
        """Host memory must be pinned."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class HostCopies:
    """The copy streams of a rank, shared by its layers."""

    def __init__(self, device: torch.device, out: CopyStream, back: CopyStream) -> None:
        self.device, self.out, self.back = device, out, back
        self._copying: OffloadedTensors | None = None

    @classmethod
    def of(cls, device: torch.device) -> "HostCopies":
        if device.type == "cuda":
            return cls(device, CudaCopyStream(device), CudaCopyStream(device))
        return cls(device, PlainCopies(), PlainCopies())

    def started(self, saved: "OffloadedTensors | None") -> None:
        """The copy of ``saved`` to the host has started: free the device memory of the one before it."""
        before, self._copying = self._copying, saved
        if before is not None:
            before.free_on_device()


@dataclass(eq=False)
class _OffloadedTensor:
    """A tensor that a layer saved, possibly several times."""

    on_device: Tensor | None
    on_host: Tensor | None = None
    uses: int = 0


class OffloadedTensors:
    """The tensors that one layer saved in one forward pass."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._tensors: dict[Hashable, _OffloadedTensor] = {}
        self._is_fetched = False
        self._on_host: CopyEvent | None = None
        self._on_device: CopyEvent | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Collect the tensors that are saved inside, then start to copy them to the host."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        pairs = []
        pins = self._copies.device.type == "cuda"
        for tensor in self._tensors.values():
            assert tensor.on_device is not None
            tensor.on_host = torch.empty_like(tensor.on_device, device="cpu", pin_memory=pins)
            pairs.append((tensor.on_host, tensor.on_device))
        self._on_host = self._copies.out.copy(pairs)
        self._copies.started(self)
        if self._on_host is None:
            self._copies.started(None)

    def _pack(self, tensor: Tensor) -> Hashable:
        # No saved tensor is freed while the layer runs, so an address identifies one tensor.
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        self._tensors.setdefault(key, _OffloadedTensor(tensor)).uses += 1
        return key

    def _unpack(self, key: Hashable) -> Tensor:
        self.fetch()
        if self._on_device is not None:
            self._on_device.wait()
        tensor = self._tensors[key]
        tensor.uses -= 1
        if tensor.uses == 0:
            del self._tensors[key]
        assert tensor.on_device is not None
        return tensor.on_device

    def free_on_device(self) -> None:
        """Free the device memory, unless the backward pass has fetched the tensors already."""
        if self._is_fetched:
            return
        if self._on_host is not None:
            # The next owner of the memory must write to it after the copy.
            self._on_host.wait()
        for tensor in self._tensors.values():
            tensor.on_device = None

    def fetch(self) -> None:
        """Start to copy back the tensors that are only on the host; once."""
        if self._is_fetched:
            return
        self._is_fetched = True
        pairs = []
        for tensor in self._tensors.values():
            if tensor.on_device is None:
                assert tensor.on_host is not None
                # Allocated on the stream that reads it.
                tensor.on_device = torch.empty_like(tensor.on_host, device=self._copies.device)
                pairs.append((tensor.on_device, tensor.on_host))
            tensor.on_host = None
        if pairs:
            self._on_device = self._copies.back.copy(pairs)


class Offloaded(nn.Module):
    """Runs ``module``; its saved tensors are on the host until the backward pass of the module after it starts."""

    def __init__(self, module: nn.Module, copies: HostCopies) -> None:
        super().__init__()
        self.module, self.copies = module, copies
        # Weak: the graph of the forward pass owns the saved tensors.
        self._saved: weakref.ref[OffloadedTensors] | None = None

    def forward(self, inputs: Tensor, *arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.module(inputs, *arguments))
        saved = OffloadedTensors(self.copies)
        with saved.saving():
            output: Tensor = self.module(inputs, *arguments)
        self._saved = weakref.ref(saved)
        # There may be no module after this one that prefetches them.
        output.register_hook(lambda gradient: saved.fetch())
        return output

    def prefetch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Forward hook of the module after this one: fetch when the gradient of its output has been computed."""
        saved = None if self._saved is None else self._saved()
        if saved is not None and output.requires_grad:
            output.register_hook(lambda gradient: saved.fetch())


def offload(modules: Sequence[nn.Module], after: nn.Module | None, copies: HostCopies) -> list[nn.Module]:
    """``modules``, which run in this order, offloaded; ``after`` is the module that runs after the last of them."""
    offloaded = [Offloaded(module, copies) for module in modules]
    followers = [*offloaded[1:], *([] if after is None else [after])]
    for before, follower in zip(offloaded, followers):
        follower.register_forward_hook(before.prefetch)
    return list(offloaded)
