"""Norms, update ratios and attention logits of layers, as metrics ``NAME/LAYER``, such as ``grad_norm/layers.3``.

All are values of the whole model in any layout, and equal on all ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.operation import LoggingConfig
from megatron.core.models.layer import AttentionProjection
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.attention import Attention, AttentionInputs, AttentionKernel, AttentionOutput, Gradients
from megatron.errors import ConfigError
from megatron.training.loop.step import StepOutcome
from megatron.training.loop.trainer import Listener, Trainer

# Queries whose scores are in memory at a time.
_QUERIES = 128


def build_layer_metrics(config: LoggingConfig, model: TransformerModel) -> Iterator[Listener]:
    """The listeners that the flags ask for."""
    if config.log_layer_norms_interval:
        yield LayerNorms(config.log_layer_norms_interval)
    if config.log_max_attention_logit:
        yield AttentionLogits(config.log_layer_norms_interval or config.log_interval, model)


def layer_of(name: str) -> str:
    """The part of the model to which a parameter belongs: ``layers.3``, ``embedding``, ``output_layer`` …"""
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "layers" else 1])


class LayerNorms(Listener):
    """Every ``interval`` iterations: the norms of each layer's gradient and, after the update, of its weights, and the
    norm of the update over the latter."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        # Before the update: the gradient norms by layer, and the weights of every shard.
        self._before: tuple[dict[str, float], list[Tensor]] | None = None

    def before_update(self, trainer: Trainer, gradient_factor: float) -> None:
        if (trainer.state.progress.iteration + 1) % self._interval == 0:
            optimizer = trainer.module.optimizer
            norms = optimizer.norms([shard.gradient for shard in optimizer.shards], layer_of)
            grad_norms = {layer: norm * abs(gradient_factor) for layer, norm in norms.items()}
            self._before = grad_norms, [shard.weight.clone() for shard in optimizer.shards]

    def after_step(self, trainer: Trainer, outcome: StepOutcome) -> None:
        if self._before is None:
            return
        (grad_norms, before), self._before = self._before, None
        optimizer = trainer.module.optimizer
        norms = optimizer.norms([shard.weight for shard in optimizer.shards], layer_of)
        changes = [old.sub_(shard.weight) for old, shard in zip(before, optimizer.shards)]
        for layer, change in optimizer.norms(changes, layer_of).items():
            outcome.metrics[f"grad_norm/{layer}"] = grad_norms[layer]
            outcome.metrics[f"weight_norm/{layer}"] = norms[layer]
            # Weights are zero only if they have had no update.
            outcome.metrics[f"update_ratio/{layer}"] = change / norms[layer] if norms[layer] else 0.0


class AttentionLogits(Listener):
    """Every ``interval`` iterations: the largest attention logit of each layer, and of all of them."""

    def __init__(self, interval: int, model: TransformerModel) -> None:
        self._interval, self._num_layers = interval, model.config.num_layers
        self._kernels: dict[int, MaximumKernel] = {}
        for chunk, stage in zip(model.transformer_chunks, model.virtual_stages):
            found = [module for module in chunk.layers.modules() if isinstance(module, AttentionProjection)]
            if len(found) != len(stage.layers):
                raise ConfigError("--log-max-attention-logit needs one attention in each layer: remove it.")
            for layer, projection in zip(stage.layers, found):
                kernel = self._kernels[layer] = MaximumKernel()
                # Its tiles are the visible pairs of query and key, also those with keys of other ranks.
                measuring = model.context.context_parallel.attention(layer, kernel)
                projection.attention = MeasuredAttention(projection.attention, measuring, kernel)

    def on_iteration_start(self, trainer: Trainer) -> None:
        for kernel in self._kernels.values():
            kernel.is_on = (trainer.state.progress.iteration + 1) % self._interval == 0

    def after_step(self, trainer: Trainer, outcome: StepOutcome) -> None:
        if (trainer.state.progress.iteration + 1) % self._interval:
            return
        topology = trainer.module.topology
        largest = torch.full((self._num_layers,), -math.inf, dtype=torch.float64, device=topology.device)
        for layer, kernel in self._kernels.items():
            largest[layer] = torch.stack(kernel.maxima).amax()
            kernel.is_on, kernel.maxima = False, []
        by_layer = topology.world.all_reduce(largest, "max").tolist()
        outcome.metrics["max_attention_logit"] = max(by_layer)
        outcome.metrics.update({f"max_attention_logit/layers.{layer}": value for layer, value in enumerate(by_layer)})


class MaximumKernel(AttentionKernel):
    """Notes the largest logits of all tiles before a cap, in fp32 or wider; its output is zero, and never used."""

    has_windows = has_soft_cap = True

    def __init__(self) -> None:
        self.is_on, self.maxima = False, list[Tensor]()

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        query, key = inputs.query, inputs.key
        wide = torch.promote_types(query.dtype, torch.float32)
        keys = key.to(wide).transpose(-1, -2).unsqueeze(2)  # [b, groups, 1, d, s_k]
        positions = torch.arange(key.shape[2], device=key.device)
        first = key.shape[2] - query.shape[2]  # query 0 is at this key
        for start in range(0, query.shape[2], _QUERIES):
            queries = query[:, :, start : start + _QUERIES].to(wide).unflatten(1, (key.shape[1], -1))
            at = torch.arange(start, start + queries.shape[3], device=key.device) + first
            hidden = inputs.mask.hidden(at, positions)
            logits = queries @ keys / math.sqrt(query.shape[-1])  # [b, groups, n / groups, queries, s_k]
            self.maxima.append(logits.amax() if hidden is None else logits.masked_fill(hidden, -math.inf).amax())
        return AttentionOutput(inputs, torch.zeros_like(query), query.new_zeros(query.shape[:3], dtype=wide))

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        raise NotImplementedError("only forward passes are measured")


@dataclass(frozen=True)
class MeasuredAttention(Attention):
    """The attention ``plain``; if ``kernel`` is on, ``measuring`` attends with it to the same positions before."""

    plain: Attention
    measuring: Attention
    kernel: MaximumKernel

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        if self.kernel.is_on:
            self.measuring.forward(inputs)
        return self.plain.forward(inputs)

    def backward(self, grad: Tensor, attended: AttentionOutput, out: Gradients | None = None) -> Gradients:
        return self.plain.backward(grad, attended, out)
