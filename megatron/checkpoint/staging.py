"""Copies of a GPU's tensors to the memory that a rank shares with its background writer.

The GPU writes directly to host memory that is registered (pinned) with CUDA, while the host launches the next copy. A
copy to other (pageable) memory passes through a buffer of the driver, and the host waits for it.
"""

import logging
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from megatron.core.offload import CudaCopyStream, PlainCopies, TensorPair

_logger = logging.getLogger(__name__)


class CudaHostMemory:
    """Registration of host memory with CUDA."""

    def register(self, address: int, size: int, device: torch.device) -> str | None:
        """Register a mapping; the error, if CUDA refuses."""
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(address, size, 0)
        if int(error) == 0:
            return None
        # CUDA keeps the error, and torch would report it after the next kernel. This kernel's check removes it.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        return f"error {int(error)}"

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class Staging:
    """Copies into one mapping at a time, on a stream of their own."""

    def __init__(
        self,
        host_memory: CudaHostMemory | None = None,
        open_stream: Callable[[torch.device], CudaCopyStream] = CudaCopyStream,
    ) -> None:
        self._host_memory = host_memory or CudaHostMemory()
        self._open_stream = open_stream
        self._stream: CudaCopyStream | None = None
        self._address: int | None = None
        """Address of the mapping that CUDA has registered, or refused to register."""
        self._is_registered = False
        self._has_warned = False

    def copy(self, memory: mmap.mmap, pairs: Sequence[TensorPair], device: torch.device) -> None:
        """Copy each source of ``pairs``, on ``device``, to its target in ``memory``; complete on return.

        The copies start when the computation so far is complete. The first use of a mapping registers it.
        """
        if device.type == "cpu":
            PlainCopies().copy(pairs)
            return
        self._register(memory, device)
        if self._stream is None:
            self._stream = self._open_stream(device)
        self._stream.copy(pairs).synchronize()

    def _register(self, memory: mmap.mmap, device: torch.device) -> None:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if address == self._address:
            return
        assert not self._is_registered, "a mapping is released before another replaces it"
        self._address = address
        error = self._host_memory.register(address, len(memory), device)
        self._is_registered = error is None
        if error is not None and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "--async-save copies to pageable memory, which makes saves pause training for longer: CUDA cannot "
                "register %.1f GB of host memory (%s). Raise the limit of locked memory (ulimit -l), or the memory of "
                "the container.",
                len(memory) / 1e9,
                error,
            )

    def release(self) -> None:
        """Call before the mapping is freed: another may get its address."""
        if self._is_registered:
            assert self._address is not None
            self._host_memory.unregister(self._address)
        self._address, self._is_registered = None, False
