"""Research ideas as a stranger writes them: outside of megatron/, by the names of ``megatron_llama`` alone, each as
short as its recipe in CONTRIBUTING.md."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megatron_llama as ml


class GatedLayer(ml.TransformerLayer):
    """A sliding window in every other layer, a learned gate of attention, a norm after the MLP, and a penalty of large
    activations in the loss."""

    def __init__(self, number: int, config: ml.TransformerConfig, context: ml.BuildContext) -> None:
        super().__init__(number, config, context)
        self.losses = context.auxiliary_losses
        if number % 2:
            self.self_attention.attend_proj.mask = ml.AttentionMask(window=11)
        self.gate = context.parameter(f"layers.{number}.gate", (config.hidden_size,), ml.constant(0.5))
        self.post_norm = ml.RMSNorm(f"layers.{number}.post_norm", config.hidden_size, config, context)

    def forward(self, x: Tensor, positions: ml.SequencePositions) -> Tensor:  # [s/(cp tp), b, h]
        x = x + torch.sigmoid(self.gate) * self.self_attention(x, positions)
        x = x + self.post_norm(self.mlp(x))
        return self.losses.add("penalty", x, x.square().mean(dim=-1), weight=0.01)


class GateGradients(ml.Listener):
    """The gradient norm of each gate, every other iteration."""

    def before_update(self, trainer: Any, gradient_factor: float) -> None:
        self.norms: dict[str, float] = {}
        if trainer.state.progress.iteration % 2 == 0:
            optimizer = trainer.module.optimizer
            norms = optimizer.norms([shard.gradient for shard in optimizer.shards])
            self.norms = {f"gate/{n}": norm * gradient_factor for n, norm in norms.items() if n.endswith("gate")}

    def after_step(self, trainer: Any, outcome: Any) -> None:
        outcome.metrics.update(self.norms)


def copied_halves(context: ml.DataContext) -> Iterator[np.ndarray]:
    """Random tokens, then the same again: what attention learns by copying."""
    length = context.config.seq_length
    for number in count(context.consumed_samples + context.rank, context.size):
        half = np.random.default_rng([7, number]).integers(1, 99, size=length // 2)
        yield np.append(np.tile(half, 2), half[0])


PARTS = ml.RunParts(build_loader=copied_halves, layers=ml.OwnLayers(GatedLayer, auxiliary_losses=("penalty",)))
FLAGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "seq_length": 32, "micro_batch_size": 2, "global_batch_size": 8,
    "device": "cpu", "fp64": True, "tokenizer_type": "NullTokenizer", "vocab_size": 99, "lr": 1e-2, "train_iters": 3,
    "eval_iters": 0, "num_workers": 0,
}  # fmt: skip


def train(**layout: Any) -> list[list[float]]:
    """Loss, gradient norm, penalty and the norms of the gates of every step."""
    with ml.Run(GateGradients(), parts=PARTS, **FLAGS | layout) as run:
        steps = list(run.steps())
    measured = [sorted(name for name in step.metrics if name.startswith(("gate/", "penalty"))) for step in steps]
    return [
        [step.loss, step.grad_norm, *(step.metrics[name] for name in names)] for step, names in zip(steps, measured)
    ]
