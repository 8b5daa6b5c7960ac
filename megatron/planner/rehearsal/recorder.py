"""Counts the memory and the launches of a rank at once, on tensors without memory."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron.planner.launches import DEVICE, LaunchRecorder
from megatron.planner.memory import CUDA_BLOCK, Kind, MemoryTracker
from megatron.torch_compat import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")


class UnitRecorder(LaunchRecorder):
    """A :class:`LaunchRecorder` that also tracks storages, with ``rounds_up`` as torch's allocator on GPUs does.

    Tensors are on the meta device. With ``is_fake`` they are fake ones on a CPU, which takes three times as long and
    has an attention kernel for fp32 and fp64.
    """

    def __init__(self, is_fake: bool = False, rounds_up: bool = True) -> None:
        self.device = CPU if is_fake else DEVICE
        super().__init__(self.device)
        if rounds_up:
            self._block = CUDA_BLOCK

    @property
    def tensors(self) -> AbstractContextManager[object]:
        """Where tensors are made."""
        return FakeTensorMode(allow_non_fake_inputs=True) if self.device == CPU else nullcontext()

    def empty(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the recorded device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def counts(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) if self.device == CPU else tensor.is_meta

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        MemoryTracker.mark(self, tensor, kind)

    def mark_if_temporary(self, tensor: Tensor, kind: Kind) -> None:
        MemoryTracker.mark_if_temporary(self, tensor, kind)
