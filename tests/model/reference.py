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

from megatron.architectures.catalog import ARCHITECTURES, architecture_of
from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import MoEConfig
from megatron.core.models.layer import BuildContext
from megatron.core.models.parallelize import build_experts, build_model
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.attention import AttentionKernel
from megatron.core.ops.attention_kernels import choose_attention_kernel
from megatron.core.ops.documents import Documents
from megatron.core.parameter import info_of
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.topology import RankGrid, Topology, single_process

transformers: Any = pytest.importorskip("transformers")

CPU = torch.device("cpu")
TOLERANCE = 1e-9
LENGTH = 24
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 56},
    # One dense layer, and experts of another width than its MLP.
    "qwen3_moe": {"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 24, "moe_layer_freq": "[0,1]"},
}
"""The experts of the families that have some."""
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""Names in published files: the block, and gate, up and down of an expert."""


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
        **EXPERTS.get(family, {}),
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


def common_settings(config: TransformerConfig) -> dict[str, Any]:
    """The arguments that the configs of all architectures of transformers share."""
    rope = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.use_rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_length,
        }
    if config.position_embedding_type == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": config.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "mscale": config.yarn_mscale,
            "mscale_all_dim": config.yarn_mscale_all_dim,
            "attention_factor": config.yarn_attention_factor,
            "truncate": config.yarn_correction_range_round_to_int,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "attn_implementation": "eager",
    }


def hugging_face_model(config: TransformerConfig) -> Any:
    architecture = architecture_of(config)
    assert architecture is not None
    settings = getattr(transformers, f"{architecture.title}Config")(
        **common_settings(config), intermediate_size=config.ffn_hidden_size, **hugging_face_experts(config)
    )
    return getattr(transformers, architecture.hugging_face_class)(settings)


def hugging_face_experts(config: TransformerConfig) -> dict[str, Any]:
    """The fields of transformers for experts."""
    if config.num_experts is None:
        return {}
    experts: dict[str, Any] = {"num_local_experts": config.num_experts, "num_experts_per_tok": config.moe_router_topk}
    if config.qk_layernorm:
        dense = [layer for layer, is_moe in enumerate(config.moe_layers()) if not is_moe]
        experts |= {
            "moe_intermediate_size": config.moe_ffn_hidden_size,
            "mlp_only_layers": dense,
            "norm_topk_prob": True,
        }
    return {**experts, "experts_implementation": "eager"}


def as_published(state: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """The tensors of a model of transformers 5, which stacks the experts of a layer, under the names of published
    files: a tensor for each projection of each expert."""
    published = {}
    for name, tensor in state.items():
        layer, _, last = name.partition(".mlp.")
        block, gate, up, down = EXPERT_NAMES.get(family, ("mlp", "", "", ""))
        if last == "experts.gate_up_proj":
            for expert, both in enumerate(tensor):  # [2f, h]
                rows = both.chunk(2)
                published[f"{layer}.{block}.experts.{expert}.{gate}.weight"] = rows[0]
                published[f"{layer}.{block}.experts.{expert}.{up}.weight"] = rows[1]
        elif last == "experts.down_proj":
            for expert, whole in enumerate(tensor):  # [h, f]
                published[f"{layer}.{block}.experts.{expert}.{down}.weight"] = whole
        elif last == "gate.weight":
            published[f"{layer}.{block}.gate.weight"] = tensor
        else:
            published[name] = tensor
    return published


def halves_to_pairs(weight: Tensor, config: TransformerConfig) -> Tensor:
    """Rows of what makes queries or keys from Hugging Face's order (halves apart) to neighbouring pairs."""
    heads = weight.view(-1, 2, config.kv_channels // 2, weight.shape[1:].numel())
    return heads.transpose(1, 2).reshape(weight.shape)


def to_global(state: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Hugging Face's tensors (weights or gradients) under our names and in our shapes."""
    tensors = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "final_layernorm.weight": state["model.norm.weight"],
    }
    if config.untie_embeddings_and_output_weights:
        tensors["output_layer.weight"] = state["lm_head.weight"]
    for number in range(config.num_layers):
        theirs, ours = f"model.layers.{number}", f"layers.{number}"
        query, key = (state[f"{theirs}.self_attn.{kind}_proj.weight"] for kind in "qk")
        tensors |= {
            f"{ours}.self_attention.linear_qkv.weight": torch.cat(
                (
                    halves_to_pairs(query, config),
                    halves_to_pairs(key, config),
                    state[f"{theirs}.self_attn.v_proj.weight"],
                )
            ),
            f"{ours}.self_attention.linear_proj.weight": state[f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.input_layernorm.weight": state[f"{theirs}.input_layernorm.weight"],
            f"{ours}.pre_mlp_layernorm.weight": state[f"{theirs}.post_attention_layernorm.weight"],
        }
        if config.moe_layers()[number]:
            tensors |= experts_to_global(state, config, theirs, ours)
        else:
            gate, up, down = (state[f"{theirs}.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
            tensors[f"{ours}.mlp.linear_fc1.weight"] = torch.cat((gate, up))
            tensors[f"{ours}.mlp.linear_fc2.weight"] = down
        if config.add_qkv_bias:
            query, key, value = (state[f"{theirs}.self_attn.{kind}_proj.bias"] for kind in "qkv")
            rotated = halves_to_pairs(query, config), halves_to_pairs(key, config)
            tensors[f"{ours}.self_attention.linear_qkv.bias"] = torch.cat((*rotated, value))
        for kind in "qk" if config.qk_layernorm else "":
            gain = halves_to_pairs(state[f"{theirs}.self_attn.{kind}_norm.weight"], config)
            tensors[f"{ours}.self_attention.{kind}_layernorm.weight"] = gain
    return tensors


def experts_to_global(state: dict[str, Tensor], config: TransformerConfig, theirs: str, ours: str) -> dict[str, Tensor]:
    """The router and the experts of the layer ``theirs`` under our names, from the names of published files."""
    architecture = architecture_of(config)
    assert architecture is not None and config.num_experts is not None
    block, *projections = EXPERT_NAMES[architecture.name]
    gates, ups, downs = (
        torch.stack([state[f"{theirs}.{block}.experts.{expert}.{name}.weight"] for expert in range(config.num_experts)])
        for name in projections
    )
    return {
        f"{ours}.mlp.router.weight": state[f"{theirs}.{block}.gate.weight"],
        f"{ours}.mlp.experts.linear_fc1.weight": torch.cat((gates, ups), dim=1).flatten(0, 1),  # [E 2f, h]
        f"{ours}.mlp.experts.linear_fc2.weight": downs.flatten(0, 1),  # [E h, f]
    }


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


def expected(config: TransformerConfig, dtype: torch.dtype = torch.float64) -> Results:
    """What transformers computes for :func:`batch`."""
    with fp32_means_fp64() if dtype == torch.float64 else nullcontext():
        model = random_model(config, dtype)
        tokens, labels = batch(config)
        logits = model(tokens).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses.sum().backward()
    weights, gradients = weights_and_gradients(model, config)
    return Results(weights, logits.detach(), losses.detach().view_as(labels), gradients)


def weights_and_gradients(model: Any, config: TransformerConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of a model of transformers after its backward pass, under our names and in our shapes."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    family = model.config.model_type
    return to_global(as_published(weights, family), config), to_global(as_published(gradients, family), config)


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
    kernel = kernel or choose_attention_kernel("auto", CPU, dtype)
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
