"""Layers with operations and parameters of plain torch, post-norms and frozen parameters, defined outside of megatron/:
every layout equals one process, and one process equals autograd."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import MoEConfig
from megatron.config.training import OptimizerConfig
from megatron.core.models.layer import BuildContext, RMSNorm, SequencePositions, TransformerLayer
from megatron.core.models.parallelize import build_model, freeze
from megatron.core.parameter import constant, info_of, initialize_range, normal, parameter_key, random_bits
from megatron.core.topology import single_process
from megatron.errors import ConfigError
from tests.parallel.comparison import compare_with_one_process
from tests.parallel.layout_run import (
    DEEP_MODEL,
    MODEL,
    SEED,
    Layout,
    Task,
    Trace,
    assemble,
    build,
    context,
    make_steps,
    microbatches,
    place_in,
)
from tests.parallel.tasks import full, selective
from tests.rank_pool import RankPool


def uniform(key: int, index: Tensor) -> Tensor:
    """Values from 0 to 1."""
    return (random_bits(key, index).double() * 2.0**-64 + 0.5) * 0.5


class GatedLayer(TransformerLayer):
    """Gates in plain torch before and after the attention, a norm after the MLP, and a mixture of the two residual
    streams: what a researcher writes."""

    def __init__(self, number: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__(number, config, context)
        name, hidden = f"layers.{number}", config.hidden_size
        self.gate = context.parameter(f"{name}.gate", (hidden,), constant(0.7))
        self.mix = context.parameter(f"{name}.mix", (2, 3, hidden), normal(0.3), weight_decay=True)
        self.strength = context.parameter(f"{name}.strength", (1,), uniform)
        self.post_norm = RMSNorm(f"{name}.post_norm", hidden, config, context)

    def forward(self, x: Tensor, positions: SequencePositions) -> Tensor:  # [s/(cp tp), b, h]
        x = x + torch.sigmoid(self.gate) * self.self_attention(x, positions)
        update = self.post_norm(self.mlp(x)) * self.strength
        mixed = torch.einsum("sbh,ijh->sbh", update, self.mix)
        return x * (1 + 0.1 * self.mix[0, 0]) + mixed


class HeadScaleLayer(TransformerLayer):
    """Parameters inside the tensor-parallel region: one for each head, whose ranks divide them, and one for all."""

    def __init__(self, number: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__(number, config, context)
        name, heads = f"layers.{number}.self_attention", config.num_attention_heads
        attention = self.self_attention
        shape = attention.shape
        scales = context.parameter(f"{name}.head_scales", (heads, 1), constant(0.8), is_divided=True)
        shift = context.parameter(f"{name}.shift", (shape.head_size,), normal(0.1), in_parallel_region=True)
        attention.add_module("qk_norm", HeadScales(shape.query_heads, shape.head_size, scales, shift))


class HeadScales(nn.Module):
    def __init__(self, heads: int, head_size: int, scales: nn.Parameter, shift: nn.Parameter) -> None:
        super().__init__()
        self.heads, self.head_size, self.scales, self.shift = heads, head_size, scales, shift

    def forward(self, qkv: Tensor) -> Tensor:  # [s/cp, b, (n + 2g) d / tp]
        query, rest = qkv.split((self.heads * self.head_size, qkv.shape[-1] - self.heads * self.head_size), dim=-1)
        scaled = query.unflatten(-1, (self.heads, self.head_size)) * self.scales + self.shift
        return torch.cat((scaled.flatten(-2), rest), dim=-1)


ADAM = OptimizerConfig(weight_decay=0.1, clip_grad=0.05)
SGD = OptimizerConfig(optimizer="sgd", clip_grad=0.05)
GATED = Task(ADAM, build_layer=GatedLayer, steps=3)
GATED_DEEP = Task(SGD, model=DEEP_MODEL, build_layer=GatedLayer, steps=2)
HEADS = Task(SGD, build_layer=HeadScaleLayer, steps=2)
EXPERTS = Task(
    SGD,
    model=replace(MODEL, num_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2),
    build_layer=GatedLayer,
    moe=MoEConfig(),
    steps=2,
)
FROZEN = replace(GATED, frozen=("embedding.*", "layers.0.*", "layers.1.gate", "*.post_norm.weight"))
FROZEN_DEEP = replace(GATED_DEEP, frozen=("embedding.*", "layers.[0-3].*", "final_layernorm.weight"))
FROZEN_HEAD = replace(GATED, frozen=("output_layer.*", "*.linear_fc1.weight", "*layernorm.weight"))
FROZEN_EXPERTS = replace(EXPERTS, frozen=("*.experts.linear_fc1.weight", "*.router.weight"))

ZERO_1: dict[str, Any] = {"strategy": "optim", "overlap_grad_reduce": True, "overlap_param_gather": True}
ZERO_2: dict[str, Any] = ZERO_1 | {"strategy": "optim_grads"}
FSDP: dict[str, Any] = {"strategy": "optim_grads_params"}

LAYOUTS: dict[str, Layout] = {
    "replicas, overlap": Layout(1, 2, microbatches=2, bucket_size=3000, overlap_grad_reduce=True),
    "ZeRO-1": Layout(1, 2, microbatches=2, bucket_size=3000, **ZERO_1),
    "ZeRO-2": Layout(1, 2, microbatches=2, bucket_size=3000, **ZERO_2),
    "FSDP": Layout(1, 2, microbatches=2, **FSDP),
    "HSDP": Layout(1, 4, instances=2, **FSDP),
    "tensor and sequence": Layout(2, 1, True, microbatches=2),
    "tensor alone": Layout(2),
    "context": Layout(cp=2, microbatches=2),
    "tensor, sequence, FSDP": Layout(2, 2, True, microbatches=2, **FSDP),
    "full recompute": Layout(activations=full("uniform", 1), microbatches=2),
    "full recompute of both, ZeRO-2": Layout(1, 2, activations=full("uniform", 2), microbatches=2, **ZERO_2),
    "recompute of modules, ZeRO-1": Layout(
        2, 2, True, activations=selective("core_attn", "layernorm", "mlp"), microbatches=2, bucket_size=3000, **ZERO_1
    ),
    "full recompute, FSDP": Layout(1, 2, activations=full("uniform", 1), microbatches=2, **FSDP),
    "offload": Layout(activations=full("uniform", 1, cpu_offloading_num_layers=2), microbatches=2),
}
DEEP_LAYOUTS: dict[str, Layout] = {
    "1f1b, tensor and sequence": Layout(2, 1, True, pp=2, microbatches=4),
    "interleaved, ZeRO-1": Layout(
        1, 2, pp=2, schedule="interleaved", chunks=2, microbatches=4, bucket_size=3000, **ZERO_1
    ),
    "zb-h1, ZeRO-2": Layout(1, 2, pp=2, schedule="zb-h1", microbatches=4, bucket_size=3000, **ZERO_2),
    "zb-v, FSDP": Layout(1, 2, pp=2, schedule="zb-v", microbatches=4, **FSDP),
    "dualpipe-v, full recompute": Layout(pp=2, schedule="dualpipe-v", microbatches=4, activations=full("uniform", 1)),
}
HEAD_LAYOUTS = {
    name: LAYOUTS[name] for name in ("FSDP", "tensor and sequence", "tensor alone", "tensor, sequence, FSDP")
}
EXPERT_LAYOUTS: dict[str, Layout] = {
    "experts divided": Layout(1, 2, ep=2, microbatches=2),
    "experts divided, FSDP": Layout(1, 4, ep=2, microbatches=2, **FSDP),
    "experts, tensor and sequence": Layout(2, 2, True, ep=2, microbatches=2, **ZERO_1),
}
ROWS = [
    *((f"gated, {name}", GATED, layout) for name, layout in LAYOUTS.items()),
    *((f"gated, {name}", GATED_DEEP, layout) for name, layout in DEEP_LAYOUTS.items()),
    *((f"heads, {name}", HEADS, layout) for name, layout in HEAD_LAYOUTS.items()),
    *((f"experts, {name}", EXPERTS, layout) for name, layout in EXPERT_LAYOUTS.items()),
    *((f"frozen, {name}", FROZEN, layout) for name, layout in LAYOUTS.items()),
    *((f"frozen, {name}", FROZEN_DEEP, layout) for name, layout in DEEP_LAYOUTS.items()),
    *((f"frozen head, {name}", FROZEN_HEAD, LAYOUTS[name]) for name in ("ZeRO-1", "FSDP", "tensor and sequence")),
    *((f"frozen experts, {name}", FROZEN_EXPERTS, layout) for name, layout in EXPERT_LAYOUTS.items()),
]


def train(task: Task, layout: Layout) -> Trace:
    """Train on this rank; frozen parameters have their initial weights afterwards."""
    topology = place_in(layout)
    executor, data_parallel, optimizer = build(task, layout, topology)
    trace = make_steps(task, layout, topology, executor, data_parallel, optimizer, range(task.steps))
    trained = {state.info.name for state in optimizer.state()} | {split.info.name for split in data_parallel.splits}
    for stored in data_parallel.local_params:
        initial = torch.empty_like(stored.tensor)
        initialize_range(initial, stored.info, stored.start, SEED)
        assert torch.equal(initial, stored.tensor) != (stored.info.name in trained), stored.info.name
    return trace


@pytest.mark.parametrize(("task", "layout"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_every_layout_equals_one_process(four_ranks: RankPool, task: Task, layout: Layout) -> None:
    compare_with_one_process(four_ranks, task, layout, train)


@pytest.mark.parametrize("task", [GATED, HEADS, FROZEN, FROZEN_HEAD], ids=["gated", "heads", "frozen", "frozen head"])
def test_one_process_has_the_gradients_of_autograd(task: Task) -> None:
    """Without data parallelism autograd holds all gradients. Finite differences check it where our own operations could
    be wrong together."""
    task = replace(task, optimizer=OptimizerConfig(optimizer="sgd", clip_grad=0.0), steps=1)
    found = assemble(train(task, Layout()).gradients[0])
    model = build_model(task.model, replace(context(single_process(), Layout()), build_layer=task.build_layer), SEED)
    freeze(model, task.frozen, single_process())
    loss = mean_loss(model)
    loss().backward()
    grads = {info_of(one).name: one.grad for one in model.parameters()}
    assert {name for name, grad in grads.items() if grad is not None} == found.keys()
    for name, grad in grads.items():
        if grad is None:
            continue
        rows = found[name].shape[0]  # without the vocabulary's padding
        assert (grad[:rows] - found[name]).abs().max() < 1e-12 * grad.abs().max(), name
    for parameter in model.parameters():
        info = info_of(parameter)
        if parameter.grad is None or info.name.split(".")[-1] == "weight":
            continue
        with torch.no_grad():
            flat, step = parameter.view(-1), 1e-5
            place = int(parameter.grad.abs().argmax())
            value = float(flat[place])
            flat[place] = value + step
            above = float(loss())
            flat[place] = value - step
            slope = (above - float(loss())) / (2 * step)
            flat[place] = value
        assert slope == pytest.approx(float(parameter.grad.view(-1)[place]), rel=1e-4), info.name


def mean_loss(model: Any) -> Callable[[], Tensor]:
    (batch,) = microbatches(0, Layout(), 0)

    def loss() -> Tensor:
        logits = model.chunks[0](batch["tokens"])
        losses = model.output_layer.token_losses(logits, batch["labels"])
        mask = batch["loss_mask"].double()
        mean: Tensor = (losses * mask).sum() / mask.sum()
        return mean

    return loss


def test_the_optimizer_has_no_state_of_frozen_parameters() -> None:
    _, data_parallel, optimizer = build(FROZEN, Layout(), single_process())
    names = {state.info.name for state in optimizer.state()}
    assert not any(name.startswith(("embedding.", "layers.0.")) or "post_norm" in name for name in names)
    assert any(name.startswith("layers.1.") for name in names)
    stored = {local.info.name for local in data_parallel.local_params}
    assert {"embedding.word_embeddings.weight", "layers.0.gate"} <= stored
    weights = {local.info.name: local.tensor.clone() for local in data_parallel.local_params}
    data_parallel.initialize(SEED)
    for local in data_parallel.local_params:
        assert torch.equal(local.tensor, weights[local.info.name])


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_freezing_after_the_run_is_built_is_refused(four_ranks: RankPool, strategy: Any) -> None:
    layout = Layout(1, 2, strategy=strategy)
    for sentence in four_ranks.run(frozen_too_late, layout, world_size=2):
        assert sentence.startswith("requires_grad of layers.0.gate was set to False after the run had been built")
        assert "--freeze-parameters" in sentence


def frozen_too_late(layout: Layout) -> str:
    executor, data_parallel, _ = build(GATED, layout, place_in(layout))
    (chunk,) = (chunk for chunk in executor.chunks if isinstance(chunk, nn.Module))
    gate = next(one for name, one in chunk.named_parameters() if name.endswith("gate"))
    gate.requires_grad_(False)
    with pytest.raises(ConfigError) as error:
        data_parallel.start_grad_accumulation(1)
    return str(error.value)


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [(("layers.0.*", "layer.1.*"), "--freeze-parameters layer.1.* fits no parameter"), (("*",), "leaves no parameter")],
)
def test_a_pattern_that_fits_nothing_or_all_is_refused(patterns: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("*", r"\*")):
        build(replace(GATED, frozen=patterns), Layout(), single_process())


def test_initial_values_are_functions_of_the_global_index() -> None:
    model = build_model(MODEL, replace(context(single_process(), Layout()), build_layer=GatedLayer), SEED)
    layer = model.transformer_chunks[0].layers[1]
    assert isinstance(layer, GatedLayer)
    assert torch.equal(layer.gate, torch.full((32,), 0.7, dtype=torch.float64))
    index = torch.arange(2 * 3 * 32)
    wanted = normal(0.3)(parameter_key(SEED, "layers.1.mix"), index).view(2, 3, 32)
    assert torch.equal(layer.mix, wanted)
    assert 0 < float(layer.strength.detach()) < 1
