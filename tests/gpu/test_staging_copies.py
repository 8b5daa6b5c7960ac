"""The copy of --async-save from a GPU: the bytes, and bytes per second into registered and into pageable memory.

pytest -s tests/gpu/test_staging_copies.py --device cuda
"""

import time
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess, CudaHostMemory, SharedMemory
from megatron.checkpoint.checkpointing import load_checkpoint, save_checkpoint
from megatron.checkpoint.safetensors_file import SafetensorsImage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZE = 1 << 30
"""Bytes of the measured copies."""


class Refusing(CudaHostMemory):
    """Registers nothing, so that memory stays pageable."""

    def register(self, address: int, size: int, device: torch.device) -> str | None:
        return "test"

    def unregister(self, address: int) -> None:
        raise AssertionError("nothing is registered")


def state() -> dict[str, torch.Tensor]:
    """Of several widths; a view that is not contiguous, a scalar, and a tensor of the CPU."""
    numbers = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    return {
        "moments": numbers,
        "halves": numbers.bfloat16().view(1024, -1).T,
        "bytes": numbers.to(torch.uint8)[:1001],
        "step": torch.tensor(7, device="cuda"),
        "random": torch.arange(100),
    }


def test_a_save_has_the_values_at_its_time(tmp_path: Path) -> None:
    """Although the computation before it is still under way, and the tensors change afterwards."""
    process = BackgroundProcess(60.0)
    for iteration in (1, 2):
        tensors = state()
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy.T / 4096
        for tensor in tensors.values():
            tensor.add_(iteration)
        expected = {name: tensor.cpu() for name, tensor in state().items()}
        saving = AsyncSaveBackend(tmp_path, iteration, process)
        save_checkpoint(tmp_path, iteration, tensors, {}, saving=saving)
        for tensor in tensors.values():
            tensor.zero_()
        assert (saving.finish_own() or saving.finish()) is None
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        load_checkpoint(tmp_path, iteration, loaded)
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor + iteration), name
    process.close()


def test_a_refused_registration_does_not_disturb_the_next_kernel() -> None:
    address = 4096  # not mapped
    memory = CudaHostMemory()
    assert memory.register(address, 4096, torch.device("cuda", torch.cuda.current_device())) is not None
    assert torch.ones(1, device="cuda").item() == 1


def copy_rate(memory: SharedMemory) -> float:
    """GB/s of the second copy, into memory that exists and is registered."""
    process = BackgroundProcess(60.0, memory)
    image = SafetensorsImage({str(number): torch.zeros(SIZE // 64, device="cuda") for number in range(16)})
    process.fill_memory(image)
    started = time.perf_counter()
    process.fill_memory(image)
    seconds = time.perf_counter() - started
    process.close()
    return image.size / seconds / 1e9


def test_registered_memory_is_copied_to_faster() -> None:
    rates = {"registered": copy_rate(SharedMemory()), "pageable": copy_rate(SharedMemory(Refusing()))}
    for kind, rate in rates.items():
        print(f"\ncopy to {kind} memory: {rate:.1f} GB/s")
    assert rates["registered"] > rates["pageable"]
