"""The recorder of transformers has what our recorder has, in fp64, and finds a fault in a model's configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_llama as ml
from megatron.comparison.batch import Batch
from megatron.comparison.bisection import first_beyond, rows
from megatron.comparison.transformers_recorder import record_transformers
from megatron.features.record_tensors.recording import Recording, load_recording

FLAGS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "num_workers": 0, "device": "cpu", "fp64": True,
    "mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 30, "lr": 1e-3, "train_iters": 2,
    "eval_iters": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"kv_channels": 8},
    "Llama, tied": {"untie_embeddings_and_output_weights": False, "use_rope_scaling": True},
    "Qwen3": {"qk_layernorm": True, "kv_channels": 16},
    "Mixtral": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24},
}


def step_of(directory: Path, flags: dict[str, Any]) -> tuple[Recording, Batch]:
    """A recorded step of our code, and its batch; ``directory/hf`` has the weights before it."""
    with ml.Run(**FLAGS | flags, record_tensors=directory / "records") as run:
        run.export(directory / "hf")
        run.step()
    ours = load_recording(directory / "records" / "iter_0000001.safetensors")
    return ours, Batch.load(directory / "records" / "iter_0000001.batch.safetensors")


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_transformers_computes_the_same(flags: dict[str, Any], tmp_path: Path) -> None:
    ours, batch = step_of(tmp_path, flags)
    theirs = record_transformers(tmp_path / "hf", batch, dtype=torch.float64)
    missing = {name for name in ours.tensors if name.direction != "update"} - theirs.tensors.keys()
    # Experts that are one module there have no result of their own.
    assert {name.name.split(".")[-1] for name in missing} <= set(), missing
    found = list(rows([theirs], [ours]))
    assert len(found) > 90
    assert max(row.distance for row in found) < 1e-11
    assert theirs.facts["loss"] == pytest.approx(ours.facts["loss"], rel=1e-12)
    assert theirs.facts["grad_norm"] == pytest.approx(ours.facts["grad_norm"], rel=1e-10)


def test_a_fault_of_the_configuration_is_found(tmp_path: Path) -> None:
    ours, batch = step_of(tmp_path, MODELS["Llama"])
    place = tmp_path / "hf" / "config.json"
    config = json.loads(place.read_text())
    for field, value, first in (
        ("rms_norm_eps", 1e-3, "layers.0.input_layernorm"),
        ("rope_theta", 5e3, "layers.0.self_attention.rotated_query"),
    ):
        changed = {**config, field: value}
        if field == "rope_theta" and isinstance(config.get("rope_parameters"), dict):
            changed["rope_parameters"] = {**config["rope_parameters"], field: value}
        place.write_text(json.dumps(changed))
        row = first_beyond(rows([record_transformers(tmp_path / "hf", batch, dtype=torch.float64)], [ours]))
        assert row is not None and row.tensor.name == first
