"""The mapping to Hugging Face's tensors and config.json, and what is refused."""

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
from safetensors.torch import save_file
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face import HuggingFaceMapping, copies_of_section
from megatron.checkpoint.hugging_face_config import config_fields, transformer_config_of
from megatron.checkpoint.hugging_face_directory import describe_directory
from megatron.checkpoint.hugging_face_files import (
    INDEX,
    SINGLE,
    HuggingFaceWeights,
    copy_tokenizer,
    fresh_directory,
)
from megatron.checkpoint.places import overlap
from megatron.checkpoint.safetensors_file import packed
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.checkpoint.models import LLAMA, MAVERICK, QWEN3_MOE, Bomb, assembled, numbered, place_of


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


@given(st.integers(0, 9), st.integers(0, 20), st.integers(1, 3), st.integers(0, 9), st.integers(0, 20))
def test_overlap_is_what_two_ranges_share(start: int, length: int, step: int, first: int, size: int) -> None:
    wanted = slice(start, start + length, step)
    taken, inside = overlap(wanted, first, size)
    elements = list(range(wanted.start, wanted.stop, step))
    assert elements[taken] == [element for element in elements if first <= element < first + size]
    assert list(range(first, first + size))[inside] == elements[taken]


def test_a_tied_model_has_no_head_on_either_side() -> None:
    mapping = HuggingFaceMapping.of(replace(LLAMA, untie_embeddings_and_output_weights=False))
    assert "output_layer.weight" not in mapping.ours
    assert "lm_head.weight" not in mapping.theirs


# --- which tensors are accepted ------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[int, ...]]:
    return {name: section.shape for name, section in HuggingFaceMapping.of(LLAMA).theirs.items()}


def test_missing_surplus_and_misshapen_tensors_are_named() -> None:
    mapping = HuggingFaceMapping.of(LLAMA)
    mapping.check(shapes() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (3,)}, "DIR")
    lacking = {name: shape for name, shape in shapes().items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"DIR lacks model\.norm\.weight"):
        mapping.check(lacking, "DIR")
    with pytest.raises(CheckpointError, match=r"q_proj\.bias, which a Llama model does not have"):
        mapping.check(shapes() | {"model.layers.0.self_attn.q_proj.bias": (24,)}, "DIR")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in DIR has shape \[13\].* \[12\]"):
        mapping.check(shapes() | {"model.norm.weight": (13,)}, "DIR")


def test_a_head_beside_a_tie_is_no_surplus() -> None:
    HuggingFaceMapping.of(replace(LLAMA, untie_embeddings_and_output_weights=False)).check(shapes(), "DIR")


# --- config.json ---------------------------------------------------------------------------------------------


def test_flags_made_of_an_architecture_resolve_to_it() -> None:
    assert ModelConfig.of(LLAMA).resolve(17, 1, 1) == replace(LLAMA, padded_vocab_size=128)


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


def fields_with(**changes: Any) -> dict[str, Any]:
    """Plain fields with some changed, or (None) null."""
    return {name: value for name, value in config_fields(LLAMA, "float32").items() if "rope" not in name} | changes


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
    config = transformer_config_of(fields_with(**spelling), "config.json")
    assert (config.rotary_base, config.use_rope_scaling) == (base, factor is not None)
    if factor is not None:
        assert (config.rope_scaling_factor, config.rope_scaling_original_length) == (factor, 512)


def test_the_factors_between_which_frequencies_are_interpolated_are_read_and_written() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 1.5, "high_freq_factor": 1.5}
    config = transformer_config_of(fields_with(rope_scaling=scaling), "config.json")
    assert (config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor) == (1.5, 1.5)
    assert config_fields(config, "float32")["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "code.py"}}, "auto_map"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 0}}, "low_freq_factor is 0"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 5}}, "high_freq_factor 4.0 is below"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_key_value_heads": 3}, "not divisible by num_key_value_heads 3"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        transformer_config_of(fields_with(**changes), "DIR/config.json")
    assert words in str(refusal.value) and str(refusal.value).startswith("DIR/config.json: ")


def test_what_transformers_refuses_is_not_written() -> None:
    with pytest.raises(CheckpointError, match=r"not divisible by its heads \(5\)"):
        config_fields(replace(LLAMA, num_attention_heads=5), "float32")


# --- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin"])
def test_a_pickle_is_refused_under_any_name_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=name):
        HuggingFaceWeights(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_a_pickle_named_as_a_shard_is_never_opened(tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    (tmp_path / shard).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=f"{shard} is not a complete safetensors file"):
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
