"""Passes with a key-value cache compute the logits of a model without one, in fp64, in every layout."""

import math

import pytest
import torch
from torch import Tensor

from megatron.core.topology import Topology, single_process
from megatron.inference import cached_model
from megatron.inference.cached_model import Score, score_continuations
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


# --- log probabilities --------------------------------------------------------------------------------------


NAMES = ("llama", "mixtral", "llama4_text")


def pairs_of(name: str) -> list[tuple[list[int], list[int]]]:
    """Contexts of several lengths; the second continuation is what greedy sampling generates, the last one is empty."""
    first, second, third = texts_of(MODELS[name])
    likely = int(whole_logits(MODELS[name], second)[-1].argmax())
    return [(first[:4], first[4:9]), (second, [likely]), (third[:1], third[1:20]), (first[:2], [])]


def expected(name: str) -> list[Score]:
    scores = []
    for context, continuation in pairs_of(name):
        logits = whole_logits(MODELS[name], [*context, *continuation])[len(context) - 1 : -1]
        wanted = torch.tensor(continuation, dtype=torch.long)
        places = torch.arange(len(continuation))
        total = float(logits.log_softmax(-1)[places, wanted].sum())
        scores.append(Score(total, bool((logits.argmax(-1) == wanted).all())))
    return scores


def scores_on(name: str, topology: Topology, batch_size: int = 3) -> list[Score]:
    return score_continuations(cached(name, topology), pairs_of(name), batch_size)


def assert_equal(found: list[Score], wanted: list[Score]) -> None:
    assert [one.is_greedy for one in found] == [one.is_greedy for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, abs=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_those_of_whole_logits(name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(name)
    assert [one.is_greedy for one in wanted] == [False, True, False, True]
    assert_equal(scores_on(name, single_process(), batch_size), wanted)
    monkeypatch.setattr(cached_model, "_LOGITS_AT_ONCE", 200)  # a position or two at a time
    assert_equal(scores_on(name, single_process(), batch_size), wanted)


def scores_on_rank(layout: Layout, name: str) -> list[Score]:
    return scores_on(name, layout.topology)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(tp=2), "llama"),
        (Layout(pp=2), "llama4_text"),
        (Layout(tp=2, pp=2), "llama"),
        (Layout(tp=2, ep=2), "mixtral"),
    ],
    ids=str,
)
def test_ranks_give_the_scores_of_one_process(four_ranks: RankPool, layout: Layout, name: str) -> None:
    for scores in four_ranks.run(scores_on_rank, layout, name, world_size=layout.tp * layout.pp):
        assert_equal(scores, expected(name))


def test_texts_longer_than_the_model_lose_their_beginning() -> None:
    model = cached("llama")
    ids = [number * 7 % 60 for number in range(model.max_length + 9)]
    (whole, cut) = score_continuations(model, [(ids[:-5], ids[-5:]), (ids[8:-5], ids[-5:])], batch_size=2)
    assert whole.log_probability == pytest.approx(cut.log_probability, abs=TOLERANCE)
    # Of a continuation that is longer than the model, the ids that have no context left are not counted.
    (long, rest) = score_continuations(model, [(ids[:1], ids[1:]), (ids[8:9], ids[9:])], batch_size=1)
    assert long.log_probability == pytest.approx(rest.log_probability, abs=TOLERANCE)


def test_generation_draws_no_id_that_the_tokenizer_lacks() -> None:
    whole, logits = cached("llama").start([[1, 2, 3]], 4), cached("llama", num_ids=40).start([[1, 2, 3]], 4)
    assert whole is not None and logits is not None and logits.shape == (1, 40)
    torch.testing.assert_close(logits, whole[:, :40])
