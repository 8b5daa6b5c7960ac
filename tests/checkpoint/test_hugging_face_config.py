"""config.json of every architecture: its features, the presets, and what would be another model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.architectures.catalog import ARCHITECTURES, PRESET_VOCABULARIES, PRESETS, architecture_of
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.config import config_fields, transformer_config_of
from megatron.commands.checkpoints import model_flags
from megatron.config.model import ModelConfig, preset
from megatron.errors import CheckpointError
from megatron.training.checkpoints.comparison import check_architecture
from tests.checkpoint.models import LLAMA, MIXTRAL, QWEN3_MOE, SCOUT
from tests.model.reference import YARN_VARIANTS

transformers: Any = pytest.importorskip("transformers")

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""The fields of config.json in published models."""
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def fields_of(config: TransformerConfig, **changes: Any) -> dict[str, Any]:
    """The fields of a model without those of rotary embeddings, some changed, or (None) null."""
    fields = config_fields(config, "float32")
    return {name: value for name, value in fields.items() if not name.startswith("rope")} | changes


# --- features ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama"),
        (replace(LLAMA, add_qkv_bias=True), "qwen2"),
        (replace(LLAMA, qk_layernorm=True), "qwen3"),
        (replace(LLAMA, qk_layernorm=True, window_size="6,0"), "qwen3"),
        (replace(LLAMA, add_qkv_bias=True, window_size="6,0", window_attn_skip_freq="2"), "qwen2"),
        (MIXTRAL, "mixtral"),
        (QWEN3_MOE, "qwen3_moe"),
        (replace(QWEN3_MOE, moe_layer_freq="1"), "qwen3_moe"),
        *((replace(config, padded_vocab_size=config.vocab_size), "llama") for config in YARN_VARIANTS.values()),
        *(
            (replace(SCOUT, **changes), "llama4_text")
            for changes in (
                {},
                {"qk_l2_norm": False},
                {"moe_layer_freq": "[0,1,0,1]"},
                {"no_rope_freq": "0"},
                {"no_rope_freq": "[0,1,1,0]"},
                {"attention_chunk_size": None},
                {"attention_temperature_tuning": False},
            )
        ),
    ],
)
def test_features_distinguish_architectures_and_survive_config_json(config: TransformerConfig, name: str) -> None:
    family = architecture_of(config)
    assert family is not None and family.name == name
    fields = json.loads(json.dumps(config_fields(config, "float32")))
    assert transformer_config_of(fields, "config.json") == config
    # And as transformers 5 writes it again.
    theirs = transformers.AutoConfig.for_model(**fields).to_dict()
    assert transformer_config_of(theirs, "config.json") == config


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (MIXTRAL, {"moe_layer_freq": "[0,1,1]"}, "dense layers and MoE layers: choose a model of llama"),
        (MIXTRAL, {"add_qkv_bias": True}, "MoE layers, add_qkv_bias True"),
        (QWEN3_MOE, {"moe_router_pre_softmax": True}, "moe_router_pre_softmax True"),
        (MIXTRAL, {"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size 8"),
        (MIXTRAL, {"moe_router_score_function": "sigmoid"}, "moe_router_score_function sigmoid"),
        (MIXTRAL, {"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor 2.5"),
        (QWEN3_MOE, {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "moe_router_num_groups 2"),
        (SCOUT, {"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size 8"),
        (SCOUT, {"moe_shared_expert_intermediate_size": None}, "qk_l2_norm True"),
        (SCOUT, {"moe_apply_probs_on_input": False}, "moe_router_score_function sigmoid"),
        (SCOUT, {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias True"),
        (SCOUT, {"num_experts": None}, "dense layers"),
        (LLAMA, {"num_attention_heads": 5}, "not divisible by its heads (5)"),
    ],
)
def test_features_of_no_architecture_are_refused_by_name(
    config: TransformerConfig, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        config_fields(replace(config, **changes), "float32")
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("wanted", "saved", "words"),
    [
        (MIXTRAL, LLAMA, r"X is a dense model, but --num-experts is 4: give it experts first \(.* upcycle\)"),
        (LLAMA, MIXTRAL, "X has 4 experts, but the flags describe a dense model: use the flags of the run"),
        (MIXTRAL, replace(MIXTRAL, num_experts=8), "--num-experts is 4 here and 8 there"),
        (MIXTRAL, replace(MIXTRAL, moe_router_topk=1), "--moe-router-topk is 2 here and 1 there"),
        (MIXTRAL, replace(MIXTRAL, moe_layer_freq="2"), "--moe-layer-freq is 1 here and 2 there"),
    ],
)
def test_a_checkpoint_with_other_experts_is_refused(
    wanted: TransformerConfig, saved: TransformerConfig, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_architecture(vars(wanted), vars(saved), "X")


@pytest.mark.parametrize("config", [LLAMA, YARN_VARIANTS["mscale"]], ids=["llama", "yarn"])
def test_flags_made_of_an_architecture_resolve_to_it(config: TransformerConfig) -> None:
    assert ModelConfig.of(config).resolve(config.vocab_size, 1, 1) == replace(config, padded_vocab_size=128)


# --- presets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_config_json(name: str) -> None:
    config = preset(name).resolve(128256, 1, 1)
    config = replace(config, padded_vocab_size=config.vocab_size)
    family = architecture_of(config)
    assert family is not None and name in family.presets
    fields = json.loads(json.dumps(config_fields(config, "bfloat16", 1, 2)))
    assert transformer_config_of(fields, "config.json") == config
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["torch_dtype"]) == (1, 2, "bfloat16")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_fields_of_a_published_model_are_the_preset(name: str) -> None:
    wanted = preset(name).resolve(PRESET_VOCABULARIES[name], 1, 1)
    assert transformer_config_of(PUBLISHED[name], "config.json") == wanted
    assert model_flags(wanted) == ["--model", name]
    if name.startswith("llama4"):
        assert wanted.rope_layers() == (True, True, True, False) * 12


def test_the_small_llama4_has_every_kind_of_layer() -> None:
    config = preset("tiny-llama4").resolve(1000, 1, 64)
    assert set(config.moe_layers()) == set(config.rope_layers()) == {True, False}
    assert config.attention_chunk_size is not None and config.attention_temperature_tuning


# --- fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "base", "factor"),
    [
        ({"rope_theta": 7.0, "rope_scaling": None}, 7.0, None),
        ({}, 10000.0, None),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "llama3", **LLAMA3}}, 7.0, 32.0),
        ({"rope_theta": 7.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 7.0, 32.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7, **LLAMA3}}, 7.0, 32.0),
    ],
)
def test_both_spellings_of_rotary_embeddings(spelling: dict[str, Any], base: float, factor: float | None) -> None:
    config = transformer_config_of(fields_of(LLAMA, **spelling), "config.json")
    assert (config.rotary_base, config.use_rope_scaling) == (base, factor is not None)
    if factor is not None:
        assert (config.rope_scaling_factor, config.rope_scaling_original_length) == (factor, 512)


def test_the_factors_between_which_frequencies_are_interpolated_are_read_and_written() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 1.5, "high_freq_factor": 1.5}
    config = transformer_config_of(fields_of(LLAMA, rope_scaling=scaling), "config.json")
    assert (config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor) == (1.5, 1.5)
    assert config_fields(config, "float32")["rope_scaling"] == scaling


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    given: dict[str, Any] = {"model_type": family}
    if family != "llama4_text":
        given |= {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 9, "num_hidden_layers": 2}
        given |= {"num_attention_heads": 32, "norm_topk_prob": True}
    theirs = transformers.AutoConfig.for_model(**given).to_dict()
    assert transformer_config_of(given, "config.json") == transformer_config_of(theirs, "config.json")


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        *(
            (QWEN3_MOE, {"decoder_sparse_step": step, "mlp_only_layers": dense})
            for step, dense in ((1, []), (1, [1]), (2, []), (1, [0, 2]), (1, [2]), (2, [0]))
        ),
        (SCOUT, {"interleave_moe_layer_step": 2}),
        (SCOUT, {"interleave_moe_layer_step": 3}),
        (SCOUT, {"moe_layers": [0, 3], "interleave_moe_layer_step": 2}),
        (SCOUT, {"moe_layers": [2]}),
        (SCOUT, {"no_rope_layers": [0, 1, 1, 0]}),
        (SCOUT, {"no_rope_layers": [], "no_rope_layer_interval": 3}),
        (SCOUT, {"no_rope_layer_interval": 2}),
    ],
    ids=str,
)
def test_the_kinds_of_layers_are_those_of_the_model_of_transformers(
    config: TransformerConfig, fields: dict[str, Any]
) -> None:
    given = config_fields(config, "float32")
    for name in ("moe_layers", "interleave_moe_layer_step", "no_rope_layers", "layer_types"):
        given.pop(name, None)
    given |= fields
    found = transformer_config_of(given, "config.json")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**given))
    layers = model.model.layers
    if config is SCOUT:
        assert found.moe_layers() == tuple(layer.is_moe_layer for layer in layers)
        assert found.rope_layers() == tuple(bool(layer.self_attn.use_rope) for layer in layers)
    else:
        assert found.moe_layers() == tuple(hasattr(layer.mlp, "experts") for layer in layers)


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"layer_types": ["full_attention"] * 4}, None),
        ({"layer_types": None}, 8),
        ({"attention_chunk_size": None}, None),
    ],
)
def test_chunks_can_be_absent(changes: dict[str, Any], chunk: int | None) -> None:
    config = transformer_config_of(config_fields(SCOUT, "float32") | changes, "config.json")
    assert config.attention_chunk_size == chunk


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (LLAMA, {"model_type": "mistral"}, "model_type is 'mistral'"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA, {"attention_bias": True}, "attention_bias is True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"auto_map": {"AutoModel": "code.py"}}, "auto_map"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 0}}, "low_freq_factor is 0"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5}},
            "high_freq_factor 4.0 is below",
        ),
        (LLAMA, {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        (LLAMA, {"rope_scaling": {**YARN, "factor": 0.5}}, "factor is 0.5"),
        (LLAMA, {"rope_scaling": {**YARN, "extrapolation_factor": 2.0}}, "'extrapolation_factor' is not implemented"),
        (LLAMA, {"rope_scaling": {**YARN, "truncate": 1}}, "truncate is 1"),
        (LLAMA, {"rope_scaling": {**YARN, "beta_fast": "32"}}, "beta_fast is '32'"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA, {"rope_parameters": [1]}, "rope_parameters is"),
        (LLAMA, {"vocab_size": None}, "vocab_size is missing"),
        (LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        (LLAMA, {"num_key_value_heads": 3}, "not divisible by num_key_value_heads 3"),
        (LLAMA, {"head_dim": 5}, "head_dim 5 is odd"),
        (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window is 4096, not None: attention has no sliding window"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0"),
        (MIXTRAL, {"num_experts_per_tok": "2"}, "num_experts_per_tok is '2'"),
        (QWEN3_MOE, {"norm_topk_prob": False}, "norm_topk_prob is False, not True: the weights of the chosen"),
        (QWEN3_MOE, {"norm_topk_prob": None}, "norm_topk_prob is False, not True"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window is True"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias is True"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2]}, "leave no layer with experts"),
        (QWEN3_MOE, {"decoder_sparse_step": 4}, "leave no layer with experts"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers is 1, not a list"),
        (SCOUT, {"num_experts_per_tok": 2}, "num_experts_per_tok is 2, not 1: the weight of an expert multiplies its"),
        (SCOUT, {"attention_bias": True}, "attention_bias is True"),
        (SCOUT, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (SCOUT, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (SCOUT, {"moe_layers": []}, "leave no layer with experts"),
        (SCOUT, {"moe_layers": 1}, "moe_layers is 1, not a list"),
        (SCOUT, {"moe_layers": None, "interleave_moe_layer_step": 9}, "leave no layer with experts"),
        (SCOUT, {"no_rope_layers": [1, 1]}, "no_rope_layers has 2 elements for 4 layers"),
        (SCOUT, {"no_rope_layers": "1110"}, "no_rope_layers is '1110', not a list"),
        (SCOUT, {"layer_types": ["chunked_attention"] * 4}, "layer_types differs from no_rope_layers"),
        (SCOUT, {"layer_types": ["sliding_attention"] * 4}, "layer_types has other layers than 'chunked_attention'"),
        (SCOUT, {"floor_scale": 0.5}, "floor_scale is 0.5, not a positive integer"),
        (SCOUT, {"attn_scale": "0.1"}, "attn_scale is '0.1'"),
        (SCOUT, {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
        (SCOUT, {"use_qk_norm": 1}, "use_qk_norm is 1, not a boolean"),
        (SCOUT, {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        (SCOUT, {"intermediate_size_mlp": 0}, "intermediate_size_mlp is 0"),
        (SCOUT, {"architectures": ["Llama4ForConditionalGeneration"]}, "only Llama4ForCausalLM can be converted"),
    ],
)
def test_a_config_json_of_another_model_is_refused_by_field(
    config: TransformerConfig, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        transformer_config_of(fields_of(config, **changes), "DIR/config.json")
    assert words in str(refusal.value) and str(refusal.value).startswith("DIR/config.json: ")
