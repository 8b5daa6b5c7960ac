"""Texts that continue prompts, token by token."""

import itertools
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron.config.inference import GenerationConfig
from megatron.data.tokenizers import Tokenizer
from megatron.errors import DataError
from megatron.inference.cached_model import CachedModel

_MOST_LIKELY = 256
"""Tokens that are sorted first: they nearly always have the probability of --top-p, and a vocabulary is large."""


class Sampler:
    """Draws the next tokens of several texts. A text's tokens depend on its own seed and logits alone."""

    def __init__(self, config: GenerationConfig, numbers: Sequence[int]) -> None:
        self._config = config
        self._random = {number: torch.Generator().manual_seed(config.seed + number) for number in numbers}

    def draw(self, logits: Tensor, numbers: Sequence[int]) -> list[int]:
        """The next id of each of the texts ``numbers`` from its logits, ``[texts, vocabulary]``."""
        if self._config.temperature == 0:
            ids: list[int] = logits.argmax(dim=-1).tolist()
            return ids
        candidates, ids_of_candidates = self._candidates(logits.cpu().double())
        sums = candidates.cumsum(dim=-1)
        drawn = torch.stack([torch.rand(1, generator=self._random[number], dtype=torch.float64) for number in numbers])
        # The first candidate whose sum exceeds the drawn part of the total. A total may round up to the bound.
        places = torch.searchsorted(sums, drawn * sums[:, -1:], right=True).clamp_(max=sums.shape[1] - 1)
        chosen: list[int] = ids_of_candidates.gather(1, places).flatten().tolist()
        return chosen

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and ids of the tokens to draw from, ``[texts, candidates]``; 0 for tokens that are left out."""
        config, vocabulary = self._config, logits.shape[1]
        probabilities = torch.softmax(logits / config.temperature, dim=-1)
        if config.top_p == 1 and not config.top_k:
            return probabilities, torch.arange(vocabulary).expand_as(probabilities)
        count = min(config.top_k or _MOST_LIKELY, vocabulary)
        likely, ids = probabilities.topk(count)
        if not config.top_k and count < vocabulary and bool((likely.sum(dim=-1) < config.top_p).any()):
            likely, ids = probabilities.sort(dim=-1, descending=True)
        # Keep a token while the tokens before it have less than top_p; the first always stays.
        before = likely.cumsum(dim=-1) - likely
        return likely.where(before < config.top_p, 0.0), ids


_UNFINISHED = "\ufffd"
"""The text of an unfinished character."""


class TextStream:
    """Decodes generated ids step by step: the parts add up to the text of the prompt and all ids."""

    # The text of an id may depend on the id before it (a space at the beginning). So a part is the difference of two
    # short texts: of the ids of the last part, and of the same ids with the new ones.

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        """Number of ids that have been returned as text."""
        self.prompt = self.add(prompt)
        """The text of the prompt's ids."""

    def add(self, ids: Sequence[int], is_last: bool = False) -> str:
        """The text that ``ids`` add. The text of an unfinished character comes with a later id, or with the last."""
        self._ids += ids
        text = self._tokenizer.detokenize(self._ids)
        if text.endswith(_UNFINISHED) and not is_last:
            return ""
        part = text[len(self._tokenizer.detokenize(self._ids[: self._shown])) :]
        if part:
            # From here on the ids of this part stand for all ids before.
            del self._ids[: self._shown]
            self._shown = len(self._ids)
        return part

    def add_token(self, new: "NewToken") -> str:
        """The text that a drawn token adds."""
        return self.add(() if new.finish == "end_of_document" else (new.token,), is_last=new.finish is not None)


Finish = Literal["end_of_document", "max_new_tokens", "max_position_embeddings"]
"""Why a text ended."""


class NewToken(NamedTuple):
    """A token that was drawn for a prompt."""

    row: int  # the number of the prompt in its batch
    token: int
    finish: Finish | None
    """Why the text ends here; None if it goes on. A token that ends the document is no part of the text."""


@dataclass
class Speed:
    """Tokens and seconds of generation, without the time of who reads the tokens."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0  # until the first new token of each text is drawn
    new_tokens: int = 0  # all but the first of each text
    new_seconds: float = 0.0

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
    for number, prompt in enumerate(prompts, start=first_number):
        if len(prompt) >= max_length:
            raise DataError(
                f"Prompt {number} has {len(prompt)} tokens, and a text has at most {max_length}: shorten the prompt, "
                "or raise --max-position-embeddings."
            )
    speed, clock = speed or Speed(), time.perf_counter
    rows = list(range(len(prompts)))
    sampler = Sampler(config, [first_number + row for row in rows])
    started = clock()
    logits = model.start(prompts, max(len(prompt) + limit for prompt, limit in zip(prompts, limits)))
    for count in itertools.count(1):
        drawn = None if logits is None else sampler.draw(logits, [first_number + row for row in rows])
        ids = model.agree(drawn, len(rows))
        if count == 1:
            speed.prompt_tokens += sum(map(len, prompts))
            speed.prompt_seconds += clock() - started
        else:
            speed.new_tokens += len(rows)
            speed.new_seconds += clock() - started
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


@dataclass(frozen=True)
class Completion:
    """A text that continues a prompt."""

    prompt: str
    text: str  # the new text alone
    tokens: int  # new tokens, without the one that ends the document
    finish: Finish


def prompt_ids(tokenizer: Tokenizer, prompt: str, add_bos: bool = False) -> list[int]:
    """The ids of a prompt; with ``add_bos``, or if it is empty, the token that begins a text comes first."""
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
    streams = [TextStream(tokenizer, prompt) for prompt in ids]
    texts = [""] * len(prompts)
    counts = [0] * len(prompts)
    finishes: list[Finish] = ["max_new_tokens"] * len(prompts)
    for turn in generate_ids(model, ids, config, stop_ids, first_number, speed):
        for new in turn:
            texts[new.row] += streams[new.row].add_token(new)
            counts[new.row] += new.finish != "end_of_document"
            finishes[new.row] = new.finish or finishes[new.row]
    return [Completion(*parts) for parts in zip(prompts, texts, counts, finishes, strict=True)]


# --- files of prompts ---------------------------------------------------------------------------------------

KEY = "prompt"


@dataclass(frozen=True)
class Prompt:
    text: str
    fields: Mapping[str, Any]
    """Its JSON object, whose other fields are copied to the result."""

    def result(self, completion: Completion) -> str:
        """The line of the result."""
        new = {"text": completion.text, "tokens": completion.tokens, "finish": completion.finish}
        return json.dumps({KEY: self.text, **self.fields, **new}, ensure_ascii=False)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: one a line, or in a file named ``*.jsonl`` the field "prompt" of one object a line.

    Empty lines are skipped. Raises :class:`DataError`.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"--prompts {path} cannot be read ({error.strerror}): check the path.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {path} is not UTF-8 text ({error}): convert it.") from error
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise DataError(f"--prompts {path} holds no prompt: write one a line.")
    if path.suffix != ".jsonl":
        return [Prompt(line, {}) for _, line in numbered]
    prompts = []
    for number, line in numbered:
        where = f"Line {number} of {path}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error}): correct it, or name the file *.txt.") from error
        if not isinstance(fields, dict) or not isinstance(fields.get(KEY), str):
            raise DataError(f'{where} is not an object with a text under "{KEY}": add it.')
        prompts.append(Prompt(fields[KEY], fields))
    return prompts
