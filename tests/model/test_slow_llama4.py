"""The references of Llama 4: transformers, and a slow model that also has packed documents whose positions restart."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.model.llama4 import (
    CASES,
    CHUNK,
    LENGTH,
    PACKED,
    Results,
    config_of,
    llama4_batch,
    random_llama4,
    results_of_transformers,
    rows_of,
    slow_results,
    to_global,
)
from tests.model.slow_llama4 import SlowLlama4
from tests.model.test_transformers_parity import fp32_means_fp64, relative_error

every_case = pytest.mark.parametrize("case", CASES)


def largest_difference(found: Results, wanted: Results) -> float:
    expected = dict(wanted.tensors())
    tensors = dict(found.tensors())
    assert tensors.keys() == expected.keys()
    return max(relative_error(tensor, expected[name]) for name, tensor in tensors.items())


@every_case
def test_the_slow_model_is_that_of_transformers(case: str) -> None:
    config = config_of(case)
    wanted = results_of_transformers(config)
    assert largest_difference(slow_results(config, wanted.weights, rows_of(sequences=2)), wanted) < 1e-12


def test_only_the_patched_model_of_transformers_is_in_fp64() -> None:
    config = config_of("scout")
    wanted, unpatched = results_of_transformers(config), results_of_transformers(config, patched=False)
    assert unpatched.logits.dtype == wanted.logits.dtype == torch.float64
    assert relative_error(unpatched.logits, wanted.logits) > 1e-9


def test_the_slow_model_masks_documents_as_transformers_does_with_given_masks() -> None:
    config, rows = config_of("scout"), rows_of(masks_attention=True, sequences=2)
    same_document = torch.tensor([[[a == b for b in row.documents] for a in row.documents] for row in rows])
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    chunks = torch.arange(LENGTH) // CHUNK
    full = (same_document & causal)[:, None]  # [b, 1, s, s]
    allowed = {"full_attention": full, "chunked_attention": full & (chunks[:, None] == chunks)}
    hidden = torch.finfo(torch.float64).min
    masks = {kind: torch.zeros(mask.shape).double().masked_fill(~mask, hidden) for kind, mask in allowed.items()}
    wanted = results_of_transformers(config, attention_mask=masks)
    assert relative_error(wanted.logits, results_of_transformers(config).logits) > 1e-3
    assert largest_difference(slow_results(config, wanted.weights, rows), wanted) < 1e-12


def test_a_document_that_is_masked_and_reset_is_alone_in_the_slow_model() -> None:
    """So every document of a packed row is compared with transformers, its temperature and its chunks included."""
    config = config_of("scout")
    with fp32_means_fp64(), torch.no_grad():
        theirs = random_llama4(config)
        tokens, _ = llama4_batch(config, len(PACKED))
        alone = [
            torch.cat([theirs(part[None]).logits[0] for part in ids.split(lengths)])
            for ids, lengths in zip(tokens, PACKED)
        ]
        weights = to_global(dict(theirs.named_parameters()), config)
        found = SlowLlama4(config, weights).logits(tokens, rows_of(True, True))
    assert relative_error(found, torch.stack(alone)) < 1e-12


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
def test_documents_change_the_slow_model(masks_attention: bool, resets_positions: bool) -> None:
    config = config_of("scout")
    weights = to_global(dict(random_llama4(config).named_parameters()), config)
    tokens, _ = llama4_batch(config, 1)
    with torch.no_grad():
        model = SlowLlama4(config, weights)
        plain = model.logits(tokens, rows_of(sequences=1))
        packed = model.logits(tokens, rows_of(masks_attention, resets_positions, sequences=1))
    assert relative_error(packed, plain) > 1e-3
