"""A step of megatron-core from PyPI beside ours, from the same weights and samples; and two faults planted there."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.lib.peers.processes import make_environment
from megatron.comparison.batch import Batch
from megatron.comparison.bisection import first_beyond, rows
from megatron.comparison.megatron_core_recorder import record_megatron_core
from megatron.config.model import preset
from megatron.errors import ConfigError
from megatron.features.record_tensors.recording import Recording, TensorName
from tests.comparison.own_step import OwnStep, own_step

CACHE = Path.home() / ".cache" / "megatron-llama-peers"


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return make_environment("megatron_core", CACHE)
    except ConfigError as error:
        pytest.skip(f"no environment of megatron-core: {error}")


def first_difference(ours: OwnStep, theirs: Recording) -> TensorName | None:
    beyond = first_beyond(rows([ours.recording], [theirs]))
    return None if beyond is None else beyond.tensor


@pytest.mark.processes
@pytest.mark.slow(reason="an environment from PyPI, and runs in processes")
@pytest.mark.parametrize(
    "flags",
    [
        "--no-untie-embeddings-and-output-weights --reset-attention-mask --eod-mask-loss",
        "--qk-layernorm --add-qkv-bias",
    ],
)
def test_a_step_of_megatron_core_equals_ours(flags: str, python: Path, tmp_path: Path) -> None:
    ours = own_step(tmp_path, flags)
    theirs = record_megatron_core(python, ours.model, ours.batch, ours.weights, tmp_path / "theirs")
    assert {one for one in ours.recording.tensors.keys() ^ theirs.tensors.keys() if one.direction != "update"} == set()
    assert first_difference(ours, theirs) is None
    for fact in ("loss", "grad_norm"):
        assert theirs.facts[fact] == pytest.approx(ours.recording.facts[fact], rel=1e-12)


@pytest.mark.processes
@pytest.mark.slow(reason="an environment from PyPI, and runs in processes")
def test_planted_faults_of_megatron_core_are_located(python: Path, tmp_path: Path) -> None:
    ours = own_step(tmp_path)
    faults = {
        "layers.0.self_attention.rotated_query": replace(ours.model, rotary_base=500.0),
        "layers.0.input_layernorm": replace(ours.model, norm_epsilon=1e-2),
    }
    for name, config in faults.items():
        theirs = record_megatron_core(python, config, ours.batch, ours.weights, tmp_path / name)
        assert first_difference(ours, theirs) == ("forward", name)


def test_experts_are_refused(tmp_path: Path) -> None:
    model = preset("tiny-moe").resolve(61, 1, 8)
    with pytest.raises(ConfigError, match="Experts"):
        record_megatron_core(tmp_path, model, tmp_path, tmp_path, tmp_path)


@pytest.mark.processes
def test_an_environment_without_megatron_core_is_an_error(tmp_path: Path) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    Batch(tokens, tokens, torch.ones(1, 8)).save(tmp_path / "batch")
    with pytest.raises(ConfigError, match=r"No module named 'megatron.core.*; read"):
        record_megatron_core(
            Path(sys.executable), preset("tiny").resolve(61, 1, 8), tmp_path / "batch", tmp_path, tmp_path
        )
