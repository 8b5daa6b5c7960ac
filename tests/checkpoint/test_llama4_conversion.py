"""Llama 4 from and to Hugging Face's files: transposed experts, config.json, the text model in a multimodal one."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.architectures.registry import PRESET_VOCABULARIES, architecture_of
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint import conversion
from megatron.checkpoint.hugging_face import HuggingFaceMapping, copies_of_section
from megatron.checkpoint.hugging_face_config import config_fields, transformer_config_of
from megatron.checkpoint.hugging_face_files import HuggingFaceWeights
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, convert
from megatron.commands.weight_checkpoints import model_flags
from megatron.config.model import preset
from megatron.core.parameter import Box, ParameterInfo
from megatron.errors import CheckpointError
from tests.checkpoint.test_expert_conversion import import_of
from tests.checkpoint.test_hugging_face import assembled, numbered, part
from tests.end_to_end.run_process import call_training
from tests.model.llama4 import to_global

transformers: Any = pytest.importorskip("transformers")

SCOUT = TransformerConfig(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=17,
    padded_vocab_size=17,
    max_position_embeddings=64,
    use_rope_scaling=True,
    rope_scaling_factor=16.0,
    rope_scaling_high_freq_factor=1.0,
    qk_l2_norm=True,
    no_rope_freq="4",
    attention_chunk_size=8,
    attention_temperature_tuning=True,
    attention_temperature_floor=4,
    num_experts=4,
    moe_ffn_hidden_size=6,
    moe_router_topk=1,
    moe_router_score_function="sigmoid",
    moe_shared_expert_intermediate_size=6,
    moe_apply_probs_on_input=True,
)
MAVERICK = replace(SCOUT, use_rope_scaling=False, qk_l2_norm=False, moe_layer_freq="[0,1,0,1]")
MAVERICK = replace(MAVERICK, rope_scaling_factor=8.0, rope_scaling_high_freq_factor=4.0)
BOTH = pytest.mark.parametrize("config", [SCOUT, MAVERICK], ids=["scout", "maverick"])

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def randomized(model: Any) -> Any:
    """The model with random weights, also of norms and of what transformers leaves at zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def text_model(config: TransformerConfig) -> Any:
    fields = config_fields(config, "float32")
    return randomized(transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**fields)))


def multimodal_model(config: TransformerConfig) -> Any:
    fields = config_fields(config, "float32")
    del fields["architectures"], fields["torch_dtype"]
    settings = transformers.Llama4Config(text_config=fields, vision_config=VISION)
    return randomized(transformers.Llama4ForConditionalGeneration(settings))


def weights_under(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# --- the family ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_l2_norm": False},
        {"moe_layer_freq": "[0,1,0,1]"},
        {"no_rope_freq": "0"},
        {"no_rope_freq": "[0,1,1,0]"},
        {"attention_chunk_size": None},
        {"attention_temperature_tuning": False},
    ],
)
def test_a_variant_is_of_the_family_and_survives_config_json(changes: dict[str, Any]) -> None:
    config = replace(SCOUT, **changes)
    family = architecture_of(config)
    assert family is not None and family.name == "llama4_text"
    fields = json.loads(json.dumps(config_fields(config, "float32")))
    assert transformer_config_of(fields, "config.json") == config
    # And as transformers 5 writes it again.
    theirs = transformers.AutoConfig.for_model(**fields).to_dict()
    assert transformer_config_of(theirs, "config.json") == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size 8"),
        ({"moe_shared_expert_intermediate_size": None}, "qk_l2_norm True"),
        ({"moe_apply_probs_on_input": False}, "moe_router_score_function sigmoid"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias True"),
        ({"num_experts": None}, "dense layers"),
    ],
)
def test_another_combination_is_not_of_the_family(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_fields(replace(SCOUT, **changes), "float32")


# --- config.json ---------------------------------------------------------------------------------------------

PUBLISHED_TEXT = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 202048,
}
PUBLISHED = {
    "llama4-scout": PUBLISHED_TEXT
    | {
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "num_local_experts": 16,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "use_qk_norm": True,
    },
    "llama4-maverick": PUBLISHED_TEXT
    | {
        "attn_temperature_tuning": 4,
        "floor_scale": 8192.0,
        "attn_scale": 0.1,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_fields_of_a_published_model_are_the_preset(name: str) -> None:
    wanted = preset(name).resolve(PRESET_VOCABULARIES[name], 1, 1)
    assert transformer_config_of(PUBLISHED[name], "config.json") == wanted
    assert model_flags(wanted) == ["--model", name]
    assert wanted.rope_layers() == (True, True, True, False) * 12


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama4-scout", 107_769_861_120), ("llama4-maverick", 400_711_848_960)]
)
def test_the_parameters_of_a_preset_are_all_there(name: str, parameters: int) -> None:
    config = preset(name).resolve(PRESET_VOCABULARIES[name], 1, 1)
    sections = HuggingFaceMapping.of(config).theirs.values()
    assert sum(torch.Size(section.shape).numel() for section in sections) == config.num_parameters() == parameters


def test_the_small_preset_has_every_kind_of_layer() -> None:
    config = preset("tiny-llama4").resolve(1000, 1, 64)
    assert architecture_of(config) is architecture_of(SCOUT)
    assert set(config.moe_layers()) == set(config.rope_layers()) == {True, False}
    assert config.attention_chunk_size is not None and config.attention_temperature_tuning


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    theirs = transformers.Llama4TextConfig().to_dict()
    found = transformer_config_of({"model_type": "llama4_text"}, "config.json")
    assert found == transformer_config_of(theirs, "config.json")
    assert (found.attention_chunk_size, found.no_rope_freq, found.qk_l2_norm) == (8192, "4", True)


@pytest.mark.parametrize(
    "fields",
    [
        {"interleave_moe_layer_step": 2},
        {"interleave_moe_layer_step": 3},
        {"moe_layers": [0, 3], "interleave_moe_layer_step": 2},
        {"moe_layers": [2]},
        {"no_rope_layers": [0, 1, 1, 0]},
        {"no_rope_layers": [], "no_rope_layer_interval": 3},
        {"no_rope_layer_interval": 2},
    ],
    ids=str,
)
def test_the_kinds_of_layers_are_those_of_the_model_of_transformers(fields: dict[str, Any]) -> None:
    given = config_fields(SCOUT, "float32")
    for name in ("moe_layers", "interleave_moe_layer_step", "no_rope_layers", "layer_types"):
        del given[name]
    given |= fields
    found = transformer_config_of(given, "config.json")
    with torch.device("meta"):
        model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**given))
    layers = model.model.layers
    assert found.moe_layers() == tuple(layer.is_moe_layer for layer in layers)
    assert found.rope_layers() == tuple(bool(layer.self_attn.use_rope) for layer in layers)


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
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2, not 1: the weight of an expert multiplies its input"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"moe_layers": []}, "leave no layer with experts"),
        ({"moe_layers": 1}, "moe_layers is 1, not a list"),
        ({"moe_layers": None, "interleave_moe_layer_step": 9}, "leave no layer with experts"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers has 2 elements for 4 layers"),
        ({"no_rope_layers": "1110"}, "no_rope_layers is '1110', not a list"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types differs from no_rope_layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has other layers than 'chunked_attention' and 'full"),
        ({"floor_scale": 0.5}, "floor_scale is 0.5, not a positive integer"),
        ({"attn_scale": "0.1"}, "attn_scale is '0.1'"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
        ({"use_qk_norm": 1}, "use_qk_norm is 1, not a boolean"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ({"intermediate_size_mlp": 0}, "intermediate_size_mlp is 0"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "only Llama4ForCausalLM can be converted"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        transformer_config_of(config_fields(SCOUT, "float32") | changes, "DIR/config.json")
    assert words in str(refusal.value) and str(refusal.value).startswith("DIR/config.json: ")


# --- tensors -------------------------------------------------------------------------------------------------


@BOTH
def test_tensors_are_where_the_model_has_them(config: TransformerConfig, tmp_path: Path) -> None:
    model = text_model(config)
    model.save_pretrained(tmp_path)
    wanted = {f"model/{name}": tensor for name, tensor in to_global(model.state_dict(), config).items()}
    assert_equal(import_of(tmp_path), wanted)


@BOTH
def test_names_and_shapes_are_those_of_the_files_of_transformers(config: TransformerConfig, tmp_path: Path) -> None:
    text_model(config).save_pretrained(tmp_path)
    theirs = {name: tuple(tensor.shape) for name, tensor in weights_under(tmp_path).items()}
    assert {name: section.shape for name, section in HuggingFaceMapping.of(config).theirs.items()} == theirs


@settings(max_examples=200)
@given(st.data())
def test_any_part_of_the_experts_comes_from_the_other_side(data: st.DataObject) -> None:
    mapping = HuggingFaceMapping.of(MAVERICK)
    theirs = numbered({name: section.shape for name, section in mapping.theirs.items()})
    ours = to_global(theirs, MAVERICK)
    to_ours = data.draw(st.booleans())
    shapes = mapping.ours if to_ours else mapping.theirs
    name = data.draw(st.sampled_from([name for name in shapes if ".experts." in name]))
    whole = shapes[name].shape
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in whole)
    shape = tuple(data.draw(st.integers(1, size - start)) for start, size in zip(offset, whole))
    if to_ours:
        found = assembled(mapping.ours[name].copies(offset, shape), theirs, shape)
        wanted = part(ours[name], offset, shape)
    else:
        found = assembled(copies_of_section(mapping.theirs[name], offset, shape), ours, shape)
        wanted = part(theirs[name], offset, shape)
    assert torch.equal(found, wanted)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_back_again_every_bit_is_the_same_and_transformers_loads_it(
    config: TransformerConfig, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that end inside an expert, from several files into several files."""
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 640)
    text_model(config).to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours")))
    convert(ToHuggingFace(str(tmp_path / "ours"), str(tmp_path / "back"), max_shard_size="8000", tokenizer=False))
    assert_equal(weights_under(tmp_path / "back"), weights_under(tmp_path / "hf"))
    model, again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype) for name in ("hf", "back")
    )
    assert type(again) is type(model) is transformers.Llama4ForCausalLM
    tokens = torch.arange(34).remainder(config.vocab_size).view(2, 17)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("experts", [range(4), range(2, 4)], ids=["all experts", "half of them"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_reads_its_part_of_the_experts_and_no_more(
    experts: range, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its experts the rows of gate and up, and the columns of fc2, that tensor parallelism gives it; and of these a
    range that a data-parallel rank owns, which begins and ends inside a row."""
    model = text_model(SCOUT)
    model.save_pretrained(tmp_path)
    ours = to_global(model.state_dict(), SCOUT)
    hidden, ffn, name = SCOUT.hidden_size, 6, "layers.1.mlp.experts"
    width = ffn // tp
    last = (tp - 1) * width
    halves = [
        Box((half * ffn + last, 0), (number * width, 0), (width, hidden))
        for number, half in enumerate(range(2 * experts.start, 2 * experts.stop))
    ]
    downs = [
        Box((expert * hidden, last), (number * hidden, 0), (hidden, width)) for number, expert in enumerate(experts)
    ]
    read = record_reads(monkeypatch)
    for kind, boxes, columns in (("fc1", halves, hidden), ("fc2", downs, width)):
        rows = sum(box.shape[0] for box in boxes)
        whole = ours[f"{name}.linear_{kind}.weight"]
        wanted = torch.cat([part(whole, box.global_offset, box.shape) for box in boxes]).flatten()
        info = ParameterInfo(
            f"{name}.linear_{kind}.weight", tuple(whole.shape), (rows, columns), tuple(boxes), None, True, tp > 1
        )
        for start, stop in ((0, rows * columns), (columns // 2 + 1, rows * columns - columns // 2)):
            found, before = torch.full((stop - start,), float("nan")), sum(read)
            weights = HuggingFaceWeights(tmp_path)
            conversion.fill_from_hugging_face(tmp_path, weights, SCOUT, [(info, start, found)])
            assert torch.equal(found, wanted[start:stop])
            assert sum(read) - before == stop - start


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of every part that is read from a file."""
    read, elements = HuggingFaceWeights.read, []

    def recorded(weights: HuggingFaceWeights, name: str, place: tuple[slice, ...]) -> Tensor:
        tensor = read(weights, name, place)
        elements.append(tensor.numel())
        return tensor

    monkeypatch.setattr(HuggingFaceWeights, "read", recorded)
    return elements


def test_a_part_of_stacked_experts_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    whole = torch.randn(4, 16, 12)
    save_file({"experts": whole}, tmp_path / "model.safetensors")
    found = HuggingFaceWeights(tmp_path).read("experts", (slice(2, 3), slice(0, 16), slice(5, 9)))
    assert torch.equal(found, whole[2:3, :, 5:9])
    assert found.stride() == whole.stride()


def test_an_expert_too_few_and_experts_that_are_not_transposed_are_refused(tmp_path: Path) -> None:
    text_model(SCOUT).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.2.feed_forward.experts.gate_up_proj"
    tensors = load_file(file)
    for changed, shape in ((tensors[name][:3], "3, 16, 12"), (tensors[name].transpose(1, 2), "4, 12, 16")):
        save_file(tensors | {name: changed.contiguous()}, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"has shape \[{shape}\], but config\.json requires \[4, 16, 12\]"):
            import_of(tmp_path)


# --- multimodal models ---------------------------------------------------------------------------------------


@BOTH
def test_the_text_model_of_a_multimodal_model_is_taken_out_on_request(
    config: TransformerConfig, tmp_path: Path
) -> None:
    model = multimodal_model(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    request = FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"))
    with pytest.raises(CheckpointError) as refusal:
        convert(request)
    assert str(refusal.value) == (
        f"{tmp_path / 'hf' / 'config.json'} describes a multimodal model (Llama4ForConditionalGeneration), of which "
        "only the text model can be used: add --text-only to leave out vision_model.* and multi_modal_projector.*."
    )
    assert not (tmp_path / "ours").exists()
    told = convert(replace(request, text_only=True))
    others = len([name for name in weights_under(tmp_path / "hf") if name.startswith("vision_model.")])
    assert (
        f"left out {others + 1} tensors that are not of the text model: 1 of multi_modal_projector.*, "
        f"{others} of vision_model.*" in told
    )
    convert(ToHuggingFace(str(tmp_path / "ours"), str(tmp_path / "back"), tokenizer=False))
    text = model.language_model
    assert_equal(weights_under(tmp_path / "back"), dict(text.state_dict()))
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (fields["architectures"], fields["model_type"]) == (["Llama4ForCausalLM"], "llama4_text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(34).remainder(config.vocab_size).view(2, 17)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, text(tokens).logits)


def test_a_run_starts_from_the_text_model_of_a_multimodal_model_on_request(tmp_path: Path) -> None:
    """In bf16, with master weights, and in a step that changes no weight."""
    model = multimodal_model(MAVERICK)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    step = (
        "--mock-data --vocab-size 17 --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --num-workers 0 "
        "--device cpu --lr 0 --train-iters 1 --bf16"
    )
    flags = [*model_flags(MAVERICK), *step.split(), "--load-hf", str(tmp_path / "hf")]
    (sentence,) = call_training(flags).errors
    assert sentence.endswith("add --load-hf-text-only to leave out vision_model.* and multi_modal_projector.*.")
    outcome = call_training([*flags, "--load-hf-text-only", "--save", str(tmp_path / "run")])
    outcome.succeeded()
    assert "tensors that are not of the text model: 1 of multi_modal_projector.*" in outcome.stdout
    convert(ToHuggingFace(str(tmp_path / "run"), str(tmp_path / "back"), dtype="fp32", tokenizer=False))
    assert_equal(weights_under(tmp_path / "back"), dict(model.language_model.state_dict()))


def test_a_text_model_can_be_asked_for_its_text_model(tmp_path: Path) -> None:
    text_model(SCOUT).save_pretrained(tmp_path / "hf")
    assert "left out" not in convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"), text_only=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"bits": 8}}, "quantization_config is"),
        (
            {"architectures": ["Llama4ForSequenceClassification"]},
            "only Llama4ForConditionalGeneration can be converted",
        ),
        ({"text_config": [1]}, "text_config is [1], not an object"),
        ({"text_config": {"model_type": "gemma"}}, "model_type is 'gemma'"),
    ],
)
def test_a_multimodal_model_of_another_kind_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    multimodal_model(SCOUT).save_pretrained(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError) as refusal:
        convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"), text_only=True))
    assert words in str(refusal.value)


def test_a_tensor_of_no_known_part_is_refused(tmp_path: Path) -> None:
    multimodal_model(SCOUT).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(file) | {"audio_model.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"audio_model\.weight, which a Llama4ForConditionalGeneration does not"):
        convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"), text_only=True))
