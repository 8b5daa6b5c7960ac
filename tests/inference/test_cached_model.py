"""Passes with a key-value cache compute the logits of a model without one, in fp64, in every layout."""

import math

import pytest
import torch
from torch import Tensor

from megatron.core.topology import Topology, single_process
from tests.inference.random_model import (
    MODELS,
    PROMPTS,
    ROWS_END_AT,
    STEPS,
    TOLERANCE,
    Layout,
    cached,
    texts_of,
    whole_logits,
)
from tests.rank_pool import RankPool


def largest_error(name: str, topology: Topology) -> float:
    """Of the logits at all steps of a batch, some of whose rows end before others."""
    texts = texts_of(MODELS[name])
    wanted = [whole_logits(MODELS[name], text) for text in texts]
    model = cached(name, topology)
    rows, errors = list(range(len(texts))), [0.0]

    def compare(logits: Tensor | None, step: int) -> None:
        has_logits = topology.pipeline_parallel.rank == topology.pipeline_parallel.size - 1
        assert (logits is not None) == has_logits
        for row, found in zip(rows, () if logits is None else logits):
            error = float((found - wanted[row][PROMPTS[row] - 1 + step]).abs().max())
            assert math.isfinite(error), "the maximum of errors may drop a NaN"
            errors.append(error)

    prompts = [text[:length] for text, length in zip(texts, PROMPTS)]
    compare(model.start(prompts, max(PROMPTS) + STEPS), 0)
    for step in range(STEPS):
        if step in ROWS_END_AT:
            model.keep_rows(ROWS_END_AT[step])
            rows = [rows[row] for row in ROWS_END_AT[step]]
        compare(model.append([texts[row][PROMPTS[row] + step] for row in rows]), step + 1)
    return max(errors)


def errors_on_rank(layout: Layout, names: list[str]) -> dict[str, float]:
    topology = layout.topology
    return {name: largest_error(name, topology) for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_without_a_cache(name: str) -> None:
    assert largest_error(name, single_process()) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(tp=2), list(MODELS)),
        (Layout(pp=2), list(MODELS)),
        (Layout(tp=2, pp=2), list(MODELS)),
        (Layout(tp=2, ep=2), [name for name, config in MODELS.items() if config.num_experts]),
        (Layout(tp=2, pp=2, ep=2), ["mixtral", "llama4_text"]),
    ],
    ids=str,
)
def test_ranks_compute_the_logits_of_one_process(four_ranks: RankPool, layout: Layout, names: list[str]) -> None:
    for errors in four_ranks.run(errors_on_rank, layout, names, world_size=layout.tp * layout.pp):
        assert errors.keys() == set(names)
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", ["llama", "llama4_text"])
def test_a_text_that_goes_on_computes_the_rest_alone(name: str) -> None:
    """Also a text that changed after its beginning, and one that outgrows the memory of the cache."""
    config, (_, _, text) = MODELS[name], texts_of(MODELS[name])
    model = cached(name)
    changed = [*text[:7], 60 - text[7], *text[8:12]]
    for ids, computed in ((text[:5], 5), (text[:10], 5), (text[:10], 1), (text, len(text) - 10), (changed, 5)):
        logits = model.start([ids], capacity=len(ids))
        assert logits is not None and len(model.cache.positions) == computed
        torch.testing.assert_close(logits[0], whole_logits(config, ids)[-1], rtol=0.0, atol=TOLERANCE)
