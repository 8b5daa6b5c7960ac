"""Facts on which the figures of the other lines depend: the machine, versions, clocks, and rates of single
operations."""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import time

import torch

from benchmarks.gpu_lines.line_run import LineRun
from benchmarks.lib.step_timing import copy_rate, product_rates, seconds_of
from megatron.core.device import device_name
from megatron.training.flops import device_peak_tflops

PACKAGES = ("torch", "triton", "transformer-engine", "flash-attn-3", "transformers", "nvidia-cudnn-cu13")
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
COMPILERS = ("gcc", "g++", "nvcc")
CLOCKS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.total"
LAUNCHES = 2000


def run(run: LineRun) -> None:
    with run.result("machine") as figures:
        figures |= {"cores": len(os.sched_getaffinity(0)), "memory_GB": host_memory() / 1e9}
        figures |= {f"free_GB {path}": shutil.disk_usage(path).free / 1e9 for path in ("/tmp", str(run.out))}
        figures["memlock"] = "unlimited" if memlock() < 0 else memlock()
        figures |= {name: shutil.which(name) or "absent" for name in COMPILERS}
    with run.result("versions") as figures:
        figures |= {"python": platform.python_version(), "torch_built_for": torch.version.cuda}
        figures |= {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
        figures |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    with run.result("device") as figures:
        figures["name"] = device_name(run.device) or platform.processor() or platform.machine()
        if run.device.type == "cuda":
            figures |= clocks()
            figures["bf16_peak_tflops"] = device_peak_tflops(figures["name"], "bf16")
            figures["cudnn"] = torch.backends.cudnn.version()
    with run.result("square GEMMs, TFLOP/s") as figures:
        figures |= product_rates(run.device, 64 if run.is_tiny else None)
    with run.result("copies, GB/s") as figures:
        figures["on the device"] = copy_rate(run.device, 2**16 if run.is_tiny else None) / 1e9
        figures |= host_copies(run.device, 2**16 if run.is_tiny else 2**30)
    with run.result("launches") as figures:
        figures["host_us_per_launch"] = launch_seconds(run.device) * 1e6


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memlock() -> int:
    """Bytes that a process may lock, and so register for copies; -1 without a limit."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def clocks() -> dict[str, str]:
    """Clocks and limits of the GPU, by nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    values = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
    return dict(zip(CLOCKS.split(","), map(str.strip, values.split(",")), strict=True))


def host_copies(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Bytes per second between the device and pinned and pageable memory of the host."""
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    pinned = pageable.pin_memory() if device.type == "cuda" else pageable
    actions = {
        "pinned to device": lambda: on_device.copy_(pinned, non_blocking=True),
        "device to pinned": lambda: pinned.copy_(on_device, non_blocking=True),
        "pageable to device": lambda: on_device.copy_(pageable),
    }
    return {name: num_bytes / seconds_of(action, device, repeats=4, warmup=1) / 1e9 for name, action in actions.items()}


def launch_seconds(device: torch.device) -> float:
    """Seconds in which the host launches a kernel that has almost no work."""
    one = torch.zeros(1, device=device)
    for _ in range(10):
        one.add_(1)
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(LAUNCHES):
        one.add_(1)
    seconds = time.perf_counter() - started
    _synchronize(device)
    return seconds / LAUNCHES


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
