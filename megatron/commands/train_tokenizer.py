"""Train a tokenizer on the inputs that tools/preprocess_data.py takes.

SentencePiece: BPE with Llama 2's settings: no normalisation, digits one by one, runs of blanks as pieces, and bytes for
every character that the vocabulary lacks. Byte-level BPE (huggingface, tiktoken): cut as Llama 3 cuts text. In all,
text survives a round trip unchanged.
"""

import base64
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from megatron.commands.tool import run_tool, write_file
from megatron.data.text_inputs import (
    InputFormat,
    Separation,
    list_sources,
    parse_documents,
    place_of,
    read_batches,
    whole_ranges,
)
from megatron.data.tokenizer_formats import LLAMA3_SPLIT, byte_characters
from megatron.errors import ConfigError, DataError
from megatron.flags import Argument, require_at_least, values_of
from megatron.urls import refuse_urls

# Text is fed in pieces of whole lines up to this many bytes, so that newlines are part of what is learned.
_MAX_PIECE_BYTES = 4000
_BYTE_PIECES = 256


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Training text and vocabulary size."""

    input: tuple[str, ...]
    """Files, folders, globs or dataset:NAME, as --input of tools/preprocess_data.py."""
    model_prefix: str
    """The model is PREFIX.model (huggingface: PREFIX.json)."""
    vocab_size: int
    """Number of ids, including 256 bytes and the special ones: <unk>, <s>, </s> (sentencepiece), <|begin_of_text|>,
    <|end_of_text|> (huggingface); excluding the special ids that TikTokenizer adds after its file."""
    kind: Literal["sentencepiece", "huggingface", "tiktoken"] = "sentencepiece"
    """Kind of tokenizer: a SentencePiece model, byte-level BPE as a tokenizer.json, or byte-level BPE in the format of
    Llama 3's file, for TikTokenizer."""
    json_key: str = "text"
    """JSON key, or column, with the text."""
    text_documents: Separation = "file"
    """Document of a plain-text file: the file, a paragraph, or a line."""
    dataset_config: str | None = None
    """Configuration of a Hugging Face dataset with several."""
    dataset_split: str = "train"
    """Split of a Hugging Face dataset."""
    input_sentence_size: Annotated[int, Argument(aliases=("--max-sentences",))] = 0
    """sentencepiece: train on this many random parts of the text (of up to 4,000 bytes); 0: all."""
    num_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Training threads."""


def read_texts(config: TrainTokenizerConfig) -> Iterator[str]:
    """The texts of all documents; a :class:`DataError` names the file and line of a bad one."""
    form = InputFormat((config.json_key,), config.text_documents, config.dataset_config, config.dataset_split)
    for batch in read_batches(whole_ranges(list_sources(config.input)), form):
        for number, texts in parse_documents(batch, form.keys, "--json-key"):
            if isinstance(texts, str):
                raise DataError(f"{place_of(batch, number)} {texts}.")
            yield texts[0]


def cut_in_pieces(text: str) -> Iterator[str]:
    """``text`` in pieces of at most 4,000 bytes, cut behind newlines where possible."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        # A character has no more than four bytes.
        step = _MAX_PIECE_BYTES if line.isascii() else _MAX_PIECE_BYTES // 4
        for part in (line[start : start + step] for start in range(0, len(line), step)):
            length = len(part.encode())
            if piece and size + length > _MAX_PIECE_BYTES:
                yield "".join(piece)
                piece, size = [], 0
            piece.append(part)
            size += length
    if piece:
        yield "".join(piece)


def train(config: TrainTokenizerConfig) -> str:
    """Train and write the model; returns its path."""
    refuse_urls({"--model-prefix": config.model_prefix}, "name a local prefix, and copy the result")
    require_at_least(_BYTE_PIECES, values_of(config, "vocab_size"))
    require_at_least(1, values_of(config, "num_threads"))
    require_at_least(0, values_of(config, "input_sentence_size"))
    if config.kind != "sentencepiece" and config.input_sentence_size:
        raise ConfigError(f"--input-sentence-size is for --kind sentencepiece, not {config.kind}: remove it.")
    trainers = {"sentencepiece": train_sentencepiece, "huggingface": train_hugging_face, "tiktoken": train_tiktoken}
    path = f"{config.model_prefix}.{'json' if config.kind == 'huggingface' else 'model'}"
    write_file("--model-prefix", path, trainers[config.kind](config))
    return path


def train_sentencepiece(config: TrainTokenizerConfig) -> bytes:
    """A SentencePiece model."""
    from sentencepiece import SentencePieceTrainer

    pieces = (piece for text in read_texts(config) for piece in cut_in_pieces(text))
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
    except (RuntimeError, ValueError) as error:
        # The last sentence of SentencePiece's message, without its source position.
        reason = str(error).rsplit("] ", 1)[-1].strip().rstrip(".") or "it gives no reason"
        raise DataError(
            f"SentencePiece cannot train {config.vocab_size} pieces on this text ({reason}): choose "
            f"another --vocab-size, above {_BYTE_PIECES + 3} plus the characters in use, or give more text."
        ) from error
    return model.getvalue()


def train_hugging_face(config: TrainTokenizerConfig) -> bytes:
    specials = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = _train_byte_level(config, config.vocab_size - len(specials))
    tokenizer.add_special_tokens(specials)
    return str(tokenizer.to_str(pretty=True)).encode()


def train_tiktoken(config: TrainTokenizerConfig) -> bytes:
    """Lines of a token in base64 and its rank."""
    byte_of = {character: byte for byte, character in byte_characters().items()}
    vocabulary = sorted(_train_byte_level(config, config.vocab_size).get_vocab().items(), key=lambda entry: entry[1])
    tokens = (bytes(byte_of[character] for character in token) for token, _ in vocabulary)
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def _train_byte_level(config: TrainTokenizerConfig, vocab_size: int) -> Any:
    """A tokenizer whose ids are those of the bytes, then those of merges in their order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    os.environ["RAYON_NUM_THREADS"] = str(config.num_threads)
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [byte_characters()[byte] for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(read_texts(config), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(
            f"This text gives {tokenizer.get_vocab_size()} tokens where --vocab-size needs {vocab_size}: choose "
            f"another --vocab-size, above {_BYTE_PIECES}, or give more text."
        )
    return tokenizer


main = partial(
    run_tool, TrainTokenizerConfig, lambda config: print(f"{train(config)}: {config.vocab_size:,} ids"), __doc__
)
