"""The same model here and in transformers: configs, weights in both forms, and comparisons of logits and gradients."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.architectures.catalog import ARCHITECTURES
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.hugging_face.mapping import HuggingFaceMapping
from megatron.config.model import MoEConfig
from megatron.core.models.layer import BuildContext
from megatron.core.models.parallelize import build_experts, build_model
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.attention import AttentionKernel, hardest_mask
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.ops.documents import Documents
from megatron.core.parameter import info_of
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.topology import RankGrid, Topology, single_process
from tests.checkpoint.models import hugging_face_model

transformers: Any = pytest.importorskip("transformers")
revert_weight_conversion: Any = pytest.importorskip("transformers.core_model_loading").revert_weight_conversion

CPU = torch.device("cpu")
TOLERANCE = 1e-9
LENGTH = 24
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 56},
    # One dense layer, and experts of another width than its MLP.
    "qwen3_moe": {"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 24, "moe_layer_freq": "[0,1]"},
}
"""The experts of the families that have some."""
LLAMA4: dict[str, Any] = {
    "qk_l2_norm": True,
    # The second layer has neither rotary embedding nor chunks.
    "no_rope_freq": "2",
    "attention_chunk_size": 8,
    "attention_temperature_tuning": True,
    # Short, so that the temperature changes within the sequence.
    "attention_temperature_floor": 4,
    "num_experts": 4,
    "moe_layer_freq": "[0,1]",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_topk": 1,
}
"""The layers of Llama 4."""


def architecture(*, scaling: bool, tied: bool, tp: int, family: str = "llama") -> TransformerConfig:
    unit = 2 * tp
    vocab_size = 61
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=56,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=8,  # unlike hidden / heads, as Llama-like models may have it
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // unit) * unit,
        max_position_embeddings=64,
        rotary_base=10000.0,
        use_rope_scaling=scaling,
        rope_scaling_factor=8.0,
        # Short, so that all three regimes of the scaling occur within the sequence.
        rope_scaling_original_length=16,
        untie_embeddings_and_output_weights=not tied,
        init_method_std=0.2,
        **ARCHITECTURES[family].features,
        **(EXPERTS | {"llama4_text": LLAMA4}).get(family, {}),
    )


def with_yarn(factor: float, original: int, **more: Any) -> TransformerConfig:
    """A model whose heads have eight pairs."""
    config = architecture(scaling=False, tied=False, tp=1)
    return replace(
        config,
        kv_channels=16,
        rope_scaling_original_length=8192,
        max_position_embeddings=int(factor * original),
        position_embedding_type="yarn",
        yarn_rotary_scaling_factor=factor,
        yarn_original_max_position_embeddings=original,
        **{f"yarn_{name}": value for name, value in more.items()},
    )


YARN_VARIANTS = {
    "defaults": with_yarn(4.0, 512),
    "not rounded": with_yarn(4.0, 512, correction_range_round_to_int=False),
    "other betas": with_yarn(16.0, 4096, beta_fast=8.0, beta_slow=2.0),
    "equal betas": with_yarn(2.0, 512, beta_fast=4.0, beta_slow=4.0, correction_range_round_to_int=False),
    "mscale": with_yarn(40.0, 256, mscale=0.707, mscale_all_dim=1.3),
    "attention factor": with_yarn(4.0, 512, attention_factor=1.5),
    "factor 1": with_yarn(1.0, 512),
    "short": with_yarn(4.0, 16),
}


def to_global(model: Any, state: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Tensors of ``model`` of transformers (weights or gradients) under our names and in our shapes.

    By the mapping of conversions: a wrong element of it gives another model than that of transformers.
    """
    published = revert_weight_conversion(model, state)
    found = {}
    for name, tensor in HuggingFaceMapping.of(config).ours.items():
        found[name] = torch.full(tensor.shape, torch.nan, dtype=model.dtype)
        for copy in tensor.copies((0,) * len(tensor.shape), tensor.shape):
            found[name][copy.place] = copy.across(published[copy.source][copy.source_place])
    return found


@contextmanager
def fp32_means_fp64() -> Iterator[None]:
    """transformers computes norms, softmax and rotations in fp32 whatever the model's dtype; widen those too."""
    with (
        patch.object(torch, "float", torch.float64),
        patch.object(torch, "float32", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def random_model(config: TransformerConfig, dtype: torch.dtype = torch.float64) -> Any:
    """A model of transformers with random weights."""
    torch.manual_seed(3)
    model = hugging_face_model(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 1.0))
    return model


@dataclass(frozen=True)
class Results:
    """What a model computes for a batch."""

    weights: dict[str, Tensor]
    logits: Tensor
    """``[b, s, v]``."""
    losses: Tensor
    """Of every token, ``[b, s]``."""
    gradients: dict[str, Tensor]
    """Of the sum of the losses."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All results with their names."""
        yield "logits", self.logits
        yield "losses", self.losses
        yield from self.gradients.items()


def expected(
    config: TransformerConfig,
    dtype: torch.dtype = torch.float64,
    given: tuple[Tensor, Tensor] | None = None,
    *,
    patched: bool = True,
    **arguments: Any,
) -> Results:
    """What transformers computes for the tokens and labels ``given``, by default :func:`batch`.

    In fp64 it computes norms, softmax and rotations in fp32 unless ``patched``.
    """
    with fp32_means_fp64() if patched and dtype == torch.float64 else nullcontext():
        model = random_model(config, dtype)
        tokens, labels = batch(config) if given is None else given
        logits = model(tokens, **arguments).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses.sum().backward()
    weights, gradients = weights_and_gradients(model, config)
    return Results(weights, logits.detach(), losses.detach().view_as(labels), gradients)


def weights_and_gradients(model: Any, config: TransformerConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of a model of transformers after its backward pass, under our names and in our shapes."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return to_global(model, weights, config), to_global(model, gradients, config)


def batch(config: TransformerConfig) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, config.vocab_size, (3, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return text[:, :-1], text[:, 1:]


def load(model: TransformerModel, weights: dict[str, Tensor]) -> None:
    for parameter in model.parameters():
        for box in info_of(parameter).boxes:
            source = weights[info_of(parameter).name]
            place = tuple(slice(start, start + size) for start, size in zip(box.global_offset, box.shape))
            with torch.no_grad():
                box.view(parameter).copy_(source[place])


def topology_of(tp: int, ep: int = 1) -> Topology:
    """This rank's place; one tensor-parallel rank needs no other."""
    if tp == 1:
        return single_process()
    return Topology(RankGrid(tp=tp, ep=ep, etp=tp // ep), torch.distributed.get_rank(), CPU)


def our_model(
    config: TransformerConfig,
    weights: dict[str, Tensor],
    topology: Topology,
    sequence_parallel: bool = False,
    kernel: AttentionKernel | None = None,
    moe: MoEConfig | None = None,
) -> TransformerModel:
    """This rank's part of our model with ``weights``, in their dtype."""
    dtype = weights["final_layernorm.weight"].dtype
    parallel = TensorParallel(topology.tensor_parallel, sequence_parallel)
    kernel = kernel or choose_attention_kernel(
        "auto", CPU, dtype, config.softmax_type != "vanilla", hardest_mask(config)
    )
    experts = build_experts(config, moe or MoEConfig(), topology)
    model = build_model(config, BuildContext(parallel, dtype, CPU, kernel, experts=experts), seed=1)
    load(model, weights)
    return model


def compare_on_rank(
    config: TransformerConfig, tp: int, sequence_parallel: bool, ep: int = 1, dtype: torch.dtype = torch.float64
) -> float:
    """Build this rank's part, compare all that it holds with transformers, and return the largest error."""
    wanted, topology = expected(config, dtype), topology_of(tp, ep)
    return largest_error(
        our_model(config, wanted.weights, topology, sequence_parallel), wanted, batch(config), topology
    )


def largest_error(
    model: TransformerModel,
    wanted: Results,
    batch: tuple[Tensor, Tensor],
    topology: Topology,
    documents: Documents | None = None,
) -> float:
    """Of what this rank's part of ``model`` computes for the tokens and labels of ``batch``."""
    tokens, labels = batch
    (chunk,), output_layer = model.transformer_chunks, model.output_layer
    assert output_layer is not None
    logits = chunk(tokens, documents)  # [s, b, v/tp]
    losses = output_layer.token_losses(logits, labels)
    found, first = logits.detach().transpose(0, 1), output_layer.vocab_weight.first_id
    theirs = wanted.logits[..., first : first + found.shape[-1]]
    errors = [relative_error(found[..., : theirs.shape[-1]], theirs), relative_error(losses.detach(), wanted.losses)]
    losses.sum().backward()
    return max(*errors, *gradient_errors(model, topology, wanted.gradients))


def gradient_errors(model: TransformerModel, topology: Topology, wanted: dict[str, Tensor]) -> list[float]:
    """The error of every part of a gradient that this rank has."""
    errors = []
    for parameter in model.parameters():
        info, gradient = info_of(parameter), parameter.grad
        assert gradient is not None, info.name
        if info.gradient_is_partial:
            gradient = topology.tensor_parallel.all_reduce(gradient)
        for box in info.boxes:
            place = tuple(slice(start, start + size) for start, size in zip(box.global_offset, box.shape))
            errors.append(relative_error(box.view(gradient), wanted[info.name][place]))
    return errors


def relative_error(found: Tensor, wanted: Tensor) -> float:
    error = float((found - wanted).abs().max() / wanted.abs().max())
    # The maximum of errors may drop a NaN.
    assert math.isfinite(error)
    return error
