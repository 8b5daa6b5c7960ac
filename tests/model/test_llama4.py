"""Llama 4 is that of transformers: logits, losses and every gradient. What transformers does not have, packed documents
whose positions restart, is compared with a definition, which is compared with transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.ops.attention import AttentionKernel
from megatron.core.ops.attention_kernels import ReferenceAttention, TorchAttention
from megatron.core.ops.documents import Documents
from tests.llama4_definition import token_logits
from tests.model.llama4 import (
    CASES,
    CHUNK,
    LENGTH,
    PACKED,
    STARTS,
    config_of,
    llama4_batch,
    random_weights,
    results_of_definition,
    results_of_transformers,
)
from tests.model.reference import (
    CPU,
    Results,
    fp32_means_fp64,
    largest_error,
    our_model,
    random_model,
    relative_error,
    to_global,
    topology_of,
)
from tests.rank_pool import RankPool

TOLERANCE, OF_DEFINITION = 1e-11, 1e-12
every_case = pytest.mark.parametrize("case", CASES)


# The definition


def largest_difference(found: Results, wanted: Results) -> float:
    expected = dict(wanted.tensors())
    tensors = dict(found.tensors())
    assert tensors.keys() == expected.keys()
    return max(relative_error(tensor, expected[name]) for name, tensor in tensors.items())


@every_case
def test_the_definition_is_that_of_transformers(case: str) -> None:
    config = config_of(case)
    wanted = results_of_transformers(config)
    assert largest_difference(results_of_definition(config, wanted.weights, STARTS[:2]), wanted) < OF_DEFINITION


def test_only_the_patched_model_of_transformers_is_in_fp64() -> None:
    config = config_of("scout")
    wanted, unpatched = results_of_transformers(config), results_of_transformers(config, patched=False)
    assert unpatched.logits.dtype == wanted.logits.dtype == torch.float64
    assert relative_error(unpatched.logits, wanted.logits) > 1e-9


def test_it_masks_documents_as_transformers_does_with_given_masks() -> None:
    config, starts = config_of("scout"), STARTS[:2]
    documents, chunks = starts.cumsum(dim=1), torch.arange(LENGTH) // CHUNK
    full = (documents[:, :, None] == documents[:, None]).tril()[:, None]  # [b, 1, s, s]
    visible = {"full_attention": full, "chunked_attention": full & (chunks[:, None] == chunks)}
    hidden = torch.finfo(torch.float64).min
    masks = {kind: torch.zeros(mask.shape).double().masked_fill(~mask, hidden) for kind, mask in visible.items()}
    wanted = results_of_transformers(config, attention_mask=masks)
    assert relative_error(wanted.logits, results_of_transformers(config).logits) > 1e-3
    found = results_of_definition(config, wanted.weights, starts, True, False)
    assert largest_difference(found, wanted) < OF_DEFINITION


def test_a_document_that_is_masked_and_reset_is_alone_in_the_model() -> None:
    """So every document of a packed row is compared with transformers, its temperature and its chunks included."""
    config = config_of("scout")
    tokens, _ = llama4_batch(config, len(PACKED))
    with fp32_means_fp64(), torch.no_grad():
        theirs = random_model(config)
        alone = [
            torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths)])
            for ids, lengths in zip(tokens, PACKED)
        ]
        weights = to_global(theirs, dict(theirs.named_parameters()), config)
        found = token_logits(weights, config, tokens, STARTS, masks_documents=True, resets_positions=True)
    assert relative_error(found, torch.stack(alone)) < OF_DEFINITION


FEATURES: dict[str, dict[str, Any]] = {
    "chunks": {"attention_chunk_size": None},
    "the chunk's size": {"attention_chunk_size": CHUNK - 1},
    "layers without RoPE": {"no_rope_freq": "0"},
    "the place of layers without RoPE": {"no_rope_freq": "[0,0,1,0]"},
    "QK norm": {"qk_l2_norm": False},
    "temperature": {"attention_temperature_tuning": False},
    "the temperature's floor": {"attention_temperature_floor": 5},
    "the temperature's scale": {"attention_temperature_scale": 0.2},
    "RoPE scaling": {"use_rope_scaling": False},
    "the scaling's factor": {"rope_scaling_factor": 8.0},
    "the scaling's high factor": {"rope_scaling_high_freq_factor": 4.0},
    "the scaling's low factor": {"rope_scaling_low_freq_factor": 0.5},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_changes_the_model(feature: str) -> None:
    """Otherwise its cases would prove less than they seem to."""
    config = config_of("scout")
    with torch.no_grad():
        tokens, _ = llama4_batch(config)
        logits = random_model(config)(tokens).logits
        without = random_model(replace(config, **FEATURES[feature]))(tokens).logits
    assert relative_error(without, logits) > 1e-3


@pytest.mark.parametrize(("masks_attention", "resets_positions"), [(True, False), (True, True), (False, True)])
def test_documents_change_the_model(masks_attention: bool, resets_positions: bool) -> None:
    config = config_of("scout")
    weights, (tokens, _) = random_weights(config), llama4_batch(config, len(STARTS))
    plain = token_logits(weights, config, tokens, STARTS)
    packed = token_logits(weights, config, tokens, STARTS, masks_attention, resets_positions)
    assert relative_error(packed, plain) > 1e-3


# The model

DOCUMENT_MODES = pytest.mark.parametrize(
    ("masks_attention", "resets_positions"),
    [(True, False), (True, True), (False, True), (False, False)],
    ids=["masked", "masked and reset", "reset", "neither"],
)


def compare_on_rank(
    config: TransformerConfig,
    wanted: Results,
    tp: int = 1,
    ep: int = 1,
    kernel: AttentionKernel | None = None,
    documents: Documents | None = None,
) -> float:
    """Build this rank's part of our model, and return the largest error of what it computes."""
    topology = topology_of(tp, ep)
    model = our_model(config, wanted.weights, topology, tp > 1, kernel)
    return largest_error(model, wanted, llama4_batch(config, len(wanted.logits)), topology, documents)


@every_case
def test_logits_losses_and_gradients_equal_transformers(case: str) -> None:
    config = config_of(case)
    assert compare_on_rank(config, results_of_transformers(config)) < TOLERANCE


@every_case
def test_in_fp32_they_equal_transformers_to_its_precision(case: str) -> None:
    config = config_of(case)
    assert compare_on_rank(config, results_of_transformers(config, torch.float32)) < 1e-5


@pytest.mark.parametrize("kernel", [ReferenceAttention(), TorchAttention()], ids=["reference", "torch"])
def test_they_equal_transformers_with_other_attention_kernels(kernel: AttentionKernel) -> None:
    config = config_of("scout")
    assert compare_on_rank(config, results_of_transformers(config), kernel=kernel) < TOLERANCE


@pytest.mark.parametrize("case", ["scout", "maverick with scaling", "a list of layers"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_they_equal_transformers_on_several_ranks(four_ranks: RankPool, case: str, tp: int, ep: int) -> None:
    config = config_of(case)
    wanted = results_of_transformers(config)
    assert max(four_ranks.run(compare_on_rank, config, wanted, tp, ep, world_size=tp)) < TOLERANCE


@DOCUMENT_MODES
@pytest.mark.parametrize("case", ["scout", "maverick with scaling", "a list of layers", "no chunks"])
def test_packed_documents_equal_the_definition(case: str, masks_attention: bool, resets_positions: bool) -> None:
    config = config_of(case)
    wanted = results_of_definition(config, random_weights(config), STARTS, masks_attention, resets_positions)
    documents = Documents(STARTS, masks_attention, resets_positions, CPU)
    assert compare_on_rank(config, wanted, documents=documents) < TOLERANCE
