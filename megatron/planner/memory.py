"""What lies in memory at every moment, by kind: counted from the allocations that the code makes."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

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
"""``activations`` are kept for a backward pass; ``working memory`` is what an action makes and lets go of."""
_LASTING: frozenset[Kind] = frozenset(("weights", "gradients", "master weights", "moments", "logits and loss"))

CUDA_BLOCK = 512
"""Bytes to which torch's allocator on GPUs rounds up."""


@dataclass
class _Block:
    size: int
    kind: Kind


@dataclass(frozen=True)
class Moment:
    """What is in memory at one moment."""

    total: int = 0
    by_kind: Mapping[Kind, int] = field(default_factory=dict)
    during: str = ""
    """What ran."""


class MemoryTracker(TorchDispatchMode):
    """Follows the memory of every tensor that is made meanwhile, real or not, until it is let go of.

    ``block`` is the number of bytes to which each is rounded up. What is made belongs to the kind that is open
    (:meth:`making`), by default to the working memory of the action that runs.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self._block = block
        self._blocks: dict[int, _Block] = {}
        self._kind: Kind = "working memory"
        self._by_kind: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._total = 0
        self._is_watching = True
        self.during = ""
        """What runs, in words."""
        self.peak = Moment()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note what it makes."""
        result = self.run(func, args, kwargs or {})
        if not self._is_watching:
            return result
        if isinstance(result, Tensor):
            self.note(result)
        elif isinstance(result, (tuple, list)):
            for one in result:
                if isinstance(one, Tensor):
                    self.note(one)
        return result

    def __enter__(self) -> "MemoryTracker":
        """Begin; storages that change their size, as FSDP2's do, are watched as well."""
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """End."""
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        block = self._blocks.get(storage_id(storage))
        if block is not None:
            size = self._rounded(storage)
            self._change(block.kind, size - block.size)
            block.size = size
            self._look()

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._block) * self._block

    def _look(self) -> None:
        if self._total > self.peak.total:
            self.peak = self.now

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func``."""
        return func(*args, **kwargs)

    @property
    def now(self) -> Moment:
        """What is in memory."""
        return Moment(self._total, dict(self._by_kind), self.during)

    def note(self, tensor: Tensor) -> None:
        """Count the memory of ``tensor``, if it has any, unless it is known."""
        if not isinstance(tensor, FakeTensor) and (tensor.is_meta or is_traceable_wrapper_subclass(tensor)):
            return
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address in self._blocks:
            return
        size = self._rounded(storage)
        self._blocks[address] = _Block(size, self._kind)
        weakref.finalize(storage, self._forget, address).atexit = False
        self._change(self._kind, size)
        self._look()

    def _forget(self, address: int) -> None:
        block = self._blocks.pop(address)
        self._change(block.kind, -block.size)

    def _change(self, kind: Kind, size: int) -> None:
        self._by_kind[kind] += size
        self._total += size

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """What is made inside is of this ``kind``."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is made inside is not counted, unless it is noted afterwards."""
        self._is_watching = False
        try:
            yield
        finally:
            self._is_watching = True

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        """From now on the memory of ``tensor`` is of this ``kind``."""
        self.note(tensor)
        block = self._blocks[storage_id(tensor.untyped_storage())]
        self._change(block.kind, -block.size)
        block.kind = kind
        self._change(kind, block.size)

    def mark_if_passing(self, tensor: Tensor, kind: Kind) -> None:
        """As :meth:`mark`, unless ``tensor`` lies in memory of a lasting kind."""
        self.note(tensor)
        if self._blocks[storage_id(tensor.untyped_storage())].kind == "working memory":
            self.mark(tensor, kind)

    def keep(self) -> None:
        """What is passing and still there is kept for a backward pass: count it as activations."""
        for block in self._blocks.values():
            if block.kind not in _LASTING and block.kind != "activations":
                self._change(block.kind, -block.size)
                block.kind = "activations"
                self._change(block.kind, block.size)
