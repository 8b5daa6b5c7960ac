"""The memory and the error counters of the GPU of each rank, read through NVML where nvidia-ml-py is installed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from megatron.features.known_product.listener import operands
from megatron.features.preflight.check import Check, Node, Result, Site, Verdict, found
from megatron.operation.causes import Cause

FREE_FRACTION = 0.9
"""Of the memory of a GPU before the model is built; the CUDA context of this process uses a few hundred MiB."""
_SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "heat", 0x80: "power brake"}
"""Reasons of NVML for low clocks that are faults. Power caps and idle clocks are normal."""
_LOAD_SECONDS = 1.0
_SIZE = 4096
_GIB = 2**30


def find_nvml() -> Any:
    """The module of nvidia-ml-py; None if it is not installed or there is no driver."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the module's own errors are only known with the module
        return None
    return nvml


@contextmanager
def watched_xids(nvml: Any, handle: Any) -> Iterator[list[int]]:
    """The Xid errors of a GPU that the driver reports meanwhile, complete at the end."""
    xids: list[int] = []
    events = nvml.nvmlEventSetCreate()
    try:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        yield xids
        with suppress(nvml.NVMLError):  # also its timeout, which means that there is no event
            while True:
                xids.append(int(nvml.nvmlEventSetWait_v2(events, 10).eventData))
    finally:
        nvml.nvmlEventSetFree(events)


@dataclass(frozen=True)
class Gpu(Check):
    name = "GPU"
    seconds = 20.0
    remedy = "the driver of the GPU does not answer: reset the GPU or reboot the node"

    nvml: Callable[[], Any] = find_nvml
    uuid: Callable[[torch.device], str] = lambda device: f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    load: Callable[[torch.device], None] = lambda device: _multiply(device)

    def measure(self, site: Site) -> Any:
        if site.device.type != "cuda":
            return None
        nvml = self.nvml()
        if nvml is None:
            return {}
        handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid(site.device))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        measured: dict[str, Any] = {"free": memory.free, "total": memory.total}
        # Each counter is missing on some GPUs.
        with suppress(nvml.NVMLError), watched_xids(nvml, handle) as xids:
            self.load(site.device)
            measured["xids"] = xids
        with suppress(nvml.NVMLError):
            measured["slowdown"] = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        with suppress(nvml.NVMLError):
            measured["uncorrected"] = nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        with suppress(nvml.NVMLError):
            _, _, measured["remap_pending"], measured["remap_failed"] = nvml.nvmlDeviceGetRemappedRows(handle)
        return measured

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        gpus = dict(found(measured))
        if not gpus:
            return self.ok("no GPUs")
        results = [
            self.result(verdict, value, limit, remedy, rank, nodes, cause)
            for rank, one in gpus.items()
            for verdict, cause, value, limit, remedy in _findings(one)
        ]
        unknown = [rank for rank, one in gpus.items() if not one]
        if unknown:
            value = f"not checked on {len(unknown)} of {len(gpus)} ranks: nvidia-ml-py is not installed"
            results.append(Result(self.name, Verdict.WARNING, value, "", "pip install nvidia-ml-py"))
        return results or self.ok(f"{len(gpus)} GPUs without errors")


def _findings(one: dict[str, Any]) -> Iterator[tuple[Verdict, Cause | None, str, str, str]]:
    """(verdict, cause, value, limit, remedy) of each finding about a GPU."""
    broken = Verdict.FAILURE, Cause.SILENT_CORRUPTION
    if one.get("free", 1) < FREE_FRACTION * one.get("total", 1):
        value = f"{one['free'] / _GIB:.1f} of {one['total'] / _GIB:.1f} GiB of GPU memory free"
        remedy = "end the processes that use this GPU (nvidia-smi lists them)"
        yield Verdict.FAILURE, None, value, f"{FREE_FRACTION:.0%}", remedy
    if one.get("uncorrected"):
        value = f"{one['uncorrected']} uncorrected memory errors since the driver was loaded"
        yield *broken, value, "0", "reset the GPU; if they return, replace it"
    if one.get("remap_failed"):
        yield *broken, "a row of the memory could not be remapped", "none", "replace the GPU"
    if one.get("remap_pending"):
        yield *broken, "a remapped row waits for a reset", "none", "reset the GPU or reboot the node"
    if one.get("xids"):
        xids = ", ".join(map(str, one["xids"]))
        yield *broken, f"Xid {xids} during the check", "none", "see the kernel log, and reset the GPU"
    reasons = [text for bit, text in _SLOWDOWNS.items() if one.get("slowdown", 0) & bit]
    if reasons:
        remedy = "check cooling and power supply of the node"
        yield Verdict.WARNING, Cause.STRAGGLER, f"clocks are lowered by {', '.join(reasons)}", "none", remedy


def _multiply(device: torch.device) -> None:
    """Load the GPU, so that faults show and clocks are those of the training."""
    left, right = operands(_SIZE, torch.bfloat16, device)
    deadline = time.monotonic() + _LOAD_SECONDS
    while time.monotonic() < deadline:
        torch.matmul(left, right)
        torch.cuda.synchronize(device)
