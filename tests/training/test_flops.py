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


BF16_PEAKS = {
    312.0: ["A100-SXM4-80GB"],
    125.0: ["A10"],
    989.4: ["H100 80GB HBM3", "H200", "GH200 480GB", "H800"],
    756.5: ["H100 PCIe", "H800 PCIe"],
    835.5: ["H100 NVL", "H200 NVL"],
    148.0: ["H20"],
    2250.0: ["B200"],
    2500.0: ["GB200"],
    None: ["H100 80GB HBM3 MIG 1g.10gb", "GeForce GTX 1080"],
}


def test_peaks_are_dense_and_found_by_the_name_that_the_driver_reports() -> None:
    for peak, names in BF16_PEAKS.items():
        assert [device_peak_tflops(f"NVIDIA {name}", "bf16") for name in names] == [peak] * len(names)
    assert device_peak_tflops("NVIDIA A100 80GB PCIe", "tf32") == 156.0
    assert device_peak_tflops("NVIDIA H100 80GB HBM3", "fp8") == 1978.9
    assert device_peak_tflops("NVIDIA A100-SXM4-80GB", "fp8") is None


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
    known, unknown, measured = (resolve_peak(name, "bf16") for name in ("NVIDIA H100 PCIe", "Some Accelerator", None))
    assert resolve_peak("NVIDIA H100 PCIe", "bf16", 800.0) == (
        800.0,
        "MFU is relative to 800 TFLOP/s, given by --peak-tflops.",
    )
    assert known[0] == 756.5 and "dense bf16 peak of NVIDIA H100 PCIe" in known[1]
    assert unknown[0] is None and "--peak-tflops" in unknown[1]
    assert measured[0] is not None and "measured on this CPU" in measured[1]
