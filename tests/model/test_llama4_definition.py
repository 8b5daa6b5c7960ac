"""The definition of Llama 4, with which our model is compared, is that of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.llama4_definition import token_logits
from tests.model.llama4 import (
    CASES,
    CHUNK,
    LENGTH,
    PACKED,
    STARTS,
    config_of,
    llama4_batch,
    random_llama4,
    random_weights,
    results_of_definition,
    results_of_transformers,
    to_global,
)
from tests.model.reference import Results, fp32_means_fp64, relative_error

TOLERANCE = 1e-12
every_case = pytest.mark.parametrize("case", CASES)


def largest_difference(found: Results, wanted: Results) -> float:
    expected = dict(wanted.tensors())
    tensors = dict(found.tensors())
    assert tensors.keys() == expected.keys()
    return max(relative_error(tensor, expected[name]) for name, tensor in tensors.items())


@every_case
def test_the_definition_is_that_of_transformers(case: str) -> None:
    config = config_of(case)
    wanted = results_of_transformers(config)
    assert largest_difference(results_of_definition(config, wanted.weights, STARTS[:2]), wanted) < TOLERANCE


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
    assert largest_difference(results_of_definition(config, wanted.weights, starts, True, False), wanted) < TOLERANCE


def test_a_document_that_is_masked_and_reset_is_alone_in_the_model() -> None:
    """So every document of a packed row is compared with transformers, its temperature and its chunks included."""
    config = config_of("scout")
    tokens, _ = llama4_batch(config, len(PACKED))
    with fp32_means_fp64(), torch.no_grad():
        theirs = random_llama4(config)
        alone = [
            torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths)])
            for ids, lengths in zip(tokens, PACKED)
        ]
        weights = to_global(dict(theirs.named_parameters()), config)
        found = token_logits(weights, config, tokens, STARTS, masks_documents=True, resets_positions=True)
    assert relative_error(found, torch.stack(alone)) < TOLERANCE


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
        logits = random_llama4(config)(tokens).logits
        without = random_llama4(replace(config, **FEATURES[feature]))(tokens).logits
    assert relative_error(without, logits) > 1e-3


@pytest.mark.parametrize(("masks_attention", "resets_positions"), [(True, False), (True, True), (False, True)])
def test_documents_change_the_model(masks_attention: bool, resets_positions: bool) -> None:
    config = config_of("scout")
    weights, (tokens, _) = random_weights(config), llama4_batch(config, len(STARTS))
    plain = token_logits(weights, config, tokens, STARTS)
    packed = token_logits(weights, config, tokens, STARTS, masks_attention, resets_positions)
    assert relative_error(packed, plain) > 1e-3
