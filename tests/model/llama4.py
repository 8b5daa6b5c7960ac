"""Small models with the features of Llama 4, and the same models of transformers."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from tests.llama4_definition import token_logits, token_losses
from tests.model.reference import Results, common_settings, fp32_means_fp64

transformers: Any = pytest.importorskip("transformers")

LENGTH, CHUNK = 32, 8
"""Four chunks."""
PACKED = (
    [13, 11, 1, 7],  # starts inside a chunk, a document of one token
    [CHUNK, 2 * CHUNK, CHUNK],  # starts at chunks
    [LENGTH],
    [1, 30, 1],
)
"""The lengths of the documents of every row."""
STARTS = torch.tensor([[place == 0 for length in lengths for place in range(length)] for lengths in PACKED])
"""Where the documents begin, ``[b, s]``."""


def llama4_config(**changes: Any) -> TransformerConfig:
    """Scout's features in four layers, of which the last has no rotary position embedding."""
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 56,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 8,  # unlike hidden / heads
        "vocab_size": 61,
        "padded_vocab_size": 64,
        "max_position_embeddings": 64,
        # One pair of a head has its frequency kept by a scaling, one interpolated, two divided.
        "rotary_base": 100.0,
        "rope_scaling_original_length": 32,
        "init_method_std": 0.2,
        "qk_l2_norm": True,
        "no_rope_freq": "4",
        "attention_chunk_size": CHUNK,
        "attention_temperature_tuning": True,
        # Short, so that the temperature changes within the sequence.
        "attention_temperature_floor": 4,
        "num_experts": 4,
        "moe_layer_freq": "1",
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
    }
    return TransformerConfig(**{**fields, **changes})


SCALED = {"use_rope_scaling": True}
STEP = {
    **SCALED,
    "rope_scaling_factor": 16.0,
    "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 1.0,
}
INTERLEAVED = {"moe_layer_freq": "[0,1]*2", "qk_l2_norm": False}
CASES: dict[str, dict[str, Any]] = {
    "scout": STEP,
    "maverick": INTERLEAVED,
    "maverick with scaling": {**INTERLEAVED, **SCALED},
    "norm in interleaved layers": {"moe_layer_freq": "[0,1]*2"},
    "a list of layers": {"num_layers": 5, "no_rope_freq": "[0,1,0,0,1]", **SCALED},
    "interleaved list": {"num_layers": 5, "no_rope_freq": "[1,0,0,1,0]", "moe_layer_freq": "[0,1,0,1,0]"},
    "no temperature": {"attention_temperature_tuning": False, **STEP},
    "other temperature": {"attention_temperature_floor": 3, "attention_temperature_scale": 0.7},
    "no chunks": {"attention_chunk_size": None},
    "chunks that do not divide the sequence": {"attention_chunk_size": 5, **SCALED},
    "chunk longer than the sequence": {"attention_chunk_size": LENGTH + 1},
    "chunks of two tokens": {"attention_chunk_size": 2},
    "all layers with RoPE": {"no_rope_freq": "0"},
    "no layer with RoPE": {"no_rope_freq": "1"},
    "tied": {"untie_embeddings_and_output_weights": False, **SCALED},
}
"""What differs from :func:`llama4_config`."""


def config_of(case: str) -> TransformerConfig:
    """The model of one of :data:`CASES`."""
    return llama4_config(**CASES[case])


def hugging_face_llama4(config: TransformerConfig) -> Any:
    """``Llama4ForCausalLM`` of these sizes, with weights of its own."""
    settings = transformers.Llama4TextConfig(
        **common_settings(config),
        intermediate_size=config.moe_ffn_hidden_size,
        intermediate_size_mlp=config.ffn_hidden_size,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.moe_router_topk,
        moe_layers=[layer for layer, is_moe in enumerate(config.moe_layers()) if is_moe],
        use_qk_norm=config.qk_l2_norm,
        no_rope_layers=[int(has_rope) for has_rope in config.rope_layers()],
        # transformers builds the mask of chunks also where it has none.
        attention_chunk_size=config.attention_chunk_size or 2**20,
        attn_temperature_tuning=config.attention_temperature_tuning,
        floor_scale=config.attention_temperature_floor,
        attn_scale=config.attention_temperature_scale,
        use_cache=False,
    )
    return transformers.Llama4ForCausalLM(settings)


def random_weights(config: TransformerConfig) -> dict[str, Tensor]:
    """The weights of :func:`random_llama4` in fp64 under our names."""
    return to_global({name: weight.detach() for name, weight in random_llama4(config).named_parameters()}, config)


def random_llama4(config: TransformerConfig, dtype: torch.dtype = torch.float64) -> Any:
    """``Llama4ForCausalLM`` with random weights, the same for every dtype and every feature without weights."""
    generator = torch.Generator().manual_seed(7)
    model = hugging_face_llama4(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(drawn * (0.2 if parameter.dim() > 1 else 1.0))
    return model


def to_global(state: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Tensors of ``Llama4ForCausalLM`` (weights or gradients) under our names and in our shapes."""
    tensors = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "final_layernorm.weight": state["model.norm.weight"],
    }
    if config.untie_embeddings_and_output_weights:
        tensors["output_layer.weight"] = state["lm_head.weight"]
    for number, is_moe in enumerate(config.moe_layers()):
        theirs, ours = f"model.layers.{number}", f"layers.{number}"
        # Llama 4 rotates neighbouring pairs, as we do, so no rows change places.
        projections = [state[f"{theirs}.self_attn.{kind}_proj.weight"] for kind in "qkv"]
        tensors |= {
            f"{ours}.self_attention.linear_qkv.weight": torch.cat(projections),
            f"{ours}.self_attention.linear_proj.weight": state[f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.input_layernorm.weight": state[f"{theirs}.input_layernorm.weight"],
            f"{ours}.pre_mlp_layernorm.weight": state[f"{theirs}.post_attention_layernorm.weight"],
        }
        if is_moe:
            block = f"{theirs}.feed_forward"
            gate_up, down = (state[f"{block}.experts.{kind}_proj"] for kind in ("gate_up", "down"))
            tensors |= {
                f"{ours}.mlp.router.weight": state[f"{block}.router.weight"],
                f"{ours}.mlp.experts.linear_fc1.weight": gate_up.transpose(1, 2).flatten(0, 1),  # [E 2f, h]
                f"{ours}.mlp.experts.linear_fc2.weight": down.transpose(1, 2).flatten(0, 1),  # [E h, f]
                **_mlp(state, f"{block}.shared_expert", f"{ours}.mlp.shared_experts"),
            }
        else:
            tensors |= _mlp(state, f"{theirs}.feed_forward", f"{ours}.mlp")
    return tensors


def _mlp(state: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    gate, up, down = (state[f"{theirs}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
    return {f"{ours}.linear_fc1.weight": torch.cat((gate, up)), f"{ours}.linear_fc2.weight": down}


def llama4_batch(config: TransformerConfig, sequences: int = 2) -> tuple[Tensor, Tensor]:
    """Token ids and labels, ``[b, s]``."""
    generator = torch.Generator().manual_seed(11)
    text = torch.randint(0, config.vocab_size, (sequences, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def results_of_transformers(
    config: TransformerConfig, dtype: torch.dtype = torch.float64, *, patched: bool = True, **arguments: Any
) -> Results:
    """What transformers computes for :func:`llama4_batch`. In fp64 it rotates, norms, scores the router and scales
    queries in fp32 unless ``patched``."""
    with fp32_means_fp64() if patched and dtype == torch.float64 else nullcontext():
        model = random_llama4(config, dtype)
        tokens, labels = llama4_batch(config)
        logits = model(tokens, **arguments).logits
        losses = token_losses(logits, labels)
        losses.sum().backward()
    parameters = dict(model.named_parameters())
    weights = to_global({name: parameter.detach() for name, parameter in parameters.items()}, config)
    gradients = to_global({name: parameter.grad for name, parameter in parameters.items()}, config)
    return Results(weights, logits.detach(), losses.detach(), gradients)


def results_of_definition(
    config: TransformerConfig, weights: dict[str, Tensor], starts: Tensor, *modes: bool
) -> Results:
    """What the definition computes for as many sequences of the batch as ``starts`` has; ``modes`` says whether
    documents mask attention and reset positions."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    tokens, labels = llama4_batch(config, len(starts))
    logits = token_logits(leaves, config, tokens, starts, *modes)
    losses = token_losses(logits, labels)
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
    return Results(weights, logits.detach(), losses.detach(), dict(zip(leaves, gradients)))
