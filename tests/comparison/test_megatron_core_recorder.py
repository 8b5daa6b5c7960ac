"""A step of megatron-core from PyPI beside ours, from the same weights and samples; and two faults planted there."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib.peers.processes import make_environment
from megatron.architectures.transformer_config import TransformerConfig
from megatron.comparison.bisection import first_beyond, rows
from megatron.comparison.megatron_core_recorder import record_megatron_core
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
@pytest.mark.parametrize("flags", ["", "--qk-layernorm --untie-embeddings-and-output-weights"])
def test_a_step_of_megatron_core_equals_ours_and_planted_faults_are_located(
    flags: str, python: Path, tmp_path: Path
) -> None:
    ours = own_step(tmp_path, flags)

    def recorded(name: str, config: TransformerConfig) -> Recording:
        return record_megatron_core(python, config, ours.batch, ours.weights, tmp_path / name)

    theirs = recorded("theirs", ours.model)
    missing = {one for one in ours.recording.tensors.keys() ^ theirs.tensors.keys() if one.direction != "update"}
    assert not missing
    assert first_difference(ours, theirs) is None
    assert theirs.facts["loss"] == pytest.approx(ours.recording.facts["loss"], rel=1e-12)
    assert theirs.facts["grad_norm"] == pytest.approx(ours.recording.facts["grad_norm"], rel=1e-12)
    other_base = recorded("rotary", replace(ours.model, rotary_base=500.0))
    assert first_difference(ours, other_base) == ("forward", "layers.0.self_attention.rotated_query")
    other_epsilon = recorded("epsilon", replace(ours.model, norm_epsilon=1e-2))
    assert first_difference(ours, other_epsilon) == ("forward", "layers.0.input_layernorm")
