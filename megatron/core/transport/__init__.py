"""Transports: the operations of one process group, as :class:`megatron.core.communication.Communicator` uses them.

    torch_distributed.py           Transport: the interface, by torch.distributed over NCCL or gloo
    shared_memory.py               SharedMemoryTransport: CPU processes of one host; what it leaves out is gloo's

Others replace them: ``operation/waits.py`` measures the waits of a transport, ``planner/simulated_rank.py`` sends
nothing, ``tests/late_transport.py`` delays results until their wait, as GPUs do, and ``tests/staged_transport.py`` lets
ranks share a GPU, by gloo between host buffers.
"""

import platform
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.transport.shared_memory import SharedMemoryTransport
from megatron.core.transport.torch_distributed import Transport

LARGEST_GROUP = 8
"""Ranks of the largest group that shares memory: each adds the parts of all the others."""


def open_transport(
    process_group: Any, ranks: Sequence[int], rank: int, timeout: timedelta | None, shares_memory: bool
) -> Transport:
    """The transport of a group: through shared memory if it is allowed and all ranks can. Collective."""
    is_gloo = dist.get_backend(process_group) == "gloo"
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    if shares_memory and is_gloo and is_ordered and len(ranks) <= LARGEST_GROUP:
        with suppress(OSError):
            return SharedMemoryTransport(process_group, ranks, rank, timeout)
    return Transport(process_group)
