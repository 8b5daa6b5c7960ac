"""A dense model with experts: ``convert_checkpoint.py upcycle``."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.streaming import SavedTensors
from megatron.commands import convert_checkpoint
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, Upcycle
from megatron.config.model import ModelConfig
from megatron.core.initialization import normal_numbers, parameter_key
from megatron.errors import CheckpointError, ConfigError
from tests.end_to_end.converted import DENSE_RUN, our_model, tensors_of
from tests.end_to_end.run_process import bytes_under, call_training, words_of
from tests.model.reference import relative_error
from tests.whole_model import logits_of

EXPERTS = 4


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a dense model in bf16, with fp32 master weights."""
    directory = tmp_path_factory.mktemp("dense")
    call_training(words_of({**DENSE_RUN, "bf16": True, "save": directory})).succeeded()
    return directory


def upcycle(load: Path, save: Path, **flags: Any) -> str:
    return convert_checkpoint.convert(Upcycle(str(load), str(save), num_experts=EXPERTS, **flags))


def test_every_expert_is_the_mlp_and_all_else_is_as_it_was(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path, moe_layer_freq="[1,0,1]")
    before, after = tensors_of(dense, "optimizer/master/"), tensors_of(tmp_path)
    added = set()
    for number in (0, 2):
        for linear in ("linear_fc1", "linear_fc2"):
            mlp = before.pop(f"layers.{number}.mlp.{linear}.weight")
            experts = after.pop(f"layers.{number}.mlp.experts.{linear}.weight")
            assert experts.dtype == torch.float32  # master weights, not the weights rounded to bf16
            assert torch.equal(experts.view(EXPERTS, *mlp.shape), mlp.expand(EXPERTS, *mlp.shape))
        added.add(f"layers.{number}.mlp.router.weight")
    assert after.keys() - before.keys() == added
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_the_new_model_computes_what_the_dense_model_computes(dense: Path, tmp_path: Path) -> None:
    """Whatever the routers choose, because the weights of the chosen experts sum to one."""
    weights = tmp_path / "dense"
    convert_checkpoint.convert(ToHuggingFace(str(dense), str(tmp_path / "hf"), dtype="fp32", tokenizer=False))
    convert_checkpoint.convert(FromHuggingFace(str(tmp_path / "hf"), str(weights)))
    upcycle(weights, tmp_path / "experts", moe_layer_freq="[1,0,1]", moe_router_topk=3)
    tokens = torch.arange(48).remainder(61).view(2, 24)
    with torch.no_grad():
        before, after = (logits_of(our_model(root), tokens) for root in (weights, tmp_path / "experts"))
    assert relative_error(after, before) < 1e-12


def test_a_router_starts_as_in_a_new_run_with_the_seed(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path, seed=7)
    for number in range(3):
        name = f"layers.{number}.mlp.router.weight"
        numbers = normal_numbers(parameter_key(7, name), torch.arange(EXPERTS * 32)).view(EXPERTS, 32)
        assert torch.equal(tensors_of(tmp_path)[name], (numbers * 0.02).float())


def test_the_flags_of_the_new_model_are_saved_and_advised(dense: Path, tmp_path: Path) -> None:
    advice = upcycle(dense, tmp_path, moe_router_topk=3, moe_layer_freq="[0]*1+[1]*2", iteration=5)
    state = read_checkpoint(tmp_path, 5).state
    flags = ModelConfig(**state["flags"]["model"])
    assert (flags.num_experts, flags.moe_router_topk, flags.moe_ffn_hidden_size) == (EXPERTS, 3, 48)
    assert state["architecture"]["moe_layer_freq"] == "[0,1,1]"
    assert f"--load {tmp_path} --finetune" in advice and "--num-experts 4" in advice and "[0,1,1]" in advice


def test_one_chunk_of_an_expert_is_copied_at_a_time(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upcycle(dense, tmp_path / "whole")
    monkeypatch.setattr("megatron.checkpoint.conversion.BLOCK_BYTES", 1024)
    upcycle(dense, tmp_path / "blocks")
    whole, blocks = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "blocks")
    assert whole.keys() == blocks.keys() and all(torch.equal(blocks[name], whole[name]) for name in whole)
    chunks = SavedTensors(tmp_path / "blocks", 0).manifest.tensors["model/layers.0.mlp.experts.linear_fc1.weight"]
    assert chunks.shapes.prod(axis=1).max() * 4 <= 1024


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"moe_upcycling_granularity": 2}, "--moe-upcycling-granularity 2 .* use 1"),
        ({"moe_router_topk": 1}, "--moe-router-topk 1 must"),
        ({"moe_router_topk": 5}, "--moe-router-topk"),
        ({"moe_layer_freq": "[0,1]"}, "--moe-layer-freq"),
    ],
)
def test_bad_flags_are_refused(dense: Path, tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        upcycle(dense, tmp_path, **flags)
    assert list(tmp_path.iterdir()) == []


def test_experts_are_not_upcycled_again_and_nothing_is_overwritten(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "experts")
    with pytest.raises(CheckpointError, match="has 4 experts already: upcycle the checkpoint of a dense model"):
        upcycle(tmp_path / "experts", tmp_path / "again")
    before = bytes_under(tmp_path)
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        upcycle(dense, tmp_path / "experts")
    assert bytes_under(tmp_path) == before


def test_a_dense_checkpoint_does_not_load_into_experts_and_back(dense: Path, tmp_path: Path) -> None:
    experts = words_of({"num_experts": EXPERTS})
    upcycle(dense, tmp_path)
    flags = words_of({**DENSE_RUN, "finetune": True})
    refused = call_training([*flags, *experts, "--load", str(dense)])
    assert len(refused.errors) == 1 and "is a dense model, but --num-experts is 4" in refused.errors[0]
    refused = call_training([*flags, "--load", str(tmp_path)])
    assert len(refused.errors) == 1 and "has 4 experts, but the flags describe a dense model" in refused.errors[0]
