"""Small models with the features of Llama 4, and the same models of transformers."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from tests.llama4_definition import token_logits, token_losses
from tests.model.reference import Results, architecture, expected, random_model, to_global

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
        "padded_vocab_size": 64,
        # One pair of a head has its frequency kept by a scaling, one interpolated, two divided.
        "rotary_base": 100.0,
        "rope_scaling_original_length": 32,
        "no_rope_freq": "4",
        "moe_layer_freq": "1",
    }
    return replace(architecture(scaling=False, tied=False, tp=1, family="llama4_text"), **{**fields, **changes})


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


def random_weights(config: TransformerConfig) -> dict[str, Tensor]:
    """The weights of :func:`random_model` in fp64 under our names."""
    model = random_model(config)
    return to_global(model, {name: weight.detach() for name, weight in model.named_parameters()}, config)


def llama4_batch(config: TransformerConfig, sequences: int = 2) -> tuple[Tensor, Tensor]:
    """Token ids and labels, ``[b, s]``."""
    generator = torch.Generator().manual_seed(11)
    text = torch.randint(0, config.vocab_size, (sequences, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def results_of_transformers(config: TransformerConfig, dtype: torch.dtype = torch.float64, **arguments: Any) -> Results:
    """What transformers computes for :func:`llama4_batch`."""
    return expected(config, dtype, llama4_batch(config), **arguments)


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
