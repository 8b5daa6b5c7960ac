"""YaRN is YaRN of transformers: frequencies, attention factor, whole models, config.json."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.config import config_fields, transformer_config_of
from megatron.config.command_line import parse_command_line
from megatron.config.model import ModelConfig
from megatron.core.models.transformer import frequencies_of
from megatron.core.ops.rope import apply_rotary, rotary_frequencies, rotary_table, yarn_frequencies
from megatron.errors import CheckpointError
from megatron.training.checkpoints.comparison import check_architecture
from tests.model.reference import TOLERANCE, compare_on_rank, expected, fp32_means_fp64, relative_error
from tests.model.yarn_variants import VARIANTS, with_yarn
from tests.rank_pool import RankPool

transformers: Any = pytest.importorskip("transformers")
rope_utils: Any = pytest.importorskip("transformers.modeling_rope_utils")


every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


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


def test_fast_pairs_are_kept_and_slow_ones_divided() -> None:
    ratio = rotary_frequencies(128, 500000.0) / yarn_frequencies(
        128, 500000.0, scaling_factor=4.0, original_length=8192
    )
    turns = rotary_frequencies(128, 500000.0) * 8192 / (2 * math.pi)
    assert (ratio[turns > 40] == 1).all() and (ratio[turns < 0.8] == 4).all()
    assert (ratio.diff() >= 0).all() and ((ratio > 1) & (ratio < 4)).sum() > 10


def test_the_attention_factor_scales_queries_and_keys_and_their_gradients() -> None:
    frequencies, positions = rotary_frequencies(8, 100.0), torch.arange(5)
    plain = rotary_table(frequencies, positions, torch.float64)
    scaled = rotary_table(frequencies, positions, torch.float64, 1.25)
    torch.manual_seed(2)
    leaf = torch.randn(5, 2, 40, dtype=torch.float64, requires_grad=True)  # three heads rotated, two not
    wanted = torch.cat((1.25 * apply_rotary(leaf * 1.0, plain, 24)[..., :24], leaf[..., 24:]), dim=-1)
    found = apply_rotary(leaf * 1.0, scaled, 24)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-14)
    weights = torch.randn_like(found)
    (gradient,) = torch.autograd.grad((found * weights).sum(), leaf)
    (wanted_gradient,) = torch.autograd.grad((wanted * weights).sum(), leaf)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0.0, atol=1e-14)


@every_variant
def test_a_model_equals_transformers(config: TransformerConfig) -> None:
    assert compare_on_rank(config, 1, False) < TOLERANCE


def test_a_model_in_fp32_equals_transformers() -> None:
    assert compare_on_rank(VARIANTS["defaults"], 1, False, dtype=torch.float32) < 1e-5


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (4, True)])
def test_ranks_equal_transformers(four_ranks: RankPool, tp: int, sequence_parallel: bool) -> None:
    config = replace(VARIANTS["short"], padded_vocab_size=64)
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


# --- config.json ---------------------------------------------------------------------------------------------


@every_variant
def test_config_json_comes_back(config: TransformerConfig) -> None:
    config = replace(config, padded_vocab_size=config.vocab_size)
    fields = json.loads(json.dumps(config_fields(config, "bfloat16")))
    assert transformer_config_of(fields, "config.json") == config
    saved = settings_of(config).to_dict()  # the spelling of transformers 5
    assert transformer_config_of(saved, "config.json") == config


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


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({**YARN, "factor": 0.5}, "factor is 0.5"),
        ({**YARN, "extrapolation_factor": 2.0}, "'extrapolation_factor' is not implemented"),
        ({**YARN, "truncate": 1}, "truncate is 1"),
        ({**YARN, "beta_fast": "32"}, "beta_fast is '32'"),
    ],
)
def test_other_fields_are_refused(rope: dict[str, Any], words: str) -> None:
    fields = {**config_fields(with_yarn(4.0, 16), "float32"), "rope_scaling": rope}
    with pytest.raises(CheckpointError, match=words):
        transformer_config_of(fields, "config.json")


# --- flags ---------------------------------------------------------------------------------------------------


def test_flags_made_of_yarn_resolve_to_it() -> None:
    config = VARIANTS["mscale"]
    found = ModelConfig.of(config).resolve(config.vocab_size, 1, 1)
    assert replace(found, padded_vocab_size=config.padded_vocab_size) == config


def test_the_longest_sequence_is_the_original_one_times_the_factor() -> None:
    sizes = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --position-embedding-type yarn"
    given = f"{sizes} --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 512".split()
    assert parse_command_line(given).model.resolve(64, 1, 64).max_position_embeddings == 2048


def test_only_a_new_run_begins_yarn_with_the_weights_of_another_model() -> None:
    yarn, other = VARIANTS["defaults"], VARIANTS["other betas"]
    saved = asdict(yarn) | {"position_embedding_type": "rope", "yarn_rotary_scaling_factor": None}
    for there in (saved, asdict(other)):
        check_architecture(asdict(yarn), there, "It", weights_only=True)
        with pytest.raises(CheckpointError, match=r"--yarn-rotary-scaling-factor is 4\.0 here"):
            check_architecture(asdict(yarn), there, "It")
    with pytest.raises(CheckpointError, match="--position-embedding-type is rope here and yarn there"):
        check_architecture(saved, asdict(yarn), "It", weights_only=True)
    with pytest.raises(CheckpointError, match=r"--rotary-base is 10000\.0 here and 7\.0 there"):
        check_architecture(asdict(yarn), saved | {"rotary_base": 7.0}, "It", weights_only=True)
