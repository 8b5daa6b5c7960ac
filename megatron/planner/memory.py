"""Allocated memory by kind, tracked from the allocations of the code."""

import weakref
from collections.abc import Callable, Iterator, Mapping
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
_LASTING: frozenset[Kind] = frozenset(("weights", "gradients", "master weights", "moments", "logits and loss"))

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
                size = self._rounded(storage)
                self._add(block.kind, size - block.size)
                block.size = size
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._block) * self._block

    @property
    def now(self) -> MemoryUse:
        return MemoryUse(self._total, dict(self._by_kind), self.during)

    def track(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, if it has one that is not counted yet."""
        if not isinstance(tensor, FakeTensor) and (tensor.is_meta or is_traceable_wrapper_subclass(tensor)):
            return
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address not in self._blocks:
            size = self._rounded(storage)
            self._blocks[address] = _Block(size, self._kind)
            weakref.finalize(storage, self._free, address).atexit = False
            self._add(self._kind, size)

    def _free(self, address: int) -> None:
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
        self._is_tracking = False
        try:
            yield
        finally:
            self._is_tracking = True

    def fused(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``method`` as one kernel: only its results are counted, since intermediate values stay in registers."""
        with self.untracked():
            results = method(*arguments)
        for result in results if isinstance(results, tuple) else (results,):
            if result is not None:
                self.track(result)
        return results

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        """Change the kind of the memory of ``tensor``."""
        self.track(tensor)
        self._move(self._blocks[storage_id(tensor.untyped_storage())], kind)

    def mark_if_temporary(self, tensor: Tensor, kind: Kind) -> None:
        """As :meth:`mark`, if ``tensor`` is in working memory."""
        self.track(tensor)
        if self._blocks[storage_id(tensor.untyped_storage())].kind == "working memory":
            self.mark(tensor, kind)

    def mark_activations(self) -> None:
        """Count temporary memory that is still allocated as activations: it is saved for a backward pass."""
        for block in self._blocks.values():
            if block.kind not in _LASTING:
                self._move(block, "activations")
