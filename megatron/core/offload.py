"""Activations in the host's memory: copied there behind the forward pass, and back ahead of the backward pass.

What autograd functions save goes through :func:`torch.autograd.graph.saved_tensors_hooks`. On CUDA copies have streams
of their own and the host's side is pinned; elsewhere they are plain copies, which prove that nothing else changes.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

TensorPair = tuple[Tensor, Tensor]
"""Target and source."""


class Arrival(Protocol):
    """The end of copies that are under way."""

    def wait(self) -> None:
        """Have what is computed from now on come after it."""


class CopyStream(Protocol):
    """Copies one after another, beside the computation."""

    def copy(self, pairs: Sequence[TensorPair]) -> Arrival | None:
        """Start to copy, after what has been computed so far; None where that is done already."""


class PlainCopies:
    """Copies at once."""

    def copy(self, pairs: Sequence[TensorPair]) -> None:
        """Copy."""
        for target, source in pairs:
            target.copy_(source)


class CudaArrival:
    """An event on a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """The current stream waits."""
        self.event.wait()


class CudaCopyStream:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[TensorPair]) -> CudaArrival:
        """Copy without blocking the host, whose memory must be pinned."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return CudaArrival(self._stream.record_event())


class HostCopies:
    """What takes activations to the host and back; the layers of a rank share it."""

    def __init__(self, device: torch.device, out: CopyStream, back: CopyStream) -> None:
        self.device, self.out, self.back = device, out, back
        self._leaving: OffloadedLayer | None = None

    @classmethod
    def of(cls, device: torch.device) -> "HostCopies":
        """As suits ``device``."""
        if device.type == "cuda":
            return cls(device, CudaCopyStream(device), CudaCopyStream(device))
        return cls(device, PlainCopies(), PlainCopies())

    def takes_leave(self, layer: "OffloadedLayer | None") -> None:
        """``layer`` is on its way to the host, and the one before it is off the device."""
        before, self._leaving = self._leaving, layer
        if before is not None:
            before.leave_device()


class _Kept:
    """A tensor that a layer saved, perhaps several times."""

    def __init__(self, tensor: Tensor) -> None:
        self.on_device: Tensor | None = tensor
        self.on_host: Tensor | None = None
        self.uses = 0


class OffloadedLayer:
    """What one layer saved in one forward pass."""

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._tensors: dict[Hashable, _Kept] = {}
        self._is_fetched = False
        self._on_host: Arrival | None = None
        self._on_device: Arrival | None = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take what is saved meanwhile, and at the end start it for the host."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._send()

    def _pack(self, tensor: Tensor) -> Hashable:
        # While the layer runs none of them is freed, so an address stands for one tensor.
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        self._tensors.setdefault(key, _Kept(tensor)).uses += 1
        return key

    def _unpack(self, key: Hashable) -> Tensor:
        self.fetch()
        if self._on_device is not None:
            self._on_device.wait()
        kept = self._tensors[key]
        kept.uses -= 1
        if kept.uses == 0:
            del self._tensors[key]
        assert kept.on_device is not None
        return kept.on_device

    def _send(self) -> None:
        pairs = []
        for kept in self._tensors.values():
            assert kept.on_device is not None
            kept.on_host = torch.empty_like(kept.on_device, device="cpu", pin_memory=self._copies.device.type == "cuda")
            pairs.append((kept.on_host, kept.on_device))
        self._on_host = self._copies.out.copy(pairs)
        self._copies.takes_leave(self)
        if self._on_host is None:
            self._copies.takes_leave(None)

    def leave_device(self) -> None:
        """Let go of the tensors on the device, unless the backward pass has come for them already."""
        if self._is_fetched:
            return
        if self._on_host is not None:
            # Whatever gets their memory next must come after the copy.
            self._on_host.wait()
        for kept in self._tensors.values():
            kept.on_device = None

    def fetch(self) -> None:
        """Start to bring back what is not on the device any more; once."""
        if self._is_fetched:
            return
        self._is_fetched = True
        # Those that are off the device have waited for the copy on the host.
        pairs = list(_places_for(self._tensors.values(), self._copies.device))
        if pairs:
            self._on_device = self._copies.back.copy(pairs)


def _places_for(tensors: Iterable[_Kept], device: torch.device) -> Iterator[TensorPair]:
    """Room on the device for those that are on the host alone, which they leave."""
    for kept in tensors:
        if kept.on_device is None:
            assert kept.on_host is not None
            # Made on the stream that will use it, and so free for it.
            kept.on_device = torch.empty_like(kept.on_host, device=device)
            yield kept.on_device, kept.on_host
        kept.on_host = None


def run_offloaded(
    layers: Sequence[Callable[[Tensor], Tensor]], is_offloaded: Sequence[bool], hidden: Tensor, copies: HostCopies
) -> Tensor:
    """Run ``layers`` one after another; what those save that are offloaded is on the host until the layer behind goes
    backward."""
    before: OffloadedLayer | None = None
    for layer, goes_to_host in zip(layers, is_offloaded, strict=True):
        this = OffloadedLayer(copies) if goes_to_host else None
        with nullcontext() if this is None else this.saving():
            hidden = layer(hidden)
        # Itself, too: behind it may be nothing that would have fetched it.
        _fetch_with_gradient(hidden, [kept for kept in (this, before) if kept is not None])
        before = this
    return hidden


def _fetch_with_gradient(outputs: Tensor, layers: Sequence[OffloadedLayer]) -> None:
    """Fetch what ``layers`` saved when the gradient of ``outputs`` is there."""

    def fetch(gradient: Tensor) -> None:
        for layer in layers:
            layer.fetch()

    if layers:
        outputs.register_hook(fetch)
