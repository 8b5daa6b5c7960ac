"""Texts that are tokenized and packed while training: the loader of ``--train-text-path``.

Documents are a function of (seed, place in the texts) alone. A data-parallel rank reads every ``size``-th part of them,
and its state says which it has read:

    files, in another order every epoch      b   a   c
    batches of a file                        0 1 2 3 │ 0 │ 0 1      files of lines are divided by batches, other
    documents of a batch, shuffled           2 0 1 …                 sources, which every rank has to read, by documents
    samples of s + 1 tokens                  ├──────┤├──────┤         the last token of one begins the next
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config.data import DataConfig
from megatron.data.data_module import DataContext
from megatron.data.storage import SourceFile
from megatron.data.text_inputs import (
    InputFormat,
    can_be_cut,
    list_sources,
    numbered_batches,
    parse_documents,
    place_of,
)
from megatron.data.tokenizers import Tokenizer
from megatron.errors import ConfigError, DataError, LoaderError

Tokens = npt.NDArray[np.int32]
Position = tuple[int, int, int, int]
"""Epoch, place of the file in its order, batch, and place of the document in the shuffled batch."""

_LEAST_BATCH, _LARGEST_BATCH = 1 << 12, 1 << 22  # bytes
_BATCHES = 1 << 12  # of all files, if batches are not too small or large
STREAM_BYTES = 1 << 30  # taken for the size of a dataset, which is not known


def build_text_stream(context: DataContext) -> "TextStream | None":
    """The texts of the flags; None for a split without them."""
    data = context.config.data
    paths = data.train_text_path if context.split == "train" else data.valid_text_path
    if not paths:
        return None
    assert context.tokenizer is not None
    fim = FillInTheMiddle.of(data, context.tokenizer) if data.fim_data else None
    flag = "--train-text-path" if context.split == "train" else "--valid-text-path"
    return TextStream(
        list_sources(paths, flag),
        data.text_key,
        context.tokenizer,
        context.config.seq_length,
        context.config.training.seed,
        context.rank,
        context.size,
        fim,
    )


@contextmanager
def _flags_of_training() -> Iterator[None]:
    """Errors of reading texts with the flags of training; a restart may help against those of a storage."""
    try:
        yield
    except DataError as error:
        text = str(error).replace("--input, --dataset-config and --dataset-split", "--train-text-path")
        text = text.replace("--input", "--train-text-path").replace("--json-keys", "--text-key")
        number = getattr(error.__cause__, "errno", None)
        kind = type(error) if number is None or isinstance(error.__cause__, FileNotFoundError) else LoaderError
        raise kind(text) from error


@dataclass(frozen=True)
class FillInTheMiddle:
    """Fill in the middle of documents (Bavarian et al., arXiv 2207.14255, section 3): ids of the three sentinel tokens,
    and the rates of divided documents and, of these, of those in the order suffix, prefix, middle (SPM)."""

    prefix: int
    middle: int
    suffix: int
    rate: float
    spm_rate: float

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Tokenizer) -> "FillInTheMiddle":
        ids: list[int] = []
        for part in ("prefix", "middle", "suffix"):
            name = getattr(data, f"fim_{part}_token")
            token = tokenizer.special_id(name)
            if token is None:
                raise ConfigError(
                    f"--fim-{part}-token {name} is not a token of --tokenizer-type: name one that it has."
                )
            ids.append(token)
        prefix, middle, suffix = ids
        return cls(prefix, middle, suffix, data.fim_rate, data.fim_spm_rate)

    def parts(self, text: str, random: np.random.Generator) -> list[int | str]:
        """The sentinel tokens and the parts of ``text`` between them; the text alone if it is not divided."""
        chances = random.random(2)
        if chances[0] >= self.rate:
            return [text]
        # Two places between characters, so that each part may be empty.
        low, high = sorted(random.integers(len(text) + 1, size=2).tolist())
        prefix, middle, suffix = text[:low], text[low:high], text[high:]
        if chances[1] < self.spm_rate:
            return [self.prefix, self.suffix, suffix, self.middle, prefix + middle]
        return [self.prefix, prefix, self.suffix, suffix, self.middle, middle]


@dataclass
class TextStream:
    """Samples of the ``sources`` for data-parallel ``rank`` of ``size``."""

    sources: Sequence[SourceFile]
    key: str
    tokenizer: Tokenizer
    seq_length: int
    seed: int
    rank: int
    size: int
    fim: FillInTheMiddle | None = None
    # The state: the next document, the state of its dataset, the tokens that are read and not used, and the positions
    # of all ranks of earlier runs with other numbers of ranks, some of which were further than this one.
    _next: Position = (0, 0, 0, 0)
    _dataset: Any = None
    _tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    _earlier: list[list[Position]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = sum(source.size or STREAM_BYTES for source in self.sources) // _BATCHES
        self._form = InputFormat((self.key,), batch_bytes=min(max(size, _LEAST_BATCH), _LARGEST_BATCH))
        self._documents = self._read()

    def __next__(self) -> Tokens:
        parts, count = [self._tokens], len(self._tokens)
        while count <= self.seq_length:
            parts.append(next(self._documents))
            count += len(parts[-1])
        tokens = np.concatenate(parts)
        self._tokens = tokens[self.seq_length :]  # from the last token of this sample on
        return tokens[: self.seq_length + 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "dataset": self._dataset, "tokens": self._tokens, "earlier": self._earlier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._dataset, self._tokens = tuple(state["next"]), state["dataset"], state["tokens"]
        self._earlier = [[tuple(position) for position in division] for division in state["earlier"]]
        self._documents = self._read()

    def redivide(self, states: list[dict[str, Any]]) -> None:
        """Continue where the rank that has read least is, without the documents that others have read."""
        first = min(states, key=lambda state: state["next"])
        reached = [state["next"] for state in states]
        mine = [state["tokens"] for state in states[self.rank :: self.size]] or [self._tokens]
        earlier = [one for one in (*first["earlier"], reached) if max(one) > first["next"]]
        unused = np.concatenate([mine[0], *(tokens[1:] for tokens in mine[1:])])  # the first of each was predicted
        self.load_state_dict({**first, "tokens": unused, "earlier": earlier})

    def _read(self) -> Iterator[Tokens]:
        """The tokens of this rank's documents from the next one on, without end."""
        (epoch, *start), state = self._next, self._dataset
        while True:
            order = np.random.default_rng([1, self.seed, epoch]).permutation(len(self.sources)).tolist()
            first, *rest = start
            is_empty = start == [0, 0, 0]
            for place in range(first, len(order)):
                for position, dataset, tokens in self._read_source(order[place], (epoch, place, *rest), state):
                    is_empty, self._next, self._dataset = False, position, dataset
                    yield tokens
                rest, state = [0, 0], None
            if is_empty and not self._earlier:  # or other ranks may have read them
                raise DataError(
                    f"--train-text-path has no document for data-parallel rank {self.rank} of {self.size}: give it "
                    "more texts, or use fewer data-parallel ranks."
                )
            epoch, start = epoch + 1, [0, 0, 0]
            self._earlier = [reached for reached in self._earlier if max(reached) > (epoch, *start)]

    def _read_source(self, source: int, start: tuple[int, ...], state: Any) -> Iterator[tuple[Position, Any, Tokens]]:
        """This rank's documents in a source: the position after each, its dataset's state before the batch, its tokens.

        They begin at the position ``start``, a dataset in the ``state``.
        """
        epoch, place, first_batch, first = start
        by_document = not can_be_cut(self.sources[source].path, self._form.separation)

        def owner(batch: int, document: int, size: int) -> int:
            return (place + batch + by_document * document) % size

        def is_read(position: Position) -> bool:
            return any(position < reached[owner(*position[2:], len(reached))] for reached in self._earlier)

        def is_wanted(batch: int) -> bool:
            return owner(batch, 0, self.size) == self.rank

        with _flags_of_training():
            for number, dataset, batch in numbered_batches(
                self.sources[source], self._form, first_batch, state, is_wanted
            ):
                documents = list(parse_documents(batch, (self.key,), "--text-key"))
                order = np.random.default_rng([2, self.seed, epoch, source, number]).permutation(len(documents))
                # After a division, the first batch may be another rank's.
                for document in range(first if number == first_batch else 0, len(documents)):
                    position = epoch, place, number, document
                    if owner(number, document, self.size) == self.rank and not is_read(position):
                        line, texts = documents[order[document]]
                        if isinstance(texts, str):
                            raise DataError(f"{place_of(batch, line)} {texts}.")
                        random = np.random.default_rng([3, self.seed, epoch, source, number, line])
                        yield (epoch, place, number, document + 1), dataset, self._tokenize(texts[0], random)

    def _tokenize(self, text: str, random: np.random.Generator) -> Tokens:
        """The tokens of a document, with the end-of-document token."""
        parts = [text] if self.fim is None else self.fim.parts(text, random)
        tokens = [
            self.tokenizer.tokenize_to_arrays([part]).tokens if isinstance(part, str) else [part] for part in parts
        ]
        return np.concatenate([*tokens, [self.tokenizer.eod]]).astype(np.int32)
