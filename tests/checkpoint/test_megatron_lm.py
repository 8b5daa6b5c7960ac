"""Checkpoints of Megatron-LM, written by megatron-core, become models with the same logits."""

import argparse
import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from megatron.checkpoint.finding import find_checkpoint
from megatron.checkpoint.hugging_face.mapping import HuggingFaceMapping
from megatron.checkpoint.megatron_lm.conversion import (
    _NUMBERS,
    _OPTIONAL_SIZES,
    _REQUIRED,
    _SIZES,
    _SWITCHES,
    MegatronCheckpoint,
    MegatronImport,
    architecture_of,
    grouped_rows,
    place_of,
    tokenizer_of,
)
from megatron.checkpoint.megatron_lm.safe_pickle import Global, Record
from megatron.checkpoint.megatron_lm.torch_dist import TorchDistCheckpoint
from megatron.commands.convert_checkpoint import FromMegatron, convert
from megatron.config.data import TokenizerConfig
from megatron.errors import CheckpointError, ConfigError, UserError
from tests.checkpoint.models import ITERATION, TOKENS, assert_equal, unpack_fixtures
from tests.end_to_end.converted import our_model
from tests.end_to_end.converted import tensors_of as global_tensors
from tests.end_to_end.run_process import call_training
from tests.messages import assert_helpful
from tests.whole_model import logits_of

SOURCES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""The fixtures with logits."""


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixtures(tmp_path_factory.mktemp("megatron_core"))


@pytest.fixture
def writable(fixtures: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of a Llama, to be damaged."""
    shutil.copytree(fixtures / "llama", tmp_path / "llama")
    return tmp_path / "llama" / ITERATION


def converted(load: Path, save: Path, **flags: Any) -> str:
    return convert(FromMegatron(str(load), str(save), **flags))


def tensors_of(directory: Path, vocab_size: int | None = 29, **changed: Any) -> dict[str, Tensor]:
    """All tensors of a converted model."""
    source = MegatronCheckpoint(directory)
    source.arguments = {**source.arguments, **changed}
    model = MegatronImport(source, vocab_size, None, lambda count: None)
    return {name: torch.cat([model.read(name, rows) for rows in chunks]) for name, chunks in model.chunks.items()}


def refusal_of(directory: Path, names: str = "", **changed: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        tensors_of(directory, **changed)
    assert_helpful(str(caught.value), names or str(directory))
    return str(caught.value)


# --- the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_the_converted_model_has_the_logits_of_megatron_core(name: str, fixtures: Path, tmp_path: Path) -> None:
    advice = converted(fixtures / name, tmp_path / "ours")
    assert "the vocabulary has 29 ids; left out 3 rows of padding" in advice
    assert "without the state of the optimizer" in advice
    assert ("Megatron-LM's pretrain_gpt.py computes with 8" in advice) == (name == "llama")
    model = our_model(tmp_path / "ours")
    with torch.no_grad():
        found = logits_of(model, torch.tensor([TOKENS]))[:, 0, :29]
    wanted = torch.from_numpy(np.load(fixtures / name / "logits.npy", allow_pickle=False))
    # Megatron-core computed in fp32, this model in fp64.
    assert wanted.abs().max() > 1
    torch.testing.assert_close(found, wanted.double(), rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("other", "name"), [("llama_tp2_pp2", "llama"), ("mixtral_ep2", "mixtral"), ("mixtral_grouped_ep2", "mixtral")]
)
def test_every_layout_and_form_of_the_writer_gives_the_same_weights(other: str, name: str, fixtures: Path) -> None:
    """Layers and experts stacked in one tensor, or a tensor for each."""
    assert_equal(tensors_of(fixtures / other / ITERATION), tensors_of(fixtures / name / ITERATION))


def test_gains_that_are_stored_minus_one_are_kept(fixtures: Path) -> None:
    directory = fixtures / "llama" / ITERATION
    assert_equal(tensors_of(directory, apply_layernorm_1p=True), tensors_of(directory))
    source = MegatronCheckpoint(directory)
    source.arguments = {**source.arguments, "apply_layernorm_1p": True}
    assert MegatronImport(source, 29, None, lambda count: None).architecture.apply_layernorm_1p


def test_training_starts_with_the_advised_flags(fixtures: Path, tmp_path: Path) -> None:
    advice = converted(fixtures / "mixtral", tmp_path / "ours")
    words = shlex.split(advice.splitlines()[-1].partition("pretrain_llama.py ")[2])
    step = "--mock-data --seq-length 32 --micro-batch-size 2 --global-batch-size 2 --num-workers 0 --device cpu --lr 0"
    call_training([*words, *step.split(), "--train-iters", "1", "--save", str(tmp_path / "run")]).succeeded()
    assert_equal(global_tensors(tmp_path / "run"), global_tensors(tmp_path / "ours"))


def test_the_state_of_the_optimizer_is_left_out(fixtures: Path) -> None:
    directory = fixtures / "qwen2" / ITERATION
    assert b"optimizer.state.exp_avg.decoder" in (directory / ".metadata").read_bytes()
    assert not [name for name in TorchDistCheckpoint(directory).tensors if "optimizer" in name]


@pytest.mark.parametrize("norm", ["mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"])
def test_a_norm_is_found_under_either_name(norm: str) -> None:
    config = architecture_of(ARGUMENTS, 29, "here")
    tensor = HuggingFaceMapping.of(config).ours["layers.1.pre_mlp_layernorm.weight"]
    assert place_of(tensor, 0, config, {f"layers.1.{norm}"}).name == f"layers.1.{norm}"


def test_the_command_takes_an_iteration_and_converts_the_dtype(fixtures: Path, tmp_path: Path) -> None:
    first = converted(fixtures / "llama", tmp_path / "a", ckpt_step=7, iteration=7)
    second = converted(fixtures / "llama" / ITERATION, tmp_path / "b", dtype="bf16", vocab_size=31)
    assert find_checkpoint(tmp_path / "a") == 7
    assert "--tokenizer-type NullTokenizer --vocab-size 28" in first
    assert "--tokenizer-type NullTokenizer --vocab-size 30" in second
    assert "left out 1 rows of padding" in second
    with pytest.raises(CheckpointError, match=r"iter_0000008 does not exist: change"):
        converted(fixtures / "llama", tmp_path / "c", ckpt_step=8)
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        converted(fixtures / "llama", tmp_path / "a")
    with pytest.raises(CheckpointError, match="less than the 33 ids"):
        converted(fixtures / "llama", tmp_path / "c", vocab_size=33)
    assert not (tmp_path / "c").exists()


def test_the_tokenizer_may_be_elsewhere(writable: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", ids=27)
    set_arguments(writable, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="/not/here")
    advice = converted(writable, tmp_path / "a")
    assert "kept all 32 rows of the vocabulary" in advice
    assert "--tokenizer" not in advice.splitlines()[-1]
    place = str(tmp_path / "tokenizer.json")
    advice = converted(writable, tmp_path / "b", tokenizer_model=place)
    assert "left out 5 rows" in advice
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {place}" in advice
    advice = converted(writable, tmp_path / "c", tokenizer_model=place, vocab_size=30)
    assert f"--tokenizer-model {place} --vocab-size 30" in advice
    with pytest.raises(UserError, match="not/here"):
        converted(writable, tmp_path / "d", tokenizer_model="/not/here")
    set_arguments(writable, tokenizer_type="BertWordPieceCase")
    with pytest.raises(ConfigError, match=r"BertWordPieceCase, which is not supported: use --vocab-size"):
        converted(writable, tmp_path / "d", tokenizer_model=place)


def write_tokenizer(path: Path, ids: int) -> None:
    """A tokenizer with ``ids`` ids, each a word."""
    words = {"</s>": 0, **{f"w{number}": number for number in range(1, ids)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))


def set_arguments(directory: Path, **changed: object) -> None:
    """Change arguments of the checkpoint in ``directory``."""
    arguments = dict(MegatronCheckpoint(directory).arguments)
    plain = {name: value for name, value in arguments.items() if not isinstance(value, Record | Global)}
    torch.save({"args": argparse.Namespace(**plain | changed)}, directory / "common.pt")


def test_without_the_tokenizer_no_row_is_left_out(fixtures: Path) -> None:
    directory = fixtures / "llama" / ITERATION
    whole, cut = tensors_of(directory, vocab_size=None), tensors_of(directory)
    for name in ("model/embedding.word_embeddings.weight", "model/output_layer.weight"):
        assert whole[name].shape == (32, 16)
        assert torch.equal(whole[name][:29], cut[name])


# --- rows ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_queries_keys_and_values_are_grouped(groups: int, queries: int, half: int) -> None:
    size = 2 * half
    config = replace(
        architecture_of(ARGUMENTS, 29, "here"),
        num_attention_heads=groups * queries,
        num_query_groups=groups,
        kv_channels=size,
    )
    fused = torch.arange(config.qkv_size).view(groups, queries + 2, size)
    wanted = fused[:, :-2], fused[:, -2], fused[:, -1]
    for section, rows in enumerate(wanted):
        found = torch.full((rows.numel(),), -1)
        for run in grouped_rows(section, config):
            found[run.ours : run.ours + run.length] = torch.arange(run.theirs, run.theirs + run.length)
        assert torch.equal(found, rows.flatten())


# --- arguments -----------------------------------------------------------------------------------------------

ARGUMENTS: Mapping[str, object] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "group_query_attention": False,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}


VALUES: tuple[object, ...] = (
    *(None, True, False, 0, 1, 3, -1, 10**6, 2**62, 0.5, -1.0, float("nan"), float("inf"), "", "rope", "[1]*9", "\n"),
    *([], [[]], [0, 1], [1, 1], [2, 2], ["local"], {}, (), (1,), b"x"),
    *(Record("builtins.int", (1,)), Global("torch.half")),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_arguments_give_a_model_or_a_refusal(data: st.DataObject) -> None:
    names = st.sampled_from(sorted({*_SIZES, *_OPTIONAL_SIZES, *_NUMBERS, *_SWITCHES, *_REQUIRED, "moe_layer_freq"}))
    changed = data.draw(st.dictionaries(names, st.sampled_from(VALUES), max_size=3))
    try:
        config = architecture_of({**ARGUMENTS, "num_experts": 4, **changed}, 29, "/model/common.pt")
    except CheckpointError as error:
        assert_helpful(str(error), "/model/common.pt")
    else:
        assert len(config.moe_layers()) == config.num_layers


def test_absent_arguments_have_megatrons_defaults() -> None:
    config = architecture_of(ARGUMENTS, 29, "here")
    assert config.num_query_groups == 4
    assert config.kv_channels == 4
    assert config.rotary_base == 10000
    assert not config.untie_embeddings_and_output_weights
    assert config.norm_epsilon == 1e-5
    newer = {**ARGUMENTS, "layernorm_epsilon": 1e-6, "spec": ["local"]}
    assert architecture_of(newer, 29, "here").norm_epsilon == 1e-6


@pytest.mark.parametrize("kind", [["x"], {}, 3, None, "BertWordPieceCase"])
def test_a_tokenizer_of_another_type_is_none(kind: object) -> None:
    assert tokenizer_of({"tokenizer_type": kind, "tokenizer_model": "a"}) == TokenizerConfig()


def test_megatrons_list_of_moe_layers_is_a_pattern_here() -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layer_freq": [0, 1]}
    assert architecture_of({**ARGUMENTS, **experts}, 29, "here").moe_layers() == (False, True)


UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "normalization": ("LayerNorm",),
    "swiglu": (False,),
    "add_bias_linear": (True,),
    "position_embedding_type": ("learned_absolute",),
    "rotary_interleaved": (True,),
    "rotary_percent": (0.5,),
    "multi_latent_attention": (True,),
    "mtp_num_layers": (1,),
    "window_size": ([128, 128], "128"),
    "softmax_type": ("learnable",),
    "spec": (["my_package", "my_spec"],),
    "moe_router_load_balancing_type": ("sinkhorn", ["aux_loss", "sinkhorn"]),
    "num_layers": (None, "2", 2.0, True, 10**9),
    "num_attention_heads": (10**9,),
    "hidden_size": (-1, 2**60),
    "kv_channels": ([],),
    "norm_epsilon": ("1e-5", float("nan")),
    "untie_embeddings_and_output_weights": (1,),
    "rotary_base": (Record("builtins.int", (1,)),),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in UNSUPPORTED.items() for value in values])
def test_an_unsupported_argument_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        architecture_of({**ARGUMENTS, name: value}, 29, "/model/common.pt")
    assert_helpful(str(caught.value), f"/model/common.pt, {name}")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_layers": 3}, "does not begin with the 3 of its arguments"),
        ({"num_layers": 1}, "does not begin with the 1 of its arguments"),
        ({"num_attention_heads": 2}, "decoder.layers.self_attention.linear_qkv.weight"),
        ({"num_query_groups": 4}, "decoder.layers.self_attention.linear_qkv.weight"),
        ({"ffn_hidden_size": 12}, "decoder.layers.mlp.linear_fc1.weight"),
        ({"hidden_size": 8}, "embedding.word_embeddings.weight"),
        ({"untie_embeddings_and_output_weights": False}, "has output_layer.weight, which the model"),
        ({"qk_layernorm": True}, "lacks the weight layers.0.self_attention.q_layernorm.weight"),
        ({"add_qkv_bias": True}, "lacks the weight layers.0.self_attention.linear_qkv.bias"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 8}, "lacks the weight layers.0.mlp.router.weight"),
    ],
)
def test_arguments_that_contradict_the_weights_are_refused(
    changed: Mapping[str, Any], words: str, fixtures: Path
) -> None:
    directory = fixtures / "llama" / ITERATION
    assert words in refusal_of(directory, **changed)


def test_experts_that_the_arguments_do_not_have_are_refused(fixtures: Path) -> None:
    assert "mlp" in refusal_of(fixtures / "mixtral" / ITERATION, num_experts=None)
    assert "not begin with the 2 layers and 8 of" in refusal_of(fixtures / "mixtral" / ITERATION, num_experts=8)
    assert "require [8, 16]" in refusal_of(fixtures / "mixtral_ep2" / ITERATION, num_experts=8)


# --- the directory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sharded_backend": "zarr"}, "zarr"),
        ({"sharded_backend": "fsdp_dtensor"}, "fsdp_dtensor"),
        ({"sharded_backend_version": 2}, "torch_dist, 2"),
        ({"common_backend": "x" * 1000}, "xxx"),
    ],
)
def test_another_format_is_refused(fields: Mapping[str, object], words: str, writable: Path) -> None:
    path = writable / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert words in refusal_of(writable, "--ckpt-format")


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, '{"sharded_backend": "torch_dist"}'])
def test_a_format_that_is_none_is_refused(content: str, writable: Path) -> None:
    """And the old one is named."""
    (writable / "metadata.json").write_text(content)
    refusal_of(writable)
    (writable / "metadata.json").unlink()
    (writable / "mp_rank_00").mkdir()
    assert "the format torch" in refusal_of(writable)


@pytest.mark.parametrize("tracker", ["", "released", "-3", "7" * 100, "../7"])
def test_a_tracker_without_an_iteration_is_refused(tracker: str, writable: Path, tmp_path: Path) -> None:
    (writable.parent / "latest_checkpointed_iteration.txt").write_text(tracker)
    with pytest.raises(CheckpointError, match="--ckpt-step"):
        converted(writable.parent, tmp_path / "ours")
    assert "wrote" in converted(writable.parent, tmp_path / "ours", ckpt_step=7)


def test_a_converted_release_is_found(writable: Path, tmp_path: Path) -> None:
    (writable.parent / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match="release does not exist: change"):
        converted(writable.parent, tmp_path / "ours")
    writable.rename(writable.parent / "release")
    assert f"of {writable.parent / 'release'} to" in converted(writable.parent, tmp_path / "ours")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (FromMegatron("a", "b", ckpt_step=-1), "--ckpt-step -1"),
        (FromMegatron("a", "b", vocab_size=0), "--vocab-size 0"),
        (FromMegatron("s3://a", "b"), "--load s3://a"),
        (FromMegatron(str(Path(__file__).parent), "b"), r"has neither .* nor .*: give --load"),
    ],
)
def test_bad_requests_are_refused(request_: FromMegatron, words: str) -> None:
    with pytest.raises(UserError, match=words):
        convert(request_)
