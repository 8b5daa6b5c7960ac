"""Hugging Face's tensors and files: what of them is which part of ours, and what is refused."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import Place
from megatron.checkpoint.directory import fresh_directory
from megatron.checkpoint.hugging_face.config import INDEX, SINGLE, config_fields, describe_directory
from megatron.checkpoint.hugging_face.mapping import HuggingFaceMapping, copies_of_section
from megatron.checkpoint.hugging_face.weights import HuggingFaceWeights, fill_from_hugging_face
from megatron.checkpoint.safetensors_file import packed
from megatron.checkpoint.tokenizer_files import copy_tokenizer
from megatron.commands.checkpoints import model_flags
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, convert
from megatron.core.parameter import Box, ParameterInfo
from megatron.errors import CheckpointError
from tests.checkpoint.models import (
    LLAMA,
    MAVERICK,
    MIXTRAL,
    QWEN3_MOE,
    SCOUT,
    Bomb,
    assembled,
    assert_equal,
    import_of,
    numbered,
    place_of,
    random_model,
    randomized,
    weights_under,
)
from tests.end_to_end.run_process import call_training


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE, MAVERICK], ids=["llama", "qwen3_moe", "llama4"])
@settings(max_examples=100)
@given(st.data())
def test_a_rectangle_is_that_of_the_whole_tensor(config: TransformerConfig, data: st.DataObject) -> None:
    """And the whole tensor has the elements of transformers, as the comparisons in tests/model prove."""
    mapping = HuggingFaceMapping.of(config)
    to_ours = data.draw(st.booleans())
    shapes = {name: tensor.shape for name, tensor in (mapping.ours if to_ours else mapping.theirs).items()}
    sources = numbered({name: one.shape for name, one in (mapping.theirs if to_ours else mapping.ours).items()})
    name = data.draw(st.sampled_from(sorted(shapes)))

    def copied(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if to_ours:
            return assembled(mapping.ours[name].copies(offset, shape), sources, shape)
        return assembled(copies_of_section(mapping.theirs[name], offset, shape), sources, shape)

    whole = copied((0,) * len(shapes[name]), shapes[name])
    assert len(whole.unique()) == whole.numel() and whole.min() >= 0
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in whole.shape)
    shape = tuple(data.draw(st.integers(1, size - start)) for start, size in zip(offset, whole.shape))
    assert torch.equal(copied(offset, shape), whole[place_of(offset, shape)])


def test_a_tied_model_has_no_head_on_either_side() -> None:
    """And a head beside a tie is no surplus, nor are frequencies."""
    shapes: dict[str, tuple[int, ...]] = {"model.layers.0.self_attn.rotary_emb.inv_freq": (3,)}
    shapes |= {name: section.shape for name, section in HuggingFaceMapping.of(LLAMA).theirs.items()}
    mapping = HuggingFaceMapping.of(replace(LLAMA, untie_embeddings_and_output_weights=False))
    assert "output_layer.weight" not in mapping.ours
    assert "lm_head.weight" not in mapping.theirs
    mapping.check(shapes, "DIR")


EXPERT = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
STACKED = "model.layers.2.feed_forward.experts.gate_up_proj"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("config", "name", "shape", "words"),
    [
        (LLAMA, "model.norm.weight", None, r"DIR lacks model\.norm\.weight"),
        (LLAMA, BIAS, (24,), r"q_proj\.bias, which a Llama model does not have"),
        (LLAMA, "model.norm.weight", (13,), r"model\.norm\.weight in DIR has shape \[13\].* \[12\]"),
        (MIXTRAL, EXPERT, None, rf"lacks {EXPERT}"),
        (MIXTRAL, EXPERT.replace("3.w3", "4.w3"), (24, 16), r"experts\.4\.w3\.weight, which a Mixtral model does not"),
        (SCOUT, STACKED, (3, 16, 12), r"has shape \[3, 16, 12\], but config\.json requires \[4, 16, 12\]"),
        (SCOUT, STACKED, (4, 12, 16), r"has shape \[4, 12, 16\], but config\.json requires \[4, 16, 12\]"),
    ],
)
def test_missing_surplus_and_misshapen_tensors_are_named(
    config: TransformerConfig, name: str, shape: tuple[int, ...] | None, words: str
) -> None:
    mapping = HuggingFaceMapping.of(config)
    shapes = {name: section.shape for name, section in mapping.theirs.items()}
    mapping.check(shapes, "DIR")
    shapes.pop(name, None)
    with pytest.raises(CheckpointError, match=words):
        mapping.check(shapes if shape is None else {**shapes, name: shape}, "DIR")


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


# --- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin", "model-00001-of-00001.safetensors"])
def test_a_pickle_is_refused_under_any_name_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    if name.startswith("model-"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match=name):
        HuggingFaceWeights(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_a_name_on_the_hub_is_answered_with_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = Path("meta-llama/Llama-3.1-8B")
    readers: tuple[Callable[[Path], object], ...] = (HuggingFaceWeights, describe_directory)
    for read in readers:
        with pytest.raises(
            CheckpointError, match=rf"{name} does not exist: .* `hf download {name} --local-dir DIR` and"
        ):
            read(name)
        with pytest.raises(CheckpointError, match=r"is not a directory: give the one that holds the model's config"):
            read(tmp_path / "model")


@pytest.mark.parametrize("index", ["[", "[]", "{}", '{"weight_map": {"a": "../a.safetensors"}}', '{"weight_map": 1}'])
def test_a_bad_index_is_refused_by_name(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        HuggingFaceWeights(tmp_path)


def test_a_shard_cut_short_or_without_its_tensor_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "part.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": "part.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"part\.safetensors is damaged"):
        HuggingFaceWeights(tmp_path)
    os.truncate(tmp_path / "part.safetensors", 200)
    with pytest.raises(CheckpointError, match=r"part\.safetensors is not a complete"):
        HuggingFaceWeights(tmp_path)


def test_quantized_numbers_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100, dtype=torch.int8)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"a in .* is I8, a quantized"):
        HuggingFaceWeights(tmp_path).entry("a")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 20))
def test_shards_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    shards = list(packed(enumerate(sizes), lambda item: item[1], limit))
    assert [item for shard in shards for item in shard] == list(enumerate(sizes))
    assert all(shard for shard in shards)
    assert all(len(shard) == 1 or sum(size for _, size in shard) <= limit for shard in shards)


def test_a_directory_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt), fresh_directory(target) as saving:
        (saving / "half").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    killed = tmp_path / ".model.saving-01234567"
    killed.mkdir()
    target.mkdir()
    with fresh_directory(target) as saving:
        (saving / "whole").write_text("whole")
        assert list(target.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(CheckpointError, match="already exists and is not overwritten"), fresh_directory(target):
        pass
    assert (target / "whole").read_text() == "whole"


def test_tokenizer_files_are_found_from_a_file_or_a_directory(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "secret.txt", "llama.model"):
        (source / name).write_text(name)
    both = ["tokenizer.json", "tokenizer_config.json"]
    assert copy_tokenizer(source, tmp_path / "a") == both
    assert copy_tokenizer(source / "tokenizer.json", tmp_path / "b") == both
    assert copy_tokenizer(source / "llama.model", tmp_path / "c") == ["tokenizer.model"]
    assert copy_tokenizer(source / "absent.model", tmp_path / "d") == []
    assert (tmp_path / "c" / "tokenizer.model").read_text() == "llama.model"
    assert not (tmp_path / "d").exists()


# --- experts that are stacked --------------------------------------------------------------------------------


class CountingWeights(HuggingFaceWeights):
    """Counts the elements that are read."""

    elements = 0

    def read(self, name: str, place: Place) -> Tensor:
        part = super().read(name, place)
        self.elements += part.numel()
        return part


@pytest.mark.parametrize("experts", [range(4), range(2, 4)], ids=["all experts", "half of them"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_reads_its_part_of_the_experts_and_no_more(experts: range, tp: int, tmp_path: Path) -> None:
    """Of its experts the rows of gate and up, and the columns of fc2, that tensor parallelism gives it; and of these a
    range that a data-parallel rank owns, which begins and ends inside a row."""
    random_model(SCOUT).save_pretrained(tmp_path)
    ours = import_of(tmp_path)
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
    for kind, boxes, columns in (("fc1", halves, hidden), ("fc2", downs, width)):
        rows = sum(box.shape[0] for box in boxes)
        whole = ours[f"model/{name}.linear_{kind}.weight"]
        wanted = torch.cat([whole[place_of(box.global_offset, box.shape)] for box in boxes]).flatten()
        info = ParameterInfo(
            f"{name}.linear_{kind}.weight", tuple(whole.shape), (rows, columns), tuple(boxes), None, True, tp > 1
        )
        for start, stop in ((0, rows * columns), (columns // 2 + 1, rows * columns - columns // 2)):
            found, weights = torch.full((stop - start,), float("nan")), CountingWeights(tmp_path)
            fill_from_hugging_face(tmp_path, weights, SCOUT, [(info, start, found)])
            assert torch.equal(found, wanted[start:stop])
            assert weights.elements == stop - start


def test_a_part_of_stacked_experts_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    whole = torch.randn(4, 16, 12)
    save_file({"experts": whole}, tmp_path / "model.safetensors")
    found = HuggingFaceWeights(tmp_path).read("experts", (slice(2, 3), slice(0, 16), slice(5, 9)))
    assert torch.equal(found, whole[2:3, :, 5:9])
    assert found.stride() == whole.stride()


# --- the text model of a multimodal one ----------------------------------------------------------------------


VISION = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
VISION |= dict.fromkeys(("hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)


def multimodal_model(config: TransformerConfig) -> Any:
    fields = config_fields(config, "float32")
    del fields["architectures"], fields["torch_dtype"]
    transformers = pytest.importorskip("transformers")
    settings = transformers.Llama4Config(text_config=fields, vision_config=VISION)
    return randomized(transformers.Llama4ForConditionalGeneration(settings))


def test_the_text_model_of_a_multimodal_model_is_taken_out_on_request(tmp_path: Path) -> None:
    model = multimodal_model(SCOUT)
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
    transformers = pytest.importorskip("transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(34).remainder(SCOUT.vocab_size).view(2, 17)
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
    random_model(SCOUT).save_pretrained(tmp_path / "hf")
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
