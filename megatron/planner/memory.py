"""Allocated memory by kind, tracked from the allocations of the code."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from megatron.torch_compat import FakeTensor, TorchDispatchMode, is_traceable_wrapper_subclass, storage_id

Kind = Literal[
    "weights",
    "gradients",
    "master weights",
    "moments",
    "activations",
    "logits and loss",
    "communication buffers",
    "working memory",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""``activations`` are saved for a backward pass; ``working memory`` is temporary."""
LASTING: frozenset[Kind] = frozenset(("weights", "gradients", "master weights", "moments", "logits and loss"))
"""Kinds that :meth:`MemoryTracker.mark_activations` does not change."""

CUDA_BLOCK = 512
"""Bytes to which torch's allocator on GPUs rounds up."""


@dataclass
class _Block:
    size: int
    kind: Kind


@dataclass(frozen=True)
class MemoryUse:
    """Allocated bytes at one moment."""

    total: int = 0
    by_kind: Mapping[Kind, int] = field(default_factory=dict)
    during: str = ""
    """The pass that ran."""

    def relative_to(self, start: "MemoryUse") -> "MemoryUse":
        """The change since ``start``."""
        change = {kind: size - start.by_kind[kind] for kind, size in self.by_kind.items()}
        return MemoryUse(self.total - start.total, change, self.during)


class MemoryTracker(TorchDispatchMode):
    """Tracks the memory of every tensor that is allocated inside the mode, real or fake, until it is freed.

    ``block`` is the number of bytes to which each allocation is rounded up. An allocation has the kind that is set by
    :meth:`allocating`, by default working memory.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self._block = block
        self._blocks: dict[int, _Block] = {}
        self._kind: Kind = "working memory"
        self._by_kind: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._total = 0
        self._is_tracking = True
        self.during = ""
        """The pass that runs."""
        self.peak = MemoryUse()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(func, args, kwargs or {})
        if self._is_tracking:
            for one in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(one, Tensor):
                    self.track(one)
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation; a subclass may return a fake value instead."""
        return func(*args, **kwargs)

    def __enter__(self) -> Self:
        # FSDP2 resizes storages.
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            block = self._blocks.get(storage_id(storage))
            if block is not None:
                size = self.rounded(storage.nbytes())
                self._add(block.kind, size - block.size)
                block.size = size
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    @property
    def now(self) -> MemoryUse:
        return MemoryUse(self._total, dict(self._by_kind), self.during)

    def counts(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has memory that is counted."""
        return isinstance(tensor, FakeTensor) or not (tensor.is_meta or is_traceable_wrapper_subclass(tensor))

    def track(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, if it has one that is not counted yet."""
        if not self.counts(tensor):
            return
        # Views share the storage of their base, which is counted once and freed with the last of them.
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address not in self._blocks:
            size = self.rounded(storage.nbytes())
            self._blocks[address] = _Block(size, self._kind)
            weakref.finalize(storage, self.free, address).atexit = False
            self._add(self._kind, size)

    def free(self, address: int) -> None:
        block = self._blocks.pop(address)
        self._add(block.kind, -block.size)

    def _add(self, kind: Kind, size: int) -> None:
        self._by_kind[kind] += size
        self._total += size
        if self._total > self.peak.total:
            self.peak = self.now

    def _move(self, block: _Block, kind: Kind) -> None:
        self._by_kind[block.kind] -= block.size
        self._by_kind[kind] += block.size
        block.kind = kind

    @contextmanager
    def allocating(self, kind: Kind) -> Iterator[None]:
        """Allocations inside are of this ``kind``."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Allocations inside are not counted."""
        before, self._is_tracking = self._is_tracking, False
        try:
            yield
        finally:
            self._is_tracking = before

    def fused(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``method`` as one kernel: only its results are counted, since intermediate values stay in registers."""
        # Tensors inside that outlive the kernel are its results.
        with self.untracked():
            results = method(*arguments)
        for result in results if isinstance(results, tuple) else (results,):
            if result is not None:
                self.track(result)
        return results

    def mark(self, tensor: Tensor, kind: Kind, if_temporary: bool = False) -> None:
        """Change the kind of the memory of ``tensor``, if it is counted; or only ``if_temporary``, which is working
        memory."""
        self.track(tensor)
        block = self._blocks.get(storage_id(tensor.untyped_storage()))
        if block is not None and (block.kind == "working memory" or not if_temporary):
            self._move(block, kind)

    def mark_activations(self, others: Collection[int] = ()) -> None:
        """Count temporary memory that is still allocated as activations: it is saved for a backward pass. Memory at the
        addresses ``others`` does not change."""
        for address, block in self._blocks.items():
            if block.kind not in LASTING and address not in others:
                self._move(block, "activations")

    # For layers whose memory is repeated (:mod:`megatron.planner.rehearsal.extrapolation`)

    def rounded(self, num_bytes: int) -> int:
        """Bytes of an allocation of ``num_bytes``."""
        return -(-num_bytes // self._block) * self._block

    def size_of(self, tensor: Tensor) -> int:
        return self._blocks[storage_id(tensor.untyped_storage())].size

    def addresses(self) -> frozenset[int]:
        return frozenset(self._blocks)

    def is_allocated(self, address: int) -> bool:
        """Whether the storage with this :func:`~megatron.torch_compat.storage_id` has not been freed."""
        return address in self._blocks

    def raise_peak(self, change: MemoryUse) -> None:
        """Count a moment at which memory differs from now by ``change``."""
        total = self._total + change.total
        if total > self.peak.total:
            by_kind = {kind: size + change.by_kind[kind] for kind, size in self._by_kind.items()}
            self.peak = MemoryUse(total, by_kind, self.during)

    def shift(self, change: Mapping[Kind, int], sign: int = 1) -> None:
        """Add ``sign`` times a ``change`` by kind, without an allocation."""
        for kind, size in change.items():
            self._by_kind[kind] += sign * size
            self._total += sign * size

    def allocate(self, address: int, kind: Kind, size: int) -> None:
        """Count ``size`` bytes without a tensor until :meth:`free`, but not in the peak; ``address`` identifies it."""
        self._blocks[address] = _Block(size, kind)
        self.shift({kind: size})


class HeldMemory:
    """Memory without a tensor, allocated until :meth:`free` or until nothing refers to it."""

    def __init__(self, tracker: MemoryTracker, size: int, kind: Kind = "working memory") -> None:
        tracker.allocate(id(self), kind, size)
        self._finalizer = weakref.finalize(self, tracker.free, id(self))
        self._finalizer.atexit = False

    def free(self) -> None:
        self._finalizer()
