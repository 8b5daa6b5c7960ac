"""What memory tensors take, and for how long."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageWatch(TorchDispatchMode):
    """Notes the memory of every tensor that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        """By address, the memory and its bytes; a weak reference keeps the address from being used again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; what it returns may lie in memory that was there before."""
        result = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage._cdata not in before:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def live_bytes(self) -> int:
        """What is there of it."""
        return sum(size for reference, size in self.made.values() if not reference.expired())


def storages(tree: object) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors in a tree of arguments."""
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class PeakWatch(StorageWatch):
    """Also notes the most that was there at once."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and look."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.made = {address: made for address, made in self.made.items() if not made[0].expired()}
        self.peak = max(self.peak, self.live_bytes())
        return result
