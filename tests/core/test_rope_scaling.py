"""The scaling of rotary frequencies is that of transformers for random factors, also for equal ones, as Llama 4 Scout
has."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.ops.rope import rotary_frequencies
from tests.model.reference import fp32_means_fp64

transformers: Any = pytest.importorskip("transformers")
rope_utils: Any = pytest.importorskip("transformers.modeling_rope_utils")


def frequencies_of_transformers(
    head_size: int, base: float, dtype: torch.dtype, factor: float, length: int, low: float, high: float
) -> Tensor:
    fields = {"factor": factor, "original_max_position_embeddings": length}
    fields |= {"low_freq_factor": low, "high_freq_factor": high}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=2**20,
        rope_parameters={"rope_type": "llama3", "rope_theta": base, **fields},
    )
    with fp32_means_fp64() if dtype == torch.float64 else nullcontext():
        frequencies, attention_scale = rope_utils._compute_llama3_parameters(config, "cpu")
    assert attention_scale == 1.0 and frequencies.dtype == dtype
    expected: Tensor = frequencies
    return expected


def our_frequencies(head_size: int, base: float, factor: float, length: int, low: float, high: float) -> Tensor:
    scaling = {"scaling_factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return rotary_frequencies(head_size, base, original_length=length, **scaling)


@given(
    head_size=st.sampled_from([8, 64, 128]),
    base=st.floats(100.0, 1e6),
    factor=st.floats(1.0, 64.0),
    length=st.integers(16, 2**15),
    low=st.floats(0.25, 8.0),
    width=st.just(0.0) | st.floats(0.1, 8.0),
)
def test_scaled_frequencies_are_those_of_transformers(
    head_size: int, base: float, factor: float, length: int, low: float, width: float
) -> None:
    scaling = (factor, length, low, low + width)
    found = our_frequencies(head_size, base, *scaling)
    assert found.dtype == torch.float64 and found.isfinite().all()
    # Beside a step, rounding decides whether a frequency is divided.
    turns = length * rotary_frequencies(head_size, base) / (2 * math.pi)
    assume(width > 0 or bool(((turns / low - 1).abs() > 1e-5).all()))
    # A narrow ramp between the two limits magnifies the rounding of the turns.
    steepness = factor * (low + width) / width if width else 0.0
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        expected = frequencies_of_transformers(head_size, base, dtype, *scaling)
        rounding = 10 * torch.finfo(dtype).eps * steepness
        torch.testing.assert_close(found, expected.double(), rtol=tolerance + rounding, atol=0.0)


def test_equal_bounds_keep_a_wave_at_the_bound() -> None:
    """Where transformers divides zero by zero."""
    one_turn = rotary_frequencies(4, 4.0)[1].item() * 8 / (2 * math.pi)
    assert our_frequencies(4, 4.0, 2.0, 8, one_turn, one_turn).tolist() == [1.0, 0.5]
    below = one_turn * 1.01
    assert our_frequencies(4, 4.0, 2.0, 8, below, below).tolist() == [1.0, 0.25]
    assert our_frequencies(8, 10000.0, 16.0, 64, 64 / (2 * math.pi), 64 / (2 * math.pi)).isfinite().all()
