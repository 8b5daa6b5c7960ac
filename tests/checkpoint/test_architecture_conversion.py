"""Every architecture from and to Hugging Face's files: its features, config.json, and every tensor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.architectures.registry import ARCHITECTURES, PRESET_VOCABULARIES, PRESETS, architecture_of
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint import conversion
from megatron.checkpoint.hugging_face import HuggingFaceMapping
from megatron.checkpoint.hugging_face_config import config_fields, transformer_config_of
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, convert
from megatron.commands.weight_checkpoints import model_flags
from megatron.config.model import preset
from megatron.errors import CheckpointError
from megatron.training.checkpoints.comparison import check_architecture
from tests.checkpoint.models import (
    LLAMA,
    MAVERICK,
    MIXTRAL,
    QWEN3_MOE,
    SCOUT,
    assert_equal,
    import_of,
    random_model,
    weights_under,
)

transformers: Any = pytest.importorskip("transformers")

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""The fields of config.json in published models."""

# --- features ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama"),
        (replace(LLAMA, add_qkv_bias=True), "qwen2"),
        (replace(LLAMA, qk_layernorm=True), "qwen3"),
        (MIXTRAL, "mixtral"),
        (QWEN3_MOE, "qwen3_moe"),
        (replace(QWEN3_MOE, moe_layer_freq="1"), "qwen3_moe"),
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


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x22b", "qwen3-30b-a3b", "llama4-scout", "llama4-maverick"])
def test_the_parameters_of_a_preset_are_all_there(name: str) -> None:
    """And tests/model compares the number with transformers."""
    config = preset(name).resolve(PRESET_VOCABULARIES[name], 1, 1)
    sections = HuggingFaceMapping.of(config).theirs.values()
    assert sum(torch.Size(section.shape).numel() for section in sections) == config.num_parameters()


def test_the_small_llama4_has_every_kind_of_layer() -> None:
    config = preset("tiny-llama4").resolve(1000, 1, 64)
    assert set(config.moe_layers()) == set(config.rope_layers()) == {True, False}
    assert config.attention_chunk_size is not None and config.attention_temperature_tuning


# --- config.json ---------------------------------------------------------------------------------------------


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
    ("step", "dense", "frequency"), [(1, [], "1"), (1, [1], "2"), (2, [], "[0,1,0]"), (1, [2], "[1,1,0]")]
)
def test_the_layers_with_experts_have_the_shortest_name(step: int, dense: list[int], frequency: str) -> None:
    fields = config_fields(QWEN3_MOE, "float32") | {"decoder_sparse_step": step, "mlp_only_layers": dense}
    assert transformer_config_of(fields, "config.json").moe_layer_freq == frequency


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
        transformer_config_of(config_fields(config, "float32") | changes, "DIR/config.json")
    assert words in str(refusal.value) and str(refusal.value).startswith("DIR/config.json: ")


# --- tensors: tests/model and tests/end_to_end compare what they compute with transformers -----------------------


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (MIXTRAL, torch.float32),
        (QWEN3_MOE, torch.float32),
        (SCOUT, torch.float32),
        (MAVERICK, torch.float32),
        (MAVERICK, torch.bfloat16),
    ],
    ids=["mixtral", "qwen3_moe", "scout", "maverick", "maverick in bf16"],
)
def test_back_again_every_bit_is_the_same_and_transformers_loads_it(
    config: TransformerConfig, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that end inside an expert, and with the experts of a layer in several files."""
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 640)
    random_model(config).to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours")))
    convert(ToHuggingFace(str(tmp_path / "ours"), str(tmp_path / "back"), max_shard_size="8000", tokenizer=False))
    assert_equal(weights_under(tmp_path / "back"), weights_under(tmp_path / "hf"))
    model, again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype) for name in ("hf", "back")
    )
    assert type(again) is type(model)
    tokens = torch.arange(34).remainder(config.vocab_size).view(2, 17)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_dense_layer_in_the_place_of_experts_is_refused(tmp_path: Path) -> None:
    random_model(QWEN3_MOE).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"mlp_only_layers": []}))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.mlp\.gate\.weight and 12 others"):
        import_of(tmp_path)
    config.write_text(json.dumps(fields | {"mlp_only_layers": [0, 2]}))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.mlp\.gate_proj\.weight"):
        import_of(tmp_path)


MISSING = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
SURPLUS = MISSING.replace("3.w3", "4.w3")
STACKED = "model.layers.2.feed_forward.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("config", "name", "changed", "words"),
    [
        (MIXTRAL, MISSING, None, rf"lacks {MISSING}"),
        (MIXTRAL, SURPLUS, torch.zeros(24, 16), r"experts\.4\.w3\.weight, which a Mixtral model does not have"),
        (SCOUT, STACKED, torch.zeros(3, 16, 12), r"has shape \[3, 16, 12\], but config\.json requires \[4, 16, 12\]"),
        (SCOUT, STACKED, torch.zeros(4, 12, 16), r"has shape \[4, 12, 16\], but config\.json requires \[4, 16, 12\]"),
    ],
    ids=["missing", "surplus", "an expert too few", "not transposed"],
)
def test_other_experts_than_those_of_config_json_are_refused(
    config: TransformerConfig, name: str, changed: Tensor | None, words: str, tmp_path: Path
) -> None:
    random_model(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | ({} if changed is None else {name: changed})
    if changed is None:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        import_of(tmp_path)
