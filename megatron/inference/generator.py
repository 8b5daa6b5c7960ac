"""Texts that continue prompts, token by token."""

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.config.inference import GenerationConfig
from megatron.data.tokenizers import Tokenizer
from megatron.errors import DataError
from megatron.inference.cached_model import CachedModel
from megatron.inference.generator import Sampler, TextStream

Finish = Literal["end_of_document", "max_new_tokens", "max_position_embeddings"]
"""Why a text ended."""


class NewToken(NamedTuple):
    """A token that was drawn for a prompt."""

    row: int
    """The number of the prompt in its batch."""
    token: int
    finish: Finish | None
    """Why the text ends here; None if it goes on. A token that ends the document is no part of the text."""


@dataclass
class Speed:
    """Tokens and seconds of generation, without the time of who reads the tokens."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    """Until the first new token of each text is drawn."""
    new_tokens: int = 0
    """All but the first of each text."""
    new_seconds: float = 0.0

    def add_prompts(self, tokens: int, seconds: float) -> None:
        self.prompt_tokens += tokens
        self.prompt_seconds += seconds

    def add_new(self, tokens: int, seconds: float) -> None:
        self.new_tokens += tokens
        self.new_seconds += seconds

    def __str__(self) -> str:
        parts = [("prompts", self.prompt_tokens, self.prompt_seconds), ("new", self.new_tokens, self.new_seconds)]
        rates = [f"{name} {count / seconds:,.1f}" for name, count, seconds in parts if count and seconds]
        return f"tokens/s: {', '.join(rates)}"


def generate_ids(
    model: CachedModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop_ids: Collection[int] = (),
    first_number: int = 0,
    speed: Speed | None = None,
) -> Iterator[list[NewToken]]:
    """Continue a batch of prompts: in every turn a new token of each text that has not ended, the same on all ranks.

    ``first_number`` is the number of the first prompt among all texts; it determines the seeds. Collective.
    """
    max_length = config.max_position_embeddings or model.max_length
    limits = [min(config.max_new_tokens, max_length - len(prompt)) for prompt in prompts]
    check_lengths(prompts, max_length, first_number)
    speed, clock = speed or Speed(), time.perf_counter
    rows = list(range(len(prompts)))
    sampler = Sampler(config, [first_number + row for row in rows])
    started = clock()
    logits = model.start(prompts, max(len(prompt) + limit for prompt, limit in zip(prompts, limits)))
    for count in itertools.count(1):
        drawn = None if logits is None else sampler.draw(logits, [first_number + row for row in rows])
        ids = model.agree(drawn, len(rows))
        if count == 1:
            speed.add_prompts(sum(map(len, prompts)), clock() - started)
        else:
            speed.add_new(len(rows), clock() - started)
        turn = [
            NewToken(row, token, "end_of_document" if token in stop_ids else _limit(count, limits[row], config))
            for row, token in zip(rows, ids)
        ]
        yield turn
        going_on = [place for place, new in enumerate(turn) if new.finish is None]
        if not going_on:
            return
        started = clock()
        if len(going_on) < len(rows):
            model.keep_rows(going_on)
            rows, ids = [rows[place] for place in going_on], [ids[place] for place in going_on]
        logits = model.append(ids)


def _limit(count: int, limit: int, config: GenerationConfig) -> Finish | None:
    """Why a text ends after ``count`` new tokens of at most ``limit``."""
    if count < limit:
        return None
    return "max_new_tokens" if limit == config.max_new_tokens else "max_position_embeddings"


def check_lengths(prompts: Sequence[Sequence[int]], max_length: int, first_number: int) -> None:
    """Raise :class:`DataError` for a prompt that leaves no position for a new token."""
    for number, prompt in enumerate(prompts, start=first_number):
        if len(prompt) >= max_length:
            raise DataError(
                f"Prompt {number} has {len(prompt)} tokens, and a text has at most {max_length}: shorten the prompt, "
                "or raise --max-position-embeddings."
            )


class ContinuedText:
    """The new text of a prompt, in parts."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._stream = TextStream(tokenizer)
        self.prompt = self._stream.add(prompt)
        """The text of the prompt's ids."""

    def add(self, new: NewToken) -> str:
        """The text that a token adds."""
        ids = () if new.finish == "end_of_document" else (new.token,)
        return self._stream.add(ids, is_last=new.finish is not None)


@dataclass(frozen=True)
class Completion:
    """A text that continues a prompt."""

    prompt: str
    text: str
    """The new text alone."""
    tokens: int
    """New tokens, without the one that ends the document."""
    finish: Finish


def prompt_ids(tokenizer: Tokenizer, prompt: str, add_bos: bool = False) -> list[int]:
    """The ids of a prompt, with ``add_bos`` after the beginning-of-text token. An empty prompt is the token that begins
    a text."""
    begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    ids = tokenizer.tokenize(prompt)
    return [begin, *ids] if add_bos or not ids else ids


def complete(
    model: CachedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    config: GenerationConfig,
    stop_ids: Collection[int] = (),
    add_bos: bool = False,
    first_number: int = 0,
    speed: Speed | None = None,
) -> list[Completion]:
    """Continue a batch of prompts; arguments as those of :func:`generate_ids`. Collective."""
    ids = [prompt_ids(tokenizer, prompt, add_bos) for prompt in prompts]
    streams = [ContinuedText(tokenizer, prompt) for prompt in ids]
    texts = [""] * len(prompts)
    counts = [0] * len(prompts)
    finishes: list[Finish] = ["max_new_tokens"] * len(prompts)
    for turn in generate_ids(model, ids, config, stop_ids, first_number, speed):
        for new in turn:
            texts[new.row] += streams[new.row].add(new)
            counts[new.row] += new.finish != "end_of_document"
            finishes[new.row] = new.finish or finishes[new.row]
    return [Completion(*parts) for parts in zip(prompts, texts, counts, finishes, strict=True)]
