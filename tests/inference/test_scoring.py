"""Log probabilities of continuations are those of a model without a cache, in fp64, in every layout and batch."""

import pytest
import torch

from megatron.core.topology import Topology, single_process
from megatron.inference import cached_model
from megatron.inference.cached_model import Score, score_continuations
from tests.inference.random_model import MODELS, TOLERANCE, Layout, cached, texts_of, whole_logits
from tests.rank_pool import RankPool

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
