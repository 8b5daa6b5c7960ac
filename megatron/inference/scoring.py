"""Log probabilities of continuations, in batches of similar lengths."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.inference.cached_model import CachedModel

Ids = Sequence[int]


class Score(NamedTuple):
    """Of a continuation after its context."""

    log_probability: float
    """In nats."""
    is_greedy: bool
    """Whether greedy sampling would have generated it."""


def score_continuations(
    model: CachedModel,
    pairs: Sequence[tuple[Ids, Ids]],
    batch_size: int,
    progress: Callable[[int], None] = lambda number: None,
) -> list[Score]:
    """The scores of ``(context, continuation)``; a context has at least one id. Collective.

    Of a pair with more ids than the model has positions, the beginning is left out. ``progress`` receives the number of
    pairs of each batch.
    """
    cut = [_cut(context, continuation, model.max_length) for context, continuation in pairs]
    scores = [Score(0.0, True)] * len(pairs)  # of an empty continuation
    places = [place for place, (_, count) in enumerate(cut) if count]
    progress(len(pairs) - len(places))
    # The longest first: similar lengths need little padding, and memory that does not suffice is found at the start.
    places.sort(key=lambda place: -len(cut[place][0]))
    for first in range(0, len(places), batch_size):
        batch = places[first : first + batch_size]
        texts, counts = zip(*(cut[place] for place in batch), strict=True)
        found, likely = model.score(texts, counts).cpu()
        for row, (place, count) in enumerate(zip(batch, counts)):
            scores[place] = Score(float(found[:count, row].sum()), bool(likely[:count, row].all()))
        progress(len(batch))
    return scores


def _cut(context: Ids, continuation: Ids, max_length: int) -> tuple[list[int], int]:
    """The last ids of a pair, as many as the model can read and one more, which is only predicted; how many of them
    belong to the continuation."""
    text = [*context, *continuation][-(max_length + 1) :]
    return text, min(len(continuation), len(text) - 1)
