"""The interface of a transport, and ``torch.distributed`` behind it: NCCL on GPUs, gloo's sockets on CPUs."""

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from megatron.torch_compat import all_gather_single, reduce_scatter_single

Reduction = Literal["sum", "max"]
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

Message = tuple[Literal["send", "receive"], Tensor, int]
"""A tensor to send or receive, and the global rank of the peer."""


class Transport:
    """The operations of one process group. They are asynchronous unless they return None; ranks are global."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        is_gloo = bool(dist.get_backend(process_group) == "gloo")
        self.prefers_messages = is_gloo
        """Whether messages between all pairs of ranks are faster than collectives."""
        self.hides_completion = is_gloo
        """Whether ``is_completed`` of a send is unreliable."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Any:
        return dist.all_reduce(tensor, _REDUCTIONS[reduction], group=self._group, async_op=True)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
        return all_gather_single(output, tensor, group=self._group, async_op=True)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Any:
        return reduce_scatter_single(output, tensor, group=self._group, async_op=True)

    def all_to_all(self, output: Tensor, tensor: Tensor) -> Any:
        return dist.all_to_all_single(output, tensor, group=self._group, async_op=True)

    def exchange_rows(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> Any:
        """All-to-all of ``sent[i]`` rows to the group's rank i and ``received[i]`` rows from it."""
        return dist.all_to_all_single(output, tensor, list(received), list(sent), group=self._group, async_op=True)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, source, group=self._group)

    def exchange(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Start all ``messages`` together."""
        operations = {"send": dist.isend, "receive": dist.irecv}
        return dist.batch_isend_irecv(
            [dist.P2POp(operations[kind], tensor, peer, self._group) for kind, tensor, peer in messages]
        )

    def send(self, tensor: Tensor, target: int) -> Any:
        return dist.isend(tensor, target, self._group)

    def receive(self, tensor: Tensor, source: int) -> Any:
        return dist.irecv(tensor, source, self._group)
