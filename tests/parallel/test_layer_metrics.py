"""Metrics of single layers, and norms that a listener sums over the model, are those of one process in every layout."""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron.core.models.layer import AttentionProjection
from megatron.core.precision import build_loss_scaler
from megatron.features.layer_metrics.listener import AttentionLogits, LayerNorms, layer_of
from megatron.training.context import TrainModule
from megatron.training.loop.step import StepOutcome
from megatron.training.loop.trainer import Listener, Trainer
from tests.parallel.comparison import TOLERANCE, one_process
from tests.parallel.layout_run import Layout, Task, Trace, assemble, build, make_step, place_in
from tests.parallel.tasks import ADAM_CLIPPED_HARD, DEEP_TIED, L4, MIX_ADAM, full
from tests.rank_pool import RankPool

LAYOUTS: dict[str, tuple[Task, Layout]] = {
    "tensor and sequence": (ADAM_CLIPPED_HARD, Layout(2, 1, True, microbatches=2)),
    "interleaved, tied, recompute": (
        DEEP_TIED,
        Layout(pp=2, schedule="interleaved", chunks=2, microbatches=4, activations=full("uniform", 1)),
    ),
    "context, chunks of attention": (L4, Layout(cp=2)),
    "ZeRO-1, optimizer in host memory": (ADAM_CLIPPED_HARD, Layout(1, 2, strategy="optim", offload=0.5)),
    "HSDP": (ADAM_CLIPPED_HARD, Layout(1, 4, strategy="optim_grads_params", instances=2)),
    "experts": (MIX_ADAM, Layout(2, 2, True, ep=2, strategy="optim")),
}
STEPS = 2
"""The metrics are those of the last step."""


class ParameterNorms(Listener):
    """The gradient norm of every parameter."""

    def before_update(self, trainer: Trainer, gradient_factor: float) -> None:
        optimizer = trainer.module.optimizer
        self.norms = optimizer.norms([shard.gradient * gradient_factor for shard in optimizer.shards])

    def after_step(self, trainer: Trainer, outcome: StepOutcome) -> None:
        outcome.metrics.update({f"parameter/{name}": norm for name, norm in self.norms.items()})


def measure(task: Task, layout: Layout, maxima: dict[int, float] | None = None) -> list[dict[str, float]]:
    """The layers' metrics of each step on this rank; also, by slow code, the largest logits of one process."""
    topology = place_in(layout)
    executor, data_parallel, optimizer = build(task, layout, topology)
    optimizer.trace = Trace()
    scaler = build_loss_scaler(task.precision)
    module = TrainModule(executor, data_parallel, optimizer, scaler, topology, optimizer.fp8, optimizer.experts)
    progress = SimpleNamespace(iteration=0)
    trainer = cast(Trainer, SimpleNamespace(module=module, state=SimpleNamespace(progress=progress)))
    listeners = [LayerNorms(STEPS), AttentionLogits(STEPS, optimizer.model), ParameterNorms()]
    steps = []
    for step in range(STEPS):
        if maxima is not None and step == STEPS - 1:
            note_maxima(optimizer.model, maxima)
        for listener in listeners:
            listener.on_iteration_start(trainer)

        def before_update(gradient_factor: float) -> None:
            for listener in listeners:
                listener.before_update(trainer, gradient_factor)

        outcome = make_step(module, task, layout, step, before_update=before_update)
        for listener in listeners:
            listener.after_step(trainer, outcome)
        progress.iteration += 1
        kinds = "grad_norm/", "weight_norm/", "update_ratio/", "max_attention_logit", "parameter/"
        steps.append({name: value for name, value in outcome.metrics.items() if name.startswith(kinds)})
    return steps


def note_maxima(model: torch.nn.Module, maxima: dict[int, float]) -> None:
    """Note the largest logit of each layer of a whole model, from all logits."""

    def note(layer: int, projection: AttentionProjection, qkv: Tensor, spans: Any) -> None:
        query, key, _ = projection.shape.split(qkv.detach())
        logits = query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).transpose(-1, -2) / query.shape[-1] ** 0.5
        rows, length = query.shape[0], query.shape[2]
        is_visible = torch.zeros(rows, length, length, dtype=torch.bool)
        for span in [SimpleNamespace(rows=slice(None), start=0, stop=length)] if spans is None else spans.spans:
            is_visible[span.rows, span.start : span.stop, span.start : span.stop] = True
        hidden = ~is_visible.tril()[:, None, None]
        maxima[layer] = max(maxima.get(layer, -math.inf), float(logits.masked_fill(hidden, -math.inf).max()))

    found = [module for module in model.modules() if isinstance(module, AttentionProjection)]
    for layer, projection in enumerate(found):
        projection.register_forward_pre_hook(
            lambda module, arguments, layer=layer: note(layer, cast(AttentionProjection, module), *arguments)
        )


def layer_norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    squares: dict[str, float] = defaultdict(float)
    for name, tensor in tensors.items():
        squares[layer_of(name)] += float(tensor.square().sum())
    return {layer: math.sqrt(square) for layer, square in squares.items()}


@cache
def expected_metrics(task: Task) -> dict[str, float]:
    """The metrics of the last step, from whole tensors of one process."""
    maxima: dict[int, float] = {}
    measure(task, Layout(), maxima)
    trace = one_process(task)
    gradients, before, after = (
        assemble(parts) for parts in (trace.gradients[STEPS - 1], trace.weights[STEPS - 2], trace.weights[STEPS - 1])
    )
    changes, weights = layer_norms({name: after[name] - before[name] for name in after}), layer_norms(after)
    return {
        **{f"grad_norm/{layer}": norm for layer, norm in layer_norms(gradients).items()},
        **{f"weight_norm/{layer}": norm for layer, norm in weights.items()},
        **{f"update_ratio/{layer}": norm / weights[layer] for layer, norm in changes.items()},
        **{f"parameter/{name}": float(gradient.norm()) for name, gradient in gradients.items()},
        **{f"max_attention_logit/layers.{layer}": logit for layer, logit in maxima.items()},
        "max_attention_logit": max(maxima.values()),
    }


@pytest.mark.parametrize(("task", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_metrics_of_layers_are_those_of_one_process(four_ranks: RankPool, task: Task, layout: Layout) -> None:
    expected = expected_metrics(task)
    assert len(expected) > 4 * task.model.num_layers
    for first, last in four_ranks.run(measure, task, layout, world_size=layout.world_size):
        assert all(name.startswith("parameter/") for name in first)
        assert last == pytest.approx(expected, rel=TOLERANCE)


def test_layers_are_named_as_their_parameters() -> None:
    names = ["layers.11.mlp.linear_fc1.weight", "embedding.word_embeddings.weight", "final_layernorm.weight"]
    assert [layer_of(name) for name in names] == ["layers.11", "embedding", "final_layernorm"]
