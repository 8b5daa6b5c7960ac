"""Copies of a GPU's tensors to shared memory, which is registered once; they are complete before the writer starts.

A log stands in for the GPU; tests/gpu/test_staging_copies.py needs one.
"""

import logging
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron.checkpoint.background import AsyncSaveBackend, BackgroundProcess, CudaHostMemory, Staging
from megatron.checkpoint.checkpointing import save_checkpoint
from megatron.checkpoint.safetensors_file import SafetensorsImage
from megatron.core.offload import CudaCopyStream, TensorPair

GPU = torch.device("cuda", 0)


class Gpu(CudaHostMemory):
    """Host memory and a stream that write what they do into a log."""

    def __init__(self, log: list[str], error: str | None = None) -> None:
        self._log, self._error = log, error
        self._registered: dict[int, int] = {}

    def register(self, address: int, size: int, device: torch.device) -> str | None:
        self._log.append("register" if self._error is None else "refuse")
        if self._error is None:
            self._registered[address] = size
        return self._error

    def unregister(self, address: int) -> None:
        del self._registered[address]
        self._log.append("unregister")

    def open_stream(self, device: torch.device) -> CudaCopyStream:
        self._log.append("open stream")
        return cast(CudaCopyStream, self)

    def copy(self, pairs: Sequence[TensorPair]) -> "Gpu":
        """As :meth:`CudaCopyStream.copy`: complete when its event is, the GPU itself."""
        self._log.append("copy")
        self._pairs = pairs
        for target, _ in pairs:
            assert self._error or any(
                start <= target.data_ptr() <= start + size for start, size in self._registered.items()
            )
        return self

    def synchronize(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)
        self._log.append("wait")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log, in which the writer's jobs appear as well; the tensors count as those of a GPU."""
    log: list[str] = []
    submit = BackgroundProcess.submit

    def logged(process: BackgroundProcess, job: Mapping[str, Any]) -> int:
        log.append(job["kind"])
        return submit(process, job)

    monkeypatch.setattr(BackgroundProcess, "submit", logged)
    monkeypatch.setattr(SafetensorsImage, "device", GPU)
    return log


def save(root: Path, iteration: int, size: int, process: BackgroundProcess) -> None:
    tensors = {"rows": torch.arange(size).float(), "turned": torch.arange(12.0).view(3, 4).T, "step": torch.tensor(7)}
    saving = AsyncSaveBackend(root, iteration, process)
    save_checkpoint(root, iteration, tensors, {}, saving=saving)
    assert (saving.finish_own() or saving.finish()) is None
    direct = root / "direct"
    save_checkpoint(direct, iteration, tensors, {})
    file = f"iter_{iteration:07d}/rank_00000.safetensors"
    assert (root / file).read_bytes() == (direct / file).read_bytes()


@pytest.mark.processes
def test_the_writer_starts_when_all_copies_to_registered_memory_are_complete(tmp_path: Path, log: list[str]) -> None:
    gpu = Gpu(log)
    process = BackgroundProcess(60.0, Staging(gpu, gpu.open_stream))
    save(tmp_path, 1, 100, process)
    assert log == ["register", "open stream", "copy", "wait", "write", "commit"]
    log.clear()
    save(tmp_path, 2, 50, process)  # in the memory of the first
    assert log == ["copy", "wait", "write", "commit"]
    log.clear()
    save(tmp_path, 3, 10_000, process)  # too large for it
    assert log == ["unregister", "register", "copy", "wait", "write", "commit"]
    log.clear()
    process.close()
    assert log == ["unregister"]


@pytest.mark.processes
def test_memory_that_cannot_be_registered_is_pageable_and_warned_of_once(
    tmp_path: Path, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(log, error="error 2")
    process = BackgroundProcess(60.0, Staging(gpu, gpu.open_stream))
    with caplog.at_level(logging.WARNING):
        for iteration, size in enumerate((100, 50, 10_000), 1):
            save(tmp_path, iteration, size, process)
    process.close()
    assert log.count("refuse") == 2  # once for each mapping
    assert "unregister" not in log and log.count("wait") == 3
    (warning,) = caplog.messages
    assert warning.startswith("--async-save copies to pageable memory") and "(error 2)" in warning


def test_tensors_of_a_cpu_need_no_gpu() -> None:
    log: list[str] = []
    gpu = Gpu(log)
    memory, image = mmap.mmap(-1, 4096), SafetensorsImage({"a": torch.arange(5.0), "b": torch.tensor(7)})
    assert image.device == torch.device("cpu")
    staging = Staging(gpu, gpu.open_stream)
    staging.copy(memory, image.lay_out(memory), image.device)
    staging.release()
    assert log == []
    assert torch.frombuffer(memory, dtype=torch.float32, offset=image.size - 20, count=5).tolist() == [0, 1, 2, 3, 4]


class Runtime:
    """CUDA's registration, which returns ``error``."""

    def __init__(self, error: int) -> None:
        self._error = error
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address))
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.mark.parametrize(("error", "found"), [(0, None), (712, "error 712")])
def test_an_error_of_cuda_does_not_reach_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch, error: int, found: str | None
) -> None:
    """CUDA keeps it for the check after the next kernel, which would fail."""
    runtime, kernels = Runtime(error), []

    def launch(*size: int, device: torch.device) -> None:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", launch)
    memory = CudaHostMemory()
    assert memory.register(4096, 100, GPU) == found
    memory.unregister(4096)
    assert kernels == ([] if error == 0 else [GPU])
    assert runtime.calls == [("register", 4096), ("unregister", 4096)]
