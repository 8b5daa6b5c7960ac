"""A loss that a layer adds is the same in every layout: its gradient, and its metric."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.training import OptimizerConfig
from megatron.core.models.layer import BuildContext, SequencePositions, TransformerLayer
from megatron.core.models.parallelize import build_model
from megatron.core.parameter import constant, info_of
from megatron.core.topology import single_process
from tests.parallel.comparison import TOLERANCE, compare_with_one_process, one_process
from tests.parallel.layout_run import DEEP_MODEL, SEED, Layout, Task, assemble, context, microbatches
from tests.parallel.rows import identifier
from tests.parallel.tasks import full, selective
from tests.rank_pool import RankPool

WEIGHT = 0.03


class PenalisedLayer(TransformerLayer):
    """Adds the squares of its gated output to the loss, in the even layers alone: half of the stages may have none."""

    def __init__(self, number: int, config: TransformerConfig, context: BuildContext) -> None:
        super().__init__(number, config, context)
        self.number, self.losses = number, context.auxiliary_losses
        self.gate = context.parameter(f"layers.{number}.gate", (config.hidden_size,), constant(0.5))

    def forward(self, x: Tensor, positions: SequencePositions) -> Tensor:
        x = super().forward(x, positions)  # [s/(cp tp), b, h]
        x = x * self.gate
        return x if self.number % 2 else self.losses.add("squares", x, x.square().mean(dim=-1), WEIGHT)


TASK = Task(
    OptimizerConfig(optimizer="sgd", clip_grad=0.0),
    model=replace(DEEP_MODEL, num_layers=4),
    build_layer=PenalisedLayer,
    auxiliary_losses=("squares",),
    steps=2,
)
LAYOUTS = (
    Layout(tp=2, microbatches=2),
    Layout(tp=2, sequence_parallel=True, cp=2),
    Layout(pp=2, dp=2, microbatches=4, strategy="optim_grads"),
    Layout(pp=4, microbatches=4, activations=full("uniform", 1)),
    Layout(pp=2, schedule="zb-v", microbatches=4, activations=selective("mlp")),
    Layout(dp=2, microbatches=2, strategy="optim_grads_params"),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=identifier)
def test_layout_equals_one_process(four_ranks: RankPool, layout: Layout) -> None:
    compare_with_one_process(four_ranks, TASK, layout)


def test_one_process_takes_the_step_of_the_definition() -> None:
    """By autograd: the sum of all tokens' losses is divided by the unmasked tokens, the metric by all tokens."""
    model = build_model(TASK.model, replace(context(single_process(), Layout()), build_layer=PenalisedLayer), SEED)
    squares: list[Tensor] = []
    for layer in (cast(PenalisedLayer, one) for one in model.transformer_chunks[0].layers):
        layer.losses.names = ["squares"]
        if layer.number % 2 == 0:
            layer.register_forward_hook(lambda module, inputs, x: squares.append(x.square().mean(dim=-1)))
    (batch,) = microbatches(0, Layout(), 0)
    logits = model.transformer_chunks[0](batch["tokens"])
    assert model.output_layer is not None
    losses = model.output_layer.token_losses(logits, batch["labels"]) * batch["loss_mask"]
    # The scale of the loss that the layers add themselves is 0 here.
    ((losses.sum() + WEIGHT * sum(one.sum() for one in squares)) / batch["loss_mask"].sum()).backward()
    trace = one_process(TASK)
    assert trace.auxiliary[0] == {"squares": pytest.approx(torch.stack(squares).mean().item(), rel=TOLERANCE)}
    gradients = assemble(trace.gradients[0])
    for parameter in model.parameters():
        info, wanted = info_of(parameter), parameter.grad
        assert wanted is not None
        error = (gradients[info.name] - wanted[: info.global_shape[0]]).abs().max()
        assert error < TOLERANCE * wanted.abs().max(), info.name
