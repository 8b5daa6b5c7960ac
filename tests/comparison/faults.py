"""Faults of the code that are planted on side B, and the forty pairs of runs in which a cause must be named."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megatron.core import optimizer
from megatron.core.context_parallel import ContextSplit
from megatron.core.fp8 import Fp8Scaling
from megatron.core.models import layer
from megatron.core.moe import layer as experts
from megatron.core.moe.routing import Routing
from megatron.core.ops import attention
from megatron.core.ops.documents import Documents
from megatron.core.pipeline_parallel import PipelineExecutor
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.data import gpt_dataset, loader

Patch = Callable[[], AbstractContextManager[Any]]


def changed(place: Any, name: str, change: Callable[[Any], Any]) -> Patch:
    """Replace the function ``name`` of a module or class by ``change`` of it."""
    return lambda: mock.patch.object(place, name, change(getattr(place, name)))


def on_result(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of what a function returns."""
    return lambda function: lambda *inputs, **more: change(function(*inputs, **more))


def on_first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of the first argument of a function, or of the second one of a method."""
    return lambda function: lambda first, *inputs, **more: function(change(first), *inputs, **more)


class _Scaled(torch.autograd.Function):
    """The same values, with the gradient of an early layer doubled."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def _rolled_heads(qkv: Tensor, *more: Any, **others: Any) -> Tensor:
    """Attention whose value heads are permuted."""
    found: Tensor = _ATTENTION(torch.cat((qkv[..., :-16], qkv[..., -16:].roll(8, -1)), -1), *more, **others)
    return found


_ATTENTION = attention.fused_attention


def _stale(finish: Callable[[Fp8Scaling], None], scaling: Fp8Scaling) -> None:
    """The scales of a time at which the tensors were smaller."""
    finish(scaling)
    scaling.delayed_state.scale.mul_(256.0)


def _doubled(routing: Routing) -> Routing:
    return Routing(routing.experts, routing.weights * 2)


def _shifted_labels(build: Any) -> Any:
    def shifted(*inputs: Any) -> Any:
        sample = build(*inputs)
        return {**sample, "labels": np.roll(sample["labels"], 1)}

    return shifted


def _late_starts(attention: Any) -> Any:
    """Documents begin one token late, for attention."""

    def late(self: Documents) -> Any:
        starts = self.starts.roll(1, 1)
        starts[:, 0] = True
        return attention.func(replace(self, starts=starts))

    return property(late)


def _decaying_gains(gain: Any) -> Any:
    return lambda *inputs, **more: replace(gain(*inputs, **more), weight_decay=True)


def _whole_gradients(gain: Any) -> Any:
    """The gradients of norms are not summed over tensor-parallel ranks."""
    return lambda *inputs, **more: replace(gain(*inputs, **more), gradient_is_partial=False)


def _half_loss(train: Any) -> Any:
    return lambda self, microbatches, number, scale: train(self, microbatches, number, scale / 2)


def _one_later(microbatches: Any) -> Any:
    return lambda total, consumed, *more: microbatches(total, consumed + more[0] * more[2], *more)


PATCHES: Mapping[str, Patch] = {
    "gradient divided twice": changed(PipelineExecutor, "train", _half_loss),
    "missing clip": changed(optimizer, "clip_coefficient", lambda function: lambda norm, limit: 1.0),
    "stale FP8 scale": changed(Fp8Scaling, "finish_step", lambda finish: lambda self: _stale(finish, self)),
    "shifted label": lambda: mock.patch.multiple(
        gpt_dataset, build_sample=_shifted_labels(gpt_dataset.build_sample)
    ),
    "skipped sample": changed(loader, "single_pass_microbatches", _one_later),
    "mask at a document's border": changed(Documents, "attention", _late_starts),
    "permuted head": lambda: mock.patch.object(layer, "fused_attention", _rolled_heads),
    "weight decay on norms": changed(layers.LayerContext, "gain", _decaying_gains),
    "norm gradients not summed": changed(layers.LayerContext, "gain", _whole_gradients),
    "gate and up exchanged": changed(layers, "swiglu", on_first(lambda both: torch.cat(both.chunk(2, -1)[::-1], -1))),
    "residual scaled": changed(layer.TransformerLayer, "forward", on_result(lambda x: x * 0.999)),
    "embedding scaled": changed(layers.VocabParallelEmbedding, "forward", on_result(lambda x: x * 1.001)),
    "norm of half the width": changed(layer, "rms_norm", on_result(lambda x: x * 0.5**0.5)),
    "rotation of the queries alone": changed(layer, "apply_rotary", lambda rotate: lambda qkv, table, size, *more: (
        rotate(qkv, table, size * 2 // 3, *more)
    )),
    "router weights not normalised": changed(experts, "route", on_result(_doubled)),
    "gradient of the MLP doubled": changed(layer.MLP, "forward", on_result(_Scaled.apply)),
    "partial sums lost": changed(TensorParallel, "reduce_output", lambda reduce: lambda self, partial: reduce(
        self, partial if self.rank == 0 else torch.zeros_like(partial)
    )),
    "positions of the neighbour": changed(ContextSplit, "positions", lambda positions: lambda self, length: positions(
        ContextSplit(self.size - 1 - self.rank, self.size), length
    )),
}  # fmt: skip
"""By name, the code of side B in which a line is wrong."""


# --- pairs ---------------------------------------------------------------------------------------------------

TP = "--tensor-model-parallel-size 2"
TP_SP = f"{TP} --sequence-parallel"
CP = "--context-parallel-size 2"
CP_GATHER = f"{CP} --cp-comm-type allgather"
CP_EXCHANGE = f"{CP} --cp-comm-type a2a"
PP = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
ZERO_BUBBLE = f"{PP} --pipeline-schedule zb-h1"
ZERO = "--use-distributed-optimizer"
FSDP = "--use-torch-fsdp2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24"
EP = f"{EXPERTS} --expert-model-parallel-size 2"
DOCUMENTS = "--reset-attention-mask"
HARD = "--clip-grad 0.05"
FP8 = "--bf16 --fp8-format hybrid --fp8-amax-history-len 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DECAY = "--weight-decay 0.5"
LARGE = "--micro-batch-size 4"


@dataclass(frozen=True)
class Pair:
    """Two runs with one cause, and perhaps a harmless difference of flags."""

    cause: str
    """The flag, or the first operation that differs: the only one that must be named."""
    b: str = ""
    """Flags of B alone."""
    common: str = ""
    """Flags of both."""
    fault: str = ""
    """The fault of :data:`PATCHES` in the code of B."""
    harmless: str = ""
    """Further flags of B, which must not be named."""
    shows: str = ""
    """Where a flag's difference shows first: samples, weights, or an operation."""


ATTENTION, MLP = "layers.0.self_attention", "layers.0.mlp"
FIRST_UPDATE = "update of embedding.word_embeddings.weight"
PAIRS = (
    # Flags
    Pair("--rotary-base", "--rotary-base 5000", TP_SP, shows=f"{ATTENTION}.rotated_query"),
    Pair("--norm-epsilon", "--norm-epsilon 1e-3", PP, harmless=ZERO_BUBBLE, shows="layers.0.input_layernorm"),
    Pair("--untie-embeddings-and-output-weights", "--no-untie-embeddings-and-output-weights", FSDP, shows="logits"),
    Pair("--clip-grad", "--clip-grad 0.1", ZERO, shows=FIRST_UPDATE),
    Pair("--weight-decay", "--weight-decay 0.5", TP, shows=FIRST_UPDATE),
    Pair("--adam-beta1", "--adam-beta1 0.5", INTERLEAVED, shows=FIRST_UPDATE),
    Pair("--adam-beta2", "--adam-beta2 0.5", shows=FIRST_UPDATE),
    Pair("--adam-eps", "--adam-eps 1e-2", FSDP, shows=FIRST_UPDATE),
    Pair("--lr", "--lr 2e-3", CP, harmless=RECOMPUTE, shows=FIRST_UPDATE),
    Pair("--seed", "--seed 7", TP, shows="tokens"),
    Pair("--init-method-std", "--init-method-std 0.05", PP, shows="embedding.word_embeddings.weight"),
    Pair("--window-size", "--window-size 4,0", CP_EXCHANGE, shows=f"{ATTENTION}.core_attention"),
    Pair("--attn-logit-softcapping", "--attn-logit-softcapping 0.1", shows=f"{ATTENTION}.core_attention"),
    Pair("--softmax-type", "--softmax-type off-by-one", CP_GATHER, harmless=LARGE, shows=f"{ATTENTION}.core_attention"),
    Pair("--eod-mask-loss", "--eod-mask-loss", PP, shows="loss_mask"),
    Pair("--reset-attention-mask", "--reset-attention-mask", TP, shows=f"{ATTENTION}.core_attention"),
    Pair("--reset-position-ids", "--reset-position-ids", harmless=LARGE, shows=f"{ATTENTION}.rotated_query"),
    Pair("--qk-layernorm", "--qk-layernorm", TP_SP, shows=f"{ATTENTION}.rotated_query"),
    Pair("--moe-router-topk", "--moe-router-topk 3", EP, harmless=TP_SP, shows=f"{MLP}.router"),
    Pair("--z-loss-multiplier", "--z-loss-multiplier 0.1", PP, shows="gradient of logits"),
    Pair("--lr-warmup-iters", "--lr-warmup-iters 5", harmless=ZERO, shows=FIRST_UPDATE),
    Pair("--optimizer", "--optimizer sgd --sgd-momentum 0.0", shows=FIRST_UPDATE),
    # Code
    Pair("gradient of loss", common=ZERO_BUBBLE, fault="gradient divided twice"),
    Pair(FIRST_UPDATE, common=f"{HARD} {FSDP}", fault="missing clip"),
    Pair(f"{ATTENTION}.query", common=FP8, fault="stale FP8 scale"),
    Pair("labels", fault="shifted label", harmless=TP),
    Pair("tokens", common=ZERO, fault="skipped sample"),
    Pair(f"{ATTENTION}.core_attention", common=DOCUMENTS, fault="mask at a document's border"),
    Pair(f"{ATTENTION}.core_attention", common=TP, fault="permuted head", harmless=LARGE),
    Pair("update of layers.0.input_layernorm.weight", common=f"{DECAY} {PP}", fault="weight decay on norms"),
    Pair("gradient of final_layernorm.weight", common=TP_SP, fault="norm gradients not summed"),
    Pair(f"{MLP}.activation", common=CP, fault="gate and up exchanged", harmless="--loss-chunk-size 16"),
    Pair("layers.0.output", common=FSDP, fault="residual scaled", harmless=RECOMPUTE),
    Pair("embedding", common=INTERLEAVED, fault="embedding scaled"),
    Pair("layers.0.input_layernorm", fault="norm of half the width", harmless=CP),
    Pair(f"{ATTENTION}.rotated_key", common=ZERO, fault="rotation of the queries alone"),
    Pair(f"{MLP}.router", common=EP, fault="router weights not normalised"),
    Pair("gradient of layers.1.mlp.activation", common=TP_SP, fault="gradient of the MLP doubled"),
    Pair("--tensor-model-parallel-size", TP, fault="partial sums lost", shows=f"{ATTENTION}.linear_proj"),
    Pair("--context-parallel-size", CP, fault="positions of the neighbour", shows=f"{ATTENTION}.core_attention"),
)
