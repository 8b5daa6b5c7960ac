"""Facts on which the figures of the other stages depend: versions, clocks, and the rates of single operations."""

import importlib.metadata
import os
import platform
import subprocess

import torch

from benchmarks.gpu_day_stages.checks import StageRun
from benchmarks.product_rates import copy_rate, product_rates
from megatron.core.device import device_name
from megatron.training.flops import device_peak_tflops

PACKAGES = ("torch", "triton", "transformer-engine", "flash-attn-3", "transformers", "nvidia-cudnn-cu13")
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
CLOCKS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.total"


def run(stage: StageRun) -> None:
    with stage.check("versions") as figures:
        figures |= {"python": platform.python_version(), "cores": os.cpu_count(), "torch_built_for": torch.version.cuda}
        figures |= {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
        figures |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    with stage.check("device") as figures:
        figures["name"] = device_name(stage.device) or platform.processor() or platform.machine()
        if stage.device.type == "cuda":
            figures |= clocks()
            figures["bf16_peak_tflops"] = device_peak_tflops(figures["name"], "bf16")
            figures["cudnn"] = torch.backends.cudnn.version()
    with stage.check("square GEMMs, TFLOP/s") as figures:
        figures |= product_rates(stage.device, 64 if stage.is_tiny else None)
    with stage.check("copies") as figures:
        figures["device_GB_per_s"] = copy_rate(stage.device, 2**16 if stage.is_tiny else None) / 1e9


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
