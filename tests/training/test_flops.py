"""Model FLOPs and the peaks they are measured against."""

import time
from dataclasses import replace
from typing import Any

import pytest

from megatron.config.model import preset
from megatron.training.flops import DENSE_PEAK_TFLOPS, device_peak_tflops, measured_peak_tflops, mfu, resolve_peak


def _llama3(size: str, seq_length: int = 8192, **changes: Any) -> float:
    model = preset("llama3.1-405b" if size == "405b" else f"llama3-{size}")
    return replace(model.resolve(128256, 1, 8192), **changes).flops_per_token(seq_length)


@pytest.mark.parametrize(("size", "gflop", "digits"), [("8b", 51.47, 2), ("70b", 449.2, 1), ("405b", 2523.96, 2)])
def test_llama3_at_8192_tokens(size: str, gflop: float, digits: int) -> None:
    assert round(_llama3(size) / 1e9, digits) == gflop


def test_attention_is_counted_at_half_of_the_square() -> None:
    """A token attends to (s + 1) / 2 others on average: 2 products x 2 FLOPs x 3 passes of each."""
    growth = _llama3("8b", seq_length=2 * 8192) - _llama3("8b")
    assert growth == 32 * 3 * (2 * 2 * 4096) * 8192 / 2


def test_weights_count_six_flops_each_head_included_and_embedding_not() -> None:
    assert _llama3("8b", vocab_size=128256 + 1) - _llama3("8b") == 6 * 4096
    assert _llama3("8b", num_query_groups=9) - _llama3("8b") == 6 * 32 * 2 * 4096 * 128


def test_mfu_of_the_llama3_paper() -> None:
    """Table 4 of the Llama 3 paper: 405B on 16,384 H100s runs at 400 TFLOP/s per GPU, 41% of the peak."""
    tokens_per_s = 400e12 / _llama3("405b")
    utilisation = mfu(tokens_per_s, _llama3("405b"), device_peak_tflops("NVIDIA H100 80GB HBM3", "bf16"))
    assert utilisation == pytest.approx(0.41, abs=0.01)
    assert mfu(tokens_per_s, _llama3("405b"), None) is None


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA H800 PCIe", "bf16", 756.5),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce GTX 1080", "bf16", None),
    ],
)
def test_peaks_are_dense_and_found_by_the_name_that_the_driver_reports(
    name: str, dtype: str, peak: float | None
) -> None:
    assert device_peak_tflops(name, dtype) == peak


def test_every_peak_doubles_from_one_precision_to_the_next() -> None:
    """Catches a figure with sparsity that slipped in: tensor cores double with each halving of the width."""
    for _, peaks in DENSE_PEAK_TFLOPS:
        for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8")):
            if wide in peaks and narrow in peaks:
                assert peaks[narrow] / peaks[wide] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64", "fp8"])
def test_a_cpu_is_measured_quickly_in_any_precision(dtype: str) -> None:
    start = time.process_time()
    peak = measured_peak_tflops(dtype, seconds=0.1)
    assert 0 < peak < 100
    assert time.process_time() - start < 1.0  # 0.1 s, and room for a slow machine


def test_the_source_of_the_peak_is_told() -> None:
    assert resolve_peak("NVIDIA H100 PCIe", "bf16", 800.0) == (
        800.0,
        "MFU is relative to 800 TFLOP/s, given by --peak-tflops.",
    )
    known, sentence = resolve_peak("NVIDIA H100 PCIe", "bf16")
    assert known == 756.5
    assert "dense bf16 peak of NVIDIA H100 PCIe" in sentence
    unknown, sentence = resolve_peak("Some Accelerator", "bf16")
    assert unknown is None
    assert "--peak-tflops" in sentence
    measured, sentence = resolve_peak(None, "fp32")
    assert measured is not None
    assert "measured on this CPU" in sentence
