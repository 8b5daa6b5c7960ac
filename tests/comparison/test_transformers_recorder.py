"""The recording of a model of transformers equals slow formulas of the same model, and autograd's gradients of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.hugging_face.config import config_fields
from megatron.checkpoint.manifest import MODEL
from megatron.comparison.batch import Batch
from megatron.comparison.transformers_recorder import record_transformers
from megatron.errors import CheckpointError, DataError
from megatron.features.record_tensors.recording import Recording, TensorName, whole
from tests.checkpoint.models import LLAMA, MIXTRAL, QWEN3_MOE, import_of, random_model, weights_under
from tests.comparison.own_step import own_step

pytest.importorskip("transformers")
MODELS = {
    "llama": replace(LLAMA, untie_embeddings_and_output_weights=False),
    "qwen2": replace(LLAMA, add_qkv_bias=True),
    "qwen3": replace(LLAMA, qk_layernorm=True, kv_channels=8),
    "mixtral": replace(MIXTRAL, num_layers=2),
    "qwen3_moe": QWEN3_MOE,
}
SAMPLES, LENGTH = 2, 6


def batch(documents: bool = False) -> Batch:
    text = torch.randint(17, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(SAMPLES, LENGTH)
    mask[0, 2:] = 0
    starts = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    starts[:, 0] = starts[0, 3] = starts[1, 1] = True
    return Batch(text[:, :-1], text[:, 1:], mask, starts if documents else None)


def write_model(name: str, directory: Path) -> dict[str, Tensor]:
    """Its weights in fp64 under Hugging Face's names."""
    model = random_model(MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(directory)
    weights = weights_under(directory)
    return {name: weight.double().requires_grad_() for name, weight in weights.items()}


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def plain(weights: dict[str, Tensor], config: Any, batch: Batch) -> dict[str, Tensor]:
    """All results ``[n, columns]`` of the forward pass, computed head by head, in Hugging Face's order."""
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    starts = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool) if batch.document_starts is None else batch.document_starts
    document = starts.cumsum(1).flatten()  # [n]
    sample = torch.arange(SAMPLES).repeat_interleave(LENGTH)  # [n]
    rows = torch.arange(SAMPLES * LENGTH)
    sees = (sample[:, None] == sample) & (document[:, None] == document) & (rows[:, None] >= rows)  # [n, n]
    angles = (sees.sum(1) - 1).double()[:, None] * 500000.0 ** (-torch.arange(0, size, 2).double() / size)  # [n, d/2]

    def rotated(x: Tensor) -> Tensor:  # [n, d]
        a, b = x.chunk(2, dim=1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=1)

    found: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> Tensor:
        found[name] = x
        x.retain_grad()
        return x

    x = keep("embedding", weights["model.embed_tokens.weight"][batch.tokens.flatten()])
    for layer in range(config.num_layers):

        def weight(name: str, layer: int = layer) -> Any:  # None if the model has none
            return weights.get(f"model.layers.{layer}.{name}")

        def here(name: str, x: Tensor, layer: int = layer) -> Tensor:
            return keep(f"layers.{layer}.{name}", x)

        normed = here("input_layernorm", norm(x, weight("input_layernorm.weight")))
        projected = {}
        for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
            y = normed @ weight(f"self_attn.{letter}_proj.weight").T
            bias, gain = weight(f"self_attn.{letter}_proj.bias"), weight(f"self_attn.{letter}_norm.weight")
            y = here(f"self_attention.{name}", y if bias is None else y + bias)
            per_head = [y if gain is None else norm(y, gain) for y in y.split(size, dim=1)]
            if letter != "v":
                y = here(f"self_attention.rotated_{name}", torch.cat([rotated(y) for y in per_head], dim=1))
                per_head = y.split(size, dim=1)
            projected[letter] = per_head
        attended = []
        for head in range(heads):
            group = head * groups // heads
            scores = projected["q"][head] @ projected["k"][group].T / size**0.5
            attended.append(scores.masked_fill(~sees, -torch.inf).softmax(1) @ projected["v"][group])
        core = here("self_attention.core_attention", torch.cat(attended, dim=1))
        x = x + here("self_attention.linear_proj", core @ weight("self_attn.o_proj.weight").T)
        here("attention_residual", x)
        normed = here("pre_mlp_layernorm", norm(x, weight("post_attention_layernorm.weight")))
        if config.moe_layers()[layer]:
            names = ("w1", "w3", "w2") if config.qk_layernorm is False else ("gate_proj", "up_proj", "down_proj")
            block = "block_sparse_moe" if config.qk_layernorm is False else "mlp"
            scores = (normed @ weight(f"{block}.gate.weight").T).softmax(1)
            border = scores.topk(config.moe_router_topk).values[:, -1:]
            chosen = scores * (scores >= border)
            routing = here("mlp.router", chosen / chosen.sum(1, keepdim=True))
            output = torch.zeros_like(normed)
            for expert in range(config.num_experts):
                gate, up, down = (weight(f"{block}.experts.{expert}.{name}.weight") for name in names)
                hidden = F.silu(normed @ gate.T) * (normed @ up.T)
                output = output + hidden @ down.T * routing[:, expert : expert + 1]
            output = here("mlp", output)
        else:
            gate = here("mlp.gate", normed @ weight("mlp.gate_proj.weight").T)
            up = here("mlp.up", normed @ weight("mlp.up_proj.weight").T)
            hidden = here("mlp.activation", F.silu(gate) * up)
            output = here("mlp", hidden @ weight("mlp.down_proj.weight").T)
        x = here("output", x + output)
    x = keep("final_layernorm", norm(x, weights["model.norm.weight"]))
    output_layer = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = keep("logits", x @ output_layer.T)
    picked = logits.gather(1, batch.labels.reshape(-1, 1))
    losses = keep("loss", logits.exp().sum(1, keepdim=True).log() - picked)
    mask = batch.loss_mask.reshape(-1, 1).double()
    (losses * mask / mask.sum()).sum().backward()
    return found


def in_our_order(name: str, x: Tensor, size: int) -> Tensor:
    """Columns or rows of queries and keys with their rotary pairs side by side."""
    if not name.endswith(("query", "key")):
        return x
    order = [place for pair in range(size // 2) for place in (pair, pair + size // 2)]
    return torch.cat([head[:, order] for head in x.split(size, dim=1)], dim=1)


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_recorded(recording: Recording, direction: Any, name: str, wanted: Tensor) -> None:
    found, expected = recording.tensors[TensorName(direction, name)], whole(wanted.detach())
    assert found.shape == expected.shape, (direction, name)
    assert found.distance(expected) < 1e-12, (direction, name)
    assert abs(found.elements - expected.elements).max() <= 1e-12 * expected.norm, (direction, name)


@pytest.mark.parametrize("name", MODELS)
def test_every_result_and_gradient_equals_plain_formulas(name: str, tmp_path: Path) -> None:
    config, data = MODELS[name], batch(documents=name == "llama")
    weights = write_model(name, tmp_path)
    recording = record_transformers(tmp_path, data, dtype=torch.float64, attention="eager")
    expected = plain(weights, config, data)
    found = {one.name for one in recording.tensors if one.direction == "forward"}
    assert found == expected.keys()
    for what, result in expected.items():
        assert_recorded(recording, "forward", what, in_our_order(what, result, config.kv_channels))
        gradient = gradient_of(result)
        if what.endswith("mlp.router"):
            gradient = gradient * (result != 0)
        assert_recorded(recording, "gradient", what, in_our_order(what, gradient, config.kv_channels))
    for what in ("tokens", "labels", "loss_mask"):
        assert_recorded(recording, "input", what, getattr(data, what).reshape(-1, 1))
    mask = data.loss_mask.flatten()
    assert recording.facts["loss"] == pytest.approx(((expected["loss"].flatten() * mask).sum() / mask.sum()).item())
    assert (recording.facts["samples"], recording.facts["length"]) == (SAMPLES, LENGTH)
    assert_parameters(recording, weights, config)


def assert_parameters(recording: Recording, weights: dict[str, Tensor], config: Any) -> None:
    """Of the first and the last layer, as this code stacks them."""
    size, last = config.kv_channels, config.num_layers - 1
    for direction, tensors in (
        ("weight", {name: weight.detach() for name, weight in weights.items()}),
        ("weight_gradient", {name: gradient_of(weight) for name, weight in weights.items()}),
    ):
        assert_recorded(recording, direction, "embedding.word_embeddings.weight", tensors["model.embed_tokens.weight"])
        theirs = f"model.layers.{last}."
        q, k, v = (tensors[f"{theirs}self_attn.{letter}_proj.weight"] for letter in "qkv")
        qkv = torch.cat([in_our_order("query", q.T, size).T, in_our_order("key", k.T, size).T, v])
        assert_recorded(recording, direction, f"layers.{last}.self_attention.linear_qkv.weight", qkv)
        if not config.moe_layers()[last]:
            gate_up = torch.cat([tensors[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")])
            assert_recorded(recording, direction, f"layers.{last}.mlp.linear_fc1.weight", gate_up)
    squares = sum(float(gradient_of(weight).square().sum()) for weight in weights.values())
    assert recording.facts["grad_norm"] == pytest.approx(squares**0.5)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_other_weights_under_our_names_replace_those_of_the_directory(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "model")
    ours = {name.removeprefix(MODEL): one for name, one in import_of(tmp_path / "model").items()}
    save_file(ours, tmp_path / "w")
    wanted = record_transformers(tmp_path / "model", batch(), dtype=torch.float32)
    for file in (tmp_path / "model").glob("*.safetensors"):
        save_file({key: 0 * one for key, one in weights_under(tmp_path / "model").items()}, file, {"format": "pt"})
    found = record_transformers(tmp_path / "model", batch(), dtype=torch.float32, weights=tmp_path / "w")
    assert found.tensors.keys() == wanted.tensors.keys()
    assert all(found.tensors[one].distance(wanted.tensors[one]) == 0 for one in wanted.tensors)
    save_file({"embedding.word_embeddings.weight": torch.zeros(3, 3)}, tmp_path / "w")
    with pytest.raises(DataError, match="another model"):
        record_transformers(tmp_path / "model", batch(), dtype=torch.float32, weights=tmp_path / "w")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        record_transformers(tmp_path, batch(), dtype=torch.float32)


def test_a_batch_survives_its_file(tmp_path: Path) -> None:
    for written in (batch(), batch(documents=True)):
        written.save(tmp_path / "batch.safetensors")
        read = Batch.load(tmp_path / "batch.safetensors")
        assert torch.equal(read.tokens, written.tokens) and torch.equal(read.loss_mask, written.loss_mask)
        assert (read.document_starts is None) == (written.document_starts is None)
    save_file({"words": torch.zeros(1)}, tmp_path / "batch.safetensors")
    with pytest.raises(DataError, match="no batch"):
        Batch.load(tmp_path / "batch.safetensors")


OWN_RUNS = {
    "mixtral with documents": "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-topk 2 --reset-position-ids "
    "--reset-attention-mask --eod-mask-loss",
    "llama": "--no-untie-embeddings-and-output-weights",
    "qwen2": "--add-qkv-bias",
    "qwen3": "--qk-layernorm",
    "llama4": "--qk-l2-norm --no-rope-freq 2 --attention-chunk-size 4 --attention-temperature-tuning "
    "--attention-temperature-floor 2 --num-experts 4 --moe-layer-freq [0,1] --moe-ffn-hidden-size 16 "
    "--moe-shared-expert-intermediate-size 16 --moe-router-topk 1 --moe-router-score-function sigmoid "
    "--moe-apply-probs-on-input",
}
OTHERS = [pytest.param(one, marks=pytest.mark.slow(reason="another family: two processes")) for one in [*OWN_RUNS][1:]]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["mixtral with documents", *OTHERS])
def test_it_equals_our_own_recording(name: str, tmp_path: Path) -> None:
    ours = own_step(tmp_path, OWN_RUNS[name])
    (tmp_path / "config.json").write_text(json.dumps(config_fields(ours.model, "float32")))
    data = Batch.load(ours.batch)
    theirs = record_transformers(tmp_path, data, dtype=torch.float64, weights=ours.weights)
    assert {one for one in ours.recording.tensors.keys() ^ theirs.tensors.keys() if one.direction != "update"} == set()
    found = {one: theirs.tensors[one].distance(ours.recording.tensors[one]) for one in theirs.tensors}
    assert max(found.values()) < 1e-12, max(found, key=lambda one: found[one])
