"""A model that keeps keys and values: logits after prompts and further tokens, or log probabilities of texts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from megatron.core.models.parallelize import activation_format, build_executor
from megatron.core.models.transformer import OutputLayer, TransformerModel
from megatron.core.topology import Topology
from megatron.schedules.catalog import build_schedule

_LOGITS_AT_ONCE = 2**24


class _Output(nn.Module):
    """The output layer for the hidden states that a pass needs, because the logits of a whole text are large."""

    def __init__(self, output_layer: OutputLayer) -> None:
        super().__init__()
        self.output_layer = output_layer
        self.read: Callable[[OutputLayer, Tensor], Tensor] | None = None
        """Computes the result of the pass from hidden states ``[s, b, h]``."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        assert self.read is not None
        return self.read(self.output_layer, hidden)


class CachedModel:
    """A model that was built with a cache, on its ranks; every rank gives the same tokens.

    Logits are ``[rows, vocabulary]`` in fp32 or wider, on all ranks of the last pipeline stage; None on other stages.
    They have the first ``num_ids`` ids of the model's vocabulary, all by default: a model may have more ids than its
    tokenizer.
    """

    def __init__(self, model: TransformerModel, topology: Topology, num_ids: int | None = None) -> None:
        assert model.context.cache is not None, "the model is built without a cache"
        self.model, self.cache = model, model.context.cache
        self._num_ids = min(num_ids or model.config.vocab_size, model.config.vocab_size)
        self._pipeline = topology.pipeline_parallel
        self._rows: list[list[int]] = []
        """The ids whose keys and values are in the cache."""
        self._executor = None
        if self._pipeline.size > 1:
            schedule = partial(build_schedule, "1f1b", self._pipeline.size)
            self._executor = build_executor(model, topology, schedule, seq_length=1, micro_batch_size=1)
        (self._chunk,) = model.transformer_chunks
        self._output: _Output | None = None
        if self._chunk.output_layer is not None:
            self._output = _Output(self._chunk.output_layer)
            self._chunk.output_layer = cast(OutputLayer, self._output)

    @property
    def max_length(self) -> int:
        return self.model.config.max_position_embeddings

    def forget(self) -> None:
        """Drop all texts: the next prompt is computed as a whole."""
        self._rows = []

    def start(self, prompts: Sequence[Sequence[int]], capacity: int) -> Tensor | None:
        """The logits after each of ``prompts``, none of which is empty; texts will have at most ``capacity`` tokens.

        A single prompt that begins as the last text did computes the rest of it alone.
        """
        kept = _common_prefix(self._rows[0], prompts[0]) if len(prompts) == len(self._rows) == 1 else 0
        if kept:
            self.cache.reserve(capacity)
            self._rows = [list(prompts[0][:kept])]
        else:
            self.cache.clear(capacity)
            self._rows = [[] for _ in prompts]
        return self._next_logits([prompt[kept:] for prompt in prompts])

    def append(self, ids: Sequence[int]) -> Tensor | None:
        """The logits after one more token of each row."""
        return self._next_logits([[token] for token in ids])

    def score(self, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Score the last ``counts[row]`` ids of each text, at least 1 and not the whole text.

        Returns ``[2, positions, rows]`` in fp64 on all ranks: the log probability of each id after the ids before it,
        and 1.0 where no other id is more likely. Rows with fewer ids have values without meaning behind theirs.
        """
        width, rows = max(counts), len(texts)
        places = torch.zeros(width, rows, dtype=torch.long)
        wanted = torch.zeros(width, rows, dtype=torch.long)
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            assert 0 < count < len(text)
            # The hidden state at a place predicts the id after it.
            places[:count, row] = torch.arange(len(text) - count - 1, len(text) - 1)
            wanted[:count, row] = torch.tensor(text[-count:])
        self.cache.clear(max(map(len, texts)) - 1)
        self._rows = [[] for _ in texts]
        device = self.model.context.device
        found = self._compute(
            [text[:-1] for text in texts], partial(self._read_scores, places.to(device), wanted.to(device))
        )
        if self._pipeline.size > 1:
            found = torch.zeros(2, width, rows, dtype=torch.float64, device=device) if found is None else found
            found = self._pipeline.broadcast(found, source=self._pipeline.size - 1)
        assert found is not None
        return found

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with ``rows`` alone."""
        self.cache.keep_rows(rows)
        self._rows = [self._rows[row] for row in rows]

    def agree(self, ids: Sequence[int] | None, count: int) -> list[int]:
        """The ``count`` ids that the last stage has, on all stages."""
        if self._pipeline.size == 1:
            assert ids is not None
            return list(ids)
        values = torch.tensor(ids or [0] * count, device=self.model.context.device)
        agreed: list[int] = self._pipeline.broadcast(values, source=self._pipeline.size - 1).tolist()
        return agreed

    def _next_logits(self, new: Sequence[Sequence[int]]) -> Tensor | None:
        """Add ids to every row; the logits after the last of each, ``[b, v]``."""
        last = torch.tensor([len(ids) - 1 for ids in new], device=self.model.context.device)
        return self._compute(new, partial(self._read_last, last))

    @torch.no_grad()
    def _compute(self, new: Sequence[Sequence[int]], read: Callable[[OutputLayer, Tensor], Tensor]) -> Tensor | None:
        """Add ids to every row; what ``read`` returns on the last stage."""
        length, rows = max(map(len, new)), len(new)
        self.cache.begin([len(ids) for ids in self._rows], length)
        for row, ids in zip(self._rows, new, strict=True):
            row += ids
        device = self.model.context.device
        tokens = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in new], device=device)  # [b, s]
        if self._output is not None:
            self._output.read = read
        if self._executor is None:
            found: Tensor = self._chunk(tokens)
            return found
        return self._executor.logits(tokens, activation_format(self.model, length, rows))

    def _read_last(self, last: Tensor, output_layer: OutputLayer, hidden: Tensor) -> Tensor:
        """The logits at the places ``last`` ``[b]``: ``[b, v]``."""
        if len(hidden) > 1:
            hidden = hidden[last, torch.arange(len(last), device=hidden.device)].unsqueeze(0)
        return self._whole(output_layer(hidden)[0])[:, : self._num_ids]

    def _read_scores(self, places: Tensor, wanted: Tensor, output_layer: OutputLayer, hidden: Tensor) -> Tensor:
        """:meth:`score` of the ids ``wanted`` after ``places``, both ``[k, b]``: ``[2, k, b]``."""
        rows = torch.arange(hidden.shape[1], device=hidden.device)
        at_once = max(1, _LOGITS_AT_ONCE // (len(rows) * self.model.config.vocab_size))
        found = []
        for some, ids in zip(places.split(at_once), wanted.split(at_once)):
            logits = self._whole(output_layer(hidden[some, rows]).flatten(0, 1))  # [k b, v]
            of_ids = logits.gather(1, ids.flatten().unsqueeze(1)).squeeze(1).view(ids.shape)
            total, largest = logits.logsumexp(1).view(ids.shape), logits.amax(1).view(ids.shape)
            found.append(torch.stack([of_ids - total, (of_ids >= largest).to(of_ids)]))
        return torch.cat(found, dim=1).double()

    def _whole(self, logits: Tensor) -> Tensor:
        """This rank's part of the logits ``[b, v/tp]`` to all logits ``[b, v]``, without padding."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ranks = self.model.context.parallel.communicator
        if ranks.size > 1:
            logits = ranks.all_gather(logits.t().contiguous()).t()
        return logits[:, : self.model.config.vocab_size]


def _common_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """The number of cached ids of ``prompt``; its last id is computed in any case, for the logits after it."""
    for place, (one, other) in enumerate(zip(cached, prompt[:-1])):
        if one != other:
            return place
    return min(len(cached), len(prompt) - 1)


# --- log probabilities --------------------------------------------------------------------------------------

Ids = Sequence[int]


class Score(NamedTuple):
    """The score of a continuation after its context."""

    log_probability: float  # in nats
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
    # As many ids as the model can read and one more, which is only predicted; and how many are of the continuation.
    texts_of_pairs = [[*context, *continuation][-(model.max_length + 1) :] for context, continuation in pairs]
    cut = [(text, min(len(pair[1]), len(text) - 1)) for text, pair in zip(texts_of_pairs, pairs)]
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
