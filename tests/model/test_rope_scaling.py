"""Scaled rotary frequencies are those of transformers: Llama 3's scaling for random factors, also for equal ones, as
Llama 4 Scout has; and YaRN: frequencies, attention factor, whole models, config.json."""

import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.config import config_fields, transformer_config_of
from megatron.config.command_line import parse_command_line
from megatron.core.models.transformer import frequencies_of
from megatron.core.ops.rope import rotary_frequencies
from megatron.errors import CheckpointError
from megatron.training.checkpoints.comparison import check_architecture
from tests.model.reference import (
    TOLERANCE,
    YARN_VARIANTS,
    compare_on_rank,
    expected,
    fp32_means_fp64,
    relative_error,
    with_yarn,
)
from tests.rank_pool import RankPool

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


# YaRN


every_variant = pytest.mark.parametrize("config", YARN_VARIANTS.values(), ids=YARN_VARIANTS.keys())


def settings_of(config: TransformerConfig) -> Any:
    """The configuration of transformers 5, from our config.json."""
    return transformers.AutoConfig.for_model(**json.loads(json.dumps(config_fields(config, "float32"))))


@every_variant
def test_frequencies_and_attention_factor_are_those_of_transformers(config: TransformerConfig) -> None:
    settings = settings_of(config)
    with fp32_means_fp64():
        frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](settings, "cpu")
    torch.testing.assert_close(frequencies_of(config), frequencies, rtol=1e-14, atol=0.0)
    assert config.rotary_magnitude == pytest.approx(factor, rel=1e-15)


@every_variant
def test_a_model_equals_transformers(config: TransformerConfig) -> None:
    assert compare_on_rank(config, 1, False) < TOLERANCE


def test_a_model_in_fp32_equals_transformers() -> None:
    assert compare_on_rank(YARN_VARIANTS["defaults"], 1, False, dtype=torch.float32) < 1e-5


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (4, True)])
def test_ranks_equal_transformers(four_ranks: RankPool, tp: int, sequence_parallel: bool) -> None:
    config = replace(YARN_VARIANTS["short"], padded_vocab_size=64)
    assert max(four_ranks.run(compare_on_rank, config, tp, sequence_parallel, world_size=tp)) < TOLERANCE


def test_each_field_changes_the_model() -> None:
    """Otherwise the cases above would prove less than they seem to."""
    base = with_yarn(4.0, 512)
    logits = expected(base).logits
    changes: dict[str, Any] = {
        "beta_fast": 9.0,
        "beta_slow": 3.0,
        "attention_factor": 1.5,
        "correction_range_round_to_int": False,
    }
    for name, value in changes.items():
        other = expected(replace(base, **{f"yarn_{name}": value})).logits
        assert relative_error(other, logits) > 1e-4, name
    assert relative_error(expected(replace(base, position_embedding_type="rope")).logits, logits) > 1e-3


# config.json; tests/checkpoint/test_hugging_face_config.py has what is refused


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        {"type": "yarn", "factor": 4.0},
        {**YARN, "factor": None},
        {**YARN, "beta_fast": 0, "beta_slow": None, "truncate": None},
        {**YARN, "mscale": 0.5},
        {**YARN, "mscale": 0.5, "mscale_all_dim": 0},
        {**YARN, "mscale": 0.5, "mscale_all_dim": 0.25, "attention_factor": 1.125},
        {**YARN, "attention_factor": None},
    ],
)
def test_absent_and_null_fields_mean_what_transformers_takes_them_for(rope: dict[str, Any]) -> None:
    fields = {**config_fields(with_yarn(4.0, 16), "float32"), "rope_scaling": rope}
    settings = transformers.LlamaConfig(**{name: value for name, value in fields.items() if "rope" not in name})
    settings.rope_parameters = {"rope_theta": fields["rope_theta"], "rope_type": "yarn", **rope}
    if rope.get("truncate", True) is None:
        settings.rope_parameters.pop("truncate")
    with fp32_means_fp64():
        frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](settings, "cpu")
    found = transformer_config_of(fields, "config.json")
    torch.testing.assert_close(frequencies_of(found), frequencies, rtol=1e-14, atol=0.0)
    assert found.rotary_magnitude == pytest.approx(factor, rel=1e-15)


# Flags


def test_the_longest_sequence_is_the_original_one_times_the_factor() -> None:
    sizes = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --position-embedding-type yarn"
    given = f"{sizes} --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 512".split()
    assert parse_command_line(given).model.resolve(64, 1, 64).max_position_embeddings == 2048


def test_only_a_new_run_begins_yarn_with_the_weights_of_another_model() -> None:
    yarn, other = YARN_VARIANTS["defaults"], YARN_VARIANTS["other betas"]
    saved = asdict(yarn) | {"position_embedding_type": "rope", "yarn_rotary_scaling_factor": None}
    for there in (saved, asdict(other)):
        check_architecture(asdict(yarn), there, "It", weights_only=True)
        with pytest.raises(CheckpointError, match=r"--yarn-rotary-scaling-factor is 4\.0 here"):
            check_architecture(asdict(yarn), there, "It")
    with pytest.raises(CheckpointError, match="--position-embedding-type is rope here and yarn there"):
        check_architecture(saved, asdict(yarn), "It", weights_only=True)
    with pytest.raises(CheckpointError, match=r"--rotary-base is 10000\.0 here and 7\.0 there"):
        check_architecture(asdict(yarn), saved | {"rotary_base": 7.0}, "It", weights_only=True)
