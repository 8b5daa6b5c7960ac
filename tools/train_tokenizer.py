#!/usr/bin/env python3
"""Train a SentencePiece BPE tokenizer with Llama 2's settings on the text of jsonl files.

Text survives a round trip unchanged: no normalisation, digits one by one, runs of blanks as pieces, and bytes
for every character that the vocabulary lacks.
"""

import gzip
import io
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from megatron.config.errors import DataError, UserError

# Text is fed in pieces of whole lines up to this many bytes, so that newlines are part of what is learned.
_MAX_PIECE_BYTES = 4000
_BYTE_PIECES = 256


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """What to learn from, and how large a vocabulary."""

    input: tuple[str, ...]
    """jsonl files, gzipped if named .gz."""
    model_prefix: str
    """The model is written to PREFIX.model."""
    vocab_size: int
    """Number of ids, including 256 bytes and <unk>, <s>, </s>."""
    json_key: str = "text"
    """Key of the JSON objects that holds the text."""
    input_sentence_size: Annotated[int, tyro.conf.arg(aliases=["--max-sentences"])] = 0
    """Learn from so many pieces of text (of up to 4,000 bytes), drawn at random; 0: from all."""
    num_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads to train with."""


def read_texts(paths: tuple[str, ...], key: str) -> Iterator[str]:
    """The texts of all lines of all files; a :class:`DataError` names the file and line of a bad one."""
    for path in paths:
        try:
            with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _parse_line(line, key, f"{path}, line {number}")
        except (OSError, EOFError) as error:
            raise DataError(f"{path} cannot be read ({error}): check --input.") from error


def _parse_line(line: bytes, key: str, where: str) -> str:
    try:
        document: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON ({error}): mend or remove it.") from error
    if not isinstance(document, dict) or not isinstance(document.get(key), str):
        raise DataError(f"{where} has no text under the key {key!r}: name the right one with --json-key.")
    # Half a surrogate pair is no text; there is nothing to learn from it.
    return str(document[key]).encode(errors="replace").decode()


def cut_in_pieces(text: str) -> Iterator[str]:
    """``text`` in pieces of at most 4,000 bytes, cut behind newlines where possible."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        for part in _cut_line(line):
            length = len(part.encode())
            if piece and size + length > _MAX_PIECE_BYTES:
                yield "".join(piece)
                piece, size = [], 0
            piece.append(part)
            size += length
    if piece:
        yield "".join(piece)


def _cut_line(line: str) -> Iterator[str]:
    """A line in parts of at most 4,000 bytes: a character has no more than four."""
    step = _MAX_PIECE_BYTES if line.isascii() else _MAX_PIECE_BYTES // 4
    return (line[start : start + step] for start in range(0, len(line), step))


def train(config: TrainTokenizerConfig) -> str:
    """Train and write the model; returns its path."""
    from sentencepiece import SentencePieceTrainer

    pieces = (piece for text in read_texts(config.input, config.json_key) for piece in cut_in_pieces(text))
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=pieces,
            model_writer=model,
            model_type="bpe",
            vocab_size=config.vocab_size,
            input_sentence_size=config.input_sentence_size,
            shuffle_input_sentence=config.input_sentence_size > 0,
            num_threads=config.num_threads,
            max_sentence_length=_MAX_PIECE_BYTES + 192,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            character_coverage=0.99995,
            unk_surface=" \u2047 ",
            minloglevel=1,
        )
    except RuntimeError as error:
        raise DataError(
            f"SentencePiece cannot train {config.vocab_size} pieces on this text ({_reason(error)}): choose "
            f"another --vocab-size, above {_BYTE_PIECES + 3} plus the characters in use, or give more text."
        ) from error
    path = f"{config.model_prefix}.model"
    _write_atomically(path, model.getvalue())
    return path


def _reason(error: RuntimeError) -> str:
    """The last sentence of SentencePiece's message, without its source position."""
    return str(error).rsplit("] ", 1)[-1].strip().rstrip(".") or "it gives no reason"


def _write_atomically(path: str, content: bytes) -> None:
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.incomplete"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}): choose another --model-prefix.") from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def main() -> int:
    """Run the tool; returns the exit status."""
    config = tyro.cli(TrainTokenizerConfig, description=__doc__)
    try:
        path = train(config)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {config.vocab_size:,} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
