"""Models with experts: the family of an architecture, config.json, and the tensors of every expert."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.architectures.registry import PRESET_VOCABULARIES, architecture_of
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint import conversion
from megatron.checkpoint.conversion import HuggingFaceImport
from megatron.checkpoint.hugging_face import HuggingFaceMapping
from megatron.checkpoint.hugging_face_config import config_fields, transformer_config_of
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, convert
from megatron.config.model import preset
from megatron.errors import CheckpointError
from megatron.training.checkpoints.comparison import check_architecture

transformers: Any = pytest.importorskip("transformers")

DENSE = TransformerConfig(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=17,
    padded_vocab_size=17,
    max_position_embeddings=64,
)
MIXTRAL = replace(DENSE, num_experts=4, moe_ffn_hidden_size=24)
QWEN3_MOE = replace(MIXTRAL, qk_layernorm=True, moe_ffn_hidden_size=8, moe_router_topk=3, moe_layer_freq="[1,1,0]")


# --- families ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (DENSE, "llama"),
        (MIXTRAL, "mixtral"),
        (QWEN3_MOE, "qwen3_moe"),
        (replace(QWEN3_MOE, moe_layer_freq="1"), "qwen3_moe"),
        (replace(DENSE, qk_layernorm=True), "qwen3"),
    ],
)
def test_experts_and_norms_distinguish_the_families(config: TransformerConfig, name: str) -> None:
    family = architecture_of(config)
    assert family is not None and family.name == name


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(MIXTRAL, moe_layer_freq="[0,1,1]"), "dense layers and MoE layers: choose a model of llama"),
        (replace(MIXTRAL, add_qkv_bias=True), "MoE layers, add_qkv_bias True"),
        (replace(QWEN3_MOE, moe_router_pre_softmax=True), "moe_router_pre_softmax True"),
        (replace(MIXTRAL, moe_shared_expert_intermediate_size=8), "moe_shared_expert_intermediate_size 8"),
        (replace(MIXTRAL, moe_router_score_function="sigmoid"), "moe_router_score_function sigmoid"),
        (replace(MIXTRAL, moe_router_topk_scaling_factor=2.5), "moe_router_topk_scaling_factor 2.5"),
        (replace(QWEN3_MOE, moe_router_num_groups=2, moe_router_group_topk=1), "moe_router_num_groups 2"),
    ],
)
def test_a_combination_of_no_family_is_refused_by_its_features(config: TransformerConfig, words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        config_fields(config, "float32")
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("wanted", "saved", "words"),
    [
        (MIXTRAL, DENSE, r"X is a dense model, but --num-experts is 4: give it experts first \(.* upcycle\)"),
        (DENSE, MIXTRAL, "X has 4 experts, but the flags describe a dense model: use the flags of the run"),
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


# --- config.json ---------------------------------------------------------------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(name: str) -> None:
    wanted = preset(name).resolve(PRESET_VOCABULARIES[name], 1, 1)
    assert transformer_config_of(PUBLISHED[name], "config.json") == wanted


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE, replace(QWEN3_MOE, moe_layer_freq="1")])
def test_config_json_describes_the_same_model_here_and_in_transformers(config: TransformerConfig) -> None:
    fields = json.loads(json.dumps(config_fields(config, "float32")))
    assert transformer_config_of(fields, "config.json") == config
    # And as transformers 5 writes it again.
    theirs = transformers.AutoConfig.for_model(**fields)
    assert transformer_config_of(theirs.to_dict(), "config.json") == config


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    given = {"model_type": family, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 9}
    given |= {"num_hidden_layers": 2, "num_attention_heads": 8, "norm_topk_prob": True}
    theirs = transformers.AutoConfig.for_model(**given).to_dict()
    assert transformer_config_of(given, "config.json") == transformer_config_of(theirs, "config.json")


@pytest.mark.parametrize(
    ("step", "dense", "frequency"),
    [(1, [], "1"), (1, [1], "2"), (2, [], "[0,1,0]"), (1, [0, 2], "[0,1,0]"), (1, [2], "[1,1,0]"), (2, [0], "[0,1,0]")],
)
def test_the_layers_with_experts_are_read(step: int, dense: list[int], frequency: str) -> None:
    fields = config_fields(QWEN3_MOE, "float32") | {"decoder_sparse_step": step, "mlp_only_layers": dense}
    assert transformer_config_of(fields, "config.json").moe_layer_freq == frequency
    theirs = transformers.AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    has_experts = tuple(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert transformer_config_of(fields, "config.json").moe_layers() == has_experts


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
    ],
)
def test_what_would_be_another_model_is_refused_by_name(
    config: TransformerConfig, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        transformer_config_of(config_fields(config, "float32") | changes, "DIR/config.json")
    assert words in str(refusal.value) and str(refusal.value).startswith("DIR/config.json: ")


# --- tensors -------------------------------------------------------------------------------------------------


def their_model(config: TransformerConfig) -> Any:
    """A model of transformers with random weights."""
    torch.manual_seed(5)
    settings = transformers.AutoConfig.for_model(**config_fields(config, "float32"))
    return transformers.AutoModelForCausalLM.from_config(settings)


def import_of(directory: Path) -> dict[str, Tensor]:
    """The global tensors of this code, assembled from their chunks."""
    found = HuggingFaceImport(directory, None, lambda count: None)
    tensors = {}
    for name, tensor in found.tensors.items():
        whole = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for chunk in tensor.chunks:
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
            whole[place] = found.read(name, chunk)
        tensors[name] = whole
    return tensors


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE])
def test_the_rows_of_every_expert_are_where_the_model_has_them(config: TransformerConfig, tmp_path: Path) -> None:
    """Of each expert gate, then up: the order in which transformers stacks them when it loads the files."""
    model = their_model(config)
    model.save_pretrained(tmp_path)
    ours = import_of(tmp_path)
    for number, layer in enumerate(model.model.layers):
        prefix = f"model/layers.{number}.mlp"
        if not config.moe_layers()[number]:
            assert f"{prefix}.router.weight" not in ours
            assert torch.equal(ours[f"{prefix}.linear_fc2.weight"], layer.mlp.down_proj.weight)
            continue
        assert f"{prefix}.linear_fc1.weight" not in ours
        assert torch.equal(ours[f"{prefix}.router.weight"], layer.mlp.gate.weight)
        assert torch.equal(ours[f"{prefix}.experts.linear_fc1.weight"], layer.mlp.experts.gate_up_proj.flatten(0, 1))
        assert torch.equal(ours[f"{prefix}.experts.linear_fc2.weight"], layer.mlp.experts.down_proj.flatten(0, 1))


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE])
def test_the_names_are_those_of_the_files_of_transformers(config: TransformerConfig, tmp_path: Path) -> None:
    their_model(config).save_pretrained(tmp_path)
    theirs = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: section.shape for name, section in HuggingFaceMapping.of(config).theirs.items()} == theirs


@pytest.mark.parametrize("name", ["mixtral-8x22b", "qwen3-30b-a3b"])
def test_the_parameters_of_a_preset_are_all_there(name: str) -> None:
    config = preset(name).resolve(PRESET_VOCABULARIES[name], 1, 1)
    sections = HuggingFaceMapping.of(config).theirs.values()
    assert sum(torch.Size(section.shape).numel() for section in sections) == config.num_parameters()


def test_a_dense_layer_in_the_place_of_experts_is_refused(tmp_path: Path) -> None:
    their_model(QWEN3_MOE).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"mlp_only_layers": []}))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.mlp\.gate\.weight and 12 others"):
        import_of(tmp_path)
    config.write_text(json.dumps(fields | {"mlp_only_layers": [0, 2]}))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.mlp\.gate_proj\.weight"):
        import_of(tmp_path)


def test_a_missing_and_a_surplus_expert_are_refused(tmp_path: Path) -> None:
    their_model(MIXTRAL).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    last = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != last}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"lacks {last}"):
        import_of(tmp_path)
    save_file(tensors | {last.replace("3.w3", "4.w3"): tensors[last].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.4\.w3\.weight, which a Mixtral model does not have"):
        import_of(tmp_path)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE])
def test_back_again_every_bit_is_the_same_and_transformers_loads_it(
    config: TransformerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that end inside an expert, and with the experts of a layer in several files."""
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 640)
    model = their_model(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours")))
    convert(ToHuggingFace(str(tmp_path / "ours"), str(tmp_path / "back"), max_shard_size="8000", tokenizer=False))
    found, wanted = (
        {name: tensor for path in (tmp_path / name).glob("*.safetensors") for name, tensor in load_file(path).items()}
        for name in ("back", "hf")
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(model)
    tokens = torch.arange(34).remainder(config.vocab_size).view(2, 17)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
