"""A transport whose results exist as late as possible: only after ``wait``, as on a GPU whose streams are not joined.

gloo hides a missing wait, because its collectives are often over when the next line runs; NCCL does not. Until its wait
every output is NaN, and at its wait every input must be what it was. Collectives take the branch that NCCL takes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.activations import HostCopies, TensorPair
from megatron.core.communication import Communicator
from megatron.core.topology import Topology
from megatron.core.transport.torch_distributed import Message, Reduction, Transport


def poison(tensor: Tensor) -> None:
    """NaN, or an integer that no result has; FP8 travels as bytes, of which 255 is NaN."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(255 if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).min)


def is_poisoned(tensor: Tensor) -> bool:
    untouched = torch.empty_like(tensor)
    poison(untouched)
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == untouched).all())


def bits(tensor: Tensor) -> Tensor:
    """All bytes; padding, which nobody wrote, may be NaN, which does not equal itself."""
    return tensor.flatten().view(torch.uint8)


def is_part_of(part: Tensor, whole: Tensor) -> bool:
    """Whether ``part`` lies in the memory of ``whole``."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and (
        whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes
    )


class LateWork:
    """The collectives under way that began together."""

    def __init__(self, works: Sequence[Any], sent: Sequence[Tensor], arriving: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._works, self._sent, self._arriving = works, [(one, one.clone()) for one in sent], arriving
        self._is_over = False
        for place, _ in arriving:
            poison(place)

    def is_completed(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        for work in self._works:
            work.wait()
        for tensor, before in self._sent:
            assert torch.equal(bits(tensor), bits(before)), "an input was changed before its collective was waited for"
        for place, result in self._arriving:
            assert is_poisoned(place), "an output was written before its collective was waited for"
            place.copy_(result)


class LateTransport(Transport):
    """Starts real collectives on copies."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.prefers_messages = self.hides_completion = False

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> LateWork:
        result = tensor.clone()
        return LateWork([super().all_reduce(result, reduction)], [], [(tensor, result)])

    def all_gather(self, output: Tensor, tensor: Tensor) -> LateWork:
        result = torch.empty_like(output)
        work = super().all_gather(result, tensor.clone())
        size = dist.get_world_size(self._group)
        # In place, this rank's part is an input.
        arriving = [pair for pair in zip(output.chunk(size), result.chunk(size)) if not is_part_of(pair[0], tensor)]
        return LateWork([work], [tensor], arriving)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> LateWork:
        result = torch.empty_like(output)
        work = super().reduce_scatter(result, tensor.clone())
        # In place, the output is no input any more.
        parts = tensor.chunk(dist.get_world_size(self._group))
        return LateWork([work], [part for part in parts if not is_part_of(output, part)], [(output, result)])

    def all_to_all(self, output: Tensor, tensor: Tensor) -> LateWork:
        result = torch.empty_like(output)
        return LateWork([super().all_to_all(result, tensor.clone())], [tensor], [(output, result)])

    def exchange_rows(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> LateWork:
        result = torch.empty_like(output)
        work = super().exchange_rows(result, tensor.clone(), received, sent)
        return LateWork([work], [tensor], [(output, result)])

    def exchange(self, messages: Sequence[Message]) -> Sequence[LateWork]:
        sent = [tensor for kind, tensor, _ in messages if kind == "send"]
        arriving = [(tensor, torch.empty_like(tensor)) for kind, tensor, _ in messages if kind == "receive"]
        results = iter([result for _, result in arriving])
        works = super().exchange(
            [(kind, tensor.clone() if kind == "send" else next(results), peer) for kind, tensor, peer in messages]
        )
        return [LateWork(works, sent, arriving)]

    def send(self, tensor: Tensor, target: int) -> LateWork:
        return LateWork([super().send(tensor.clone(), target)], [tensor], [])

    def receive(self, tensor: Tensor, source: int) -> LateWork:
        result = torch.empty_like(tensor)
        return LateWork([super().receive(result, source)], [], [(tensor, result)])


class LateCommunicator(Communicator):
    @cached_property
    def transport(self) -> Transport:
        return LateTransport(self.process_group)


class LateTopology(Topology):
    """All communicators are late."""

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        return LateCommunicator(ranks, self.rank, name, twin, exclusive, self._timeout)


class LateCopy:
    """A copy that happens when it is waited for."""

    def __init__(self, pairs: Sequence[TensorPair]) -> None:
        self._pairs = list(pairs)
        for target, _ in self._pairs:
            poison(target)

    def wait(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)
        self._pairs.clear()

    synchronize = wait


class LateCopies:
    """A copy stream (:class:`megatron.core.activations.CopyStream`) that is never ahead of its events."""

    def copy(self, pairs: Sequence[TensorPair]) -> LateCopy:
        return LateCopy(pairs)


def late_host_copies(device: torch.device) -> HostCopies:
    """Copies to the host and back for CPU offload."""
    return HostCopies(device, LateCopies(), LateCopies())
