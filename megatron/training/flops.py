"""The peak FLOP/s of a device, and model FLOPs utilisation (MFU).

MFU counts the FLOPs of the model: half of the square for causal attention, no recompute. The peak is dense (without 2:4
sparsity).
"""

import re
import time
from collections.abc import Mapping

import torch

from megatron.core.ops.matmul import linear

_LARGEST_PROBE = 4096


def achieved_tflops(tokens_per_s_per_gpu: float, flops_per_token: float) -> float:
    """Model TFLOP/s of one device at a rate of tokens per second and device."""
    return tokens_per_s_per_gpu * flops_per_token / 1e12


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak_tflops: float | None) -> float | None:
    """Model FLOPs utilisation as a fraction of the dense peak; None when the peak is unknown."""
    if peak_tflops is None:
        return None
    return achieved_tflops(tokens_per_s_per_gpu, flops_per_token) / peak_tflops


DENSE_PEAK_TFLOPS: tuple[tuple[str, Mapping[str, float]], ...] = (
    (r"V100", {"fp16": 125.0, "fp32": 15.7}),
    (r"A[18]00", {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (r"A10G?\b", {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    (r"L40S", {"bf16": 362.0, "fp16": 362.0, "fp8": 733.0, "tf32": 183.0, "fp32": 91.6}),
    (r"H[12]00 NVL", {"bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "tf32": 417.5, "fp32": 60.0}),
    (r"H[18]00.*(PCIe|HBM2e)", {"bf16": 756.5, "fp16": 756.5, "fp8": 1513.0, "tf32": 378.0, "fp32": 51.2}),
    (r"(H|GH)[128]00", {"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp32": 66.9}),
    (r"H20\b", {"bf16": 148.0, "fp16": 148.0, "fp8": 296.0, "tf32": 74.0, "fp32": 44.0}),
    (r"GB[23]00", {"bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0, "tf32": 1250.0, "fp32": 80.0}),
    (r"B[23]00", {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0, "tf32": 1125.0, "fp32": 75.0}),
    (r"B100", {"bf16": 1750.0, "fp16": 1750.0, "fp8": 3500.0}),
)
"""Dense peak in TFLOP/s by precision, for the first pattern found in the device's name, from NVIDIA's data
sheets (half of the figures they quote with sparsity). ``fp32`` is without tensor cores."""


def device_peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of a GPU in TFLOP/s, or None where it is not known.

    ``device_name`` is from ``torch.cuda.get_device_name``; ``dtype`` is bf16, fp16, fp8, tf32 or fp32.
    """
    if "MIG" in device_name:
        return None  # a slice of a GPU, with a fraction of the peak
    for pattern, peaks in DENSE_PEAK_TFLOPS:
        if re.search(rf"\b{pattern}", device_name):
            return peaks.get(dtype)
    return None


_PROBE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    # CPUs compute FP8 products in wider formats.
    "fp8": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def measured_peak_tflops(dtype: str, seconds: float = 0.25) -> float:
    """Best rate in TFLOP/s of a square matrix product on this process's CPU threads.

    The size doubles from 64 while two larger products would fit into ``seconds``. ``dtype`` as in
    :func:`device_peak_tflops`, or ``fp64``.
    """
    deadline = time.perf_counter() + seconds
    best, size = 0.0, 64
    operand = torch.ones(size, size, dtype=_PROBE_DTYPES[dtype])
    while True:
        start = time.perf_counter()
        linear(operand, operand)
        end = time.perf_counter()
        best = max(best, 2.0 * size**3 / (end - start) / 1e12)
        if end >= deadline:
            return best
        # Twice the size takes eight times as long.
        if size < _LARGEST_PROBE and 16 * (end - start) < deadline - end:
            size *= 2
            operand = torch.ones(size, size, dtype=operand.dtype)


def resolve_peak(device_name: str | None, dtype: str, peak_tflops: float | None = None) -> tuple[float | None, str]:
    """The peak for MFU, and a sentence for the log with its source.

    ``device_name`` is None on a CPU, whose peak is measured. ``peak_tflops`` (``--peak-tflops``) overrides it.
    """
    if peak_tflops is not None:
        return peak_tflops, f"MFU is relative to {peak_tflops:g} TFLOP/s, given by --peak-tflops."
    if device_name is None:
        measured = measured_peak_tflops(dtype)
        probe = "bf16" if dtype == "fp8" else dtype
        return measured, f"MFU is relative to {measured:.3g} TFLOP/s, measured on this CPU ({probe} product)."
    known = device_peak_tflops(device_name, dtype)
    if known is None:
        return None, f"MFU is not reported: no {dtype} peak of {device_name} is known; give --peak-tflops."
    return known, f"MFU is relative to {known:g} TFLOP/s, the dense {dtype} peak of {device_name}."
