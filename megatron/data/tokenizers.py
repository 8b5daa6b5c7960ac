"""Tokenizers: text to token ids and back.

Special tokens are never parsed from text: they are ordinary text in a document. Tokenizer files are read as data;
nothing in them is unpickled or executed, and nothing is downloaded.
"""

import base64
import binascii
import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.data import TokenizerConfig
from megatron.data.verified_encoder import (
    AWKWARD_TEXTS,
    Encode,
    VerifiedEncoder,
    fast_sentencepiece,
    fast_tiktoken,
    fast_tokenizer_json,
    is_panic,
)
from megatron.errors import ConfigError, DataError

# Llama 3 splits text before it merges bytes: contractions, words, up to three digits, punctuation, whitespace.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names by position after the ordinary tokens; every other position is reserved.
_LLAMA3_SPECIAL_TOKENS = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
# tiktoken's regular expressions overflow their stack on about 300,000 consecutive blanks.
_MAX_BLANK_RUN = 100_000
_LONG_BLANK_RUN = re.compile(rf"(?<!\s)\s{{{_MAX_BLANK_RUN + 1},}}+")

_TOKENS_PER_COMPARED = 64  # every 64th token is encoded by both libraries before the faster one is used

_END_OF_DOCUMENT_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>")
_BEGIN_OF_DOCUMENT_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>")

# The class of every text tokenizer in the keys of Megatron-LM's sample-order caches.
_MEGATRON_TOKENIZER_CLASS = "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"


class TokenizedTexts(NamedTuple):
    """The ids of several texts as arrays."""

    tokens: npt.NDArray[np.int32]
    """All texts, concatenated."""
    lengths: npt.NDArray[np.int32]
    """Tokens of each text, [texts]."""


class Tokenizer(ABC):
    """Maps text to ids in 0..vocab_size-1 and back."""

    vocab_size: int
    """Number of ids, including special ones."""
    eod: int
    """End-of-document id."""
    bos: int | None
    """Beginning-of-text id, if any. Never added by :meth:`tokenize`."""

    @property
    def encoded_by(self) -> str:
        """The library behind :meth:`tokenize_to_arrays`."""
        return type(self).__name__

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without special ids."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def tokenize_to_arrays(self, texts: Sequence[str]) -> TokenizedTexts:
        """The ids of :meth:`tokenize_batch`, as fast as possible on one core."""
        ids = self.tokenize_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum(dtype=np.int64)))
        return TokenizedTexts(tokens, lengths)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids. Raises :class:`DataError` for an id outside of the vocabulary."""
        ids = [int(token) for token in ids]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(f"Token id {token} has no text: valid ids are 0..{self.vocab_size - 1}.")
        return self._decode(ids)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


class _LibraryTokenizer(Tokenizer):
    """A tokenizer of a library. Arrays of ids come from a faster library, if available, which is verified against
    it."""

    _library: str
    _path: str

    @abstractmethod
    def _fast_encode(self, content: bytes) -> Encode | None:
        """The faster encoder for this file; None if there is none."""

    @cached_property
    def _encoder(self) -> VerifiedEncoder | None:
        """Created on first use, which never happens in training."""
        fast = self._fast_encode(_read_file(self._path))
        if fast is None:
            return None
        encoder = VerifiedEncoder(fast, self._encode, self._library)
        tokens = (self.detokenize([token]) for token in range(0, self.vocab_size, _TOKENS_PER_COMPARED))
        return encoder if encoder.agree_on(chain(AWKWARD_TEXTS, tokens)) else None

    @property
    def encoded_by(self) -> str:
        return self._library if self._encoder is None else "splintr"

    def _encode(self, text: str) -> bytes:
        return array("i", self.tokenize(text)).tobytes()

    def tokenize_to_arrays(self, texts: Sequence[str]) -> TokenizedTexts:
        if self._encoder is None:
            return super().tokenize_to_arrays(texts)
        ids = self._encoder.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids)) // 4
        return TokenizedTexts(np.frombuffer(b"".join(ids), np.int32), lengths.astype(np.int32))


class SentencePieceTokenizer(_LibraryTokenizer):
    """A SentencePiece model, such as Llama 2's ``tokenizer.model``; end of document is its ``</s>``.

    SentencePiece writes a space as U+2581, so that one character of a text comes back as a space.
    """

    _library = "sentencepiece"

    def __init__(self, path: str) -> None:
        from sentencepiece import SentencePieceProcessor

        content = _read_file(path)
        self._processor = SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(content)
        except (RuntimeError, TypeError) as error:
            raise DataError(_not_a(path, "a SentencePiece model")) from error
        if not loaded or not self._processor.get_piece_size():
            raise DataError(_not_a(path, "a SentencePiece model"))
        self.vocab_size = int(self._processor.get_piece_size())
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise DataError(f"{path} has no end-of-sentence token, which ends documents: use another model.")
        bos = int(self._processor.bos_id())
        self.bos = bos if bos >= 0 else None
        self._path = path

    def _fast_encode(self, content: bytes) -> Encode | None:
        return fast_sentencepiece(content, self._encode)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text


Llama2Tokenizer = SentencePieceTokenizer


class TikTokenizer(_LibraryTokenizer):
    """Llama 3's ``tokenizer.model``: one token in base64 and its rank per line; special tokens follow."""

    _library = "tiktoken"

    def __init__(self, path: str, num_special_tokens: int = 256) -> None:
        import tiktoken

        ranks = _parse_ranks(path)
        specials = _llama3_special_tokens(len(ranks), num_special_tokens)
        self._encoding = tiktoken.Encoding(
            os.path.basename(path), pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=specials
        )
        self.vocab_size = len(ranks) + num_special_tokens
        self.bos = specials["<|begin_of_text|>"]
        self.eod = specials["<|end_of_text|>"]
        self._has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
        self._path = path

    def _fast_encode(self, content: bytes) -> Encode | None:
        encode = fast_tiktoken(content, LLAMA3_SPLIT) if self._has_all_bytes else None
        return encode and (lambda text: b"".join(map(encode, _cut_blank_runs(text))))

    def tokenize(self, text: str) -> list[int]:
        return [token for part in _cut_blank_runs(text) for token in self._encoding.encode_ordinary(part)]

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A ``tokenizer.json``, or a directory with one.

    The end-of-document token is the ``eos_token`` of tokenizer_config.json or special_tokens_map.json in the same
    directory, otherwise one of the usual names.
    """

    _library = "tokenizers"

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        path = _tokenizer_json(path)
        content = _read_file(path)
        try:
            self._tokenizer = FastTokenizer.from_buffer(content)
        except BaseException as error:  # the library raises bare Exception, or panics
            if isinstance(error, Exception) or is_panic(error):
                raise DataError(_not_a(path, "a tokenizer.json")) from error
            raise
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "as text"
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        named = _named_special_tokens(os.path.dirname(path))
        eod = _first_known(vocabulary, named.get("eos_token"), _END_OF_DOCUMENT_NAMES)
        if eod is None:
            raise DataError(
                f"{path} has no end-of-document token: add eos_token to tokenizer_config.json in the same directory."
            )
        self.eod = eod
        self.bos = _first_known(vocabulary, named.get("bos_token"), _BEGIN_OF_DOCUMENT_NAMES)
        self._path = path

    def _fast_encode(self, content: bytes) -> Encode | None:
        return fast_tokenizer_json(content, LLAMA3_SPLIT)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(e.ids) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class NullTokenizer(Tokenizer):
    """Text is ids 0..size-1 separated by spaces; the additional id ``size`` is end-of-document."""

    def __init__(self, size: int) -> None:
        self.vocab_size = size + 1
        self.eod = size
        self.bos = None

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            excerpt = repr(text if len(text) <= 40 else text[:40] + "...")
            raise DataError(
                f"NullTokenizer reads ids separated by spaces, but the text is {excerpt}: use another --tokenizer-type."
            ) from error
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"Token id {token} in the text is outside 0..{self.vocab_size - 1}: raise --vocab-size, "
                    "or correct the text."
                )
        return ids

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the flags; raises :class:`ConfigError` or :class:`DataError`."""
    config.check()
    if config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size is not None  # check() has seen to it
        if config.vocab_size < 1:
            raise ConfigError(f"--vocab-size {config.vocab_size} must be positive.")
        return NullTokenizer(config.vocab_size)
    path = config.tokenizer_model or ""
    tokenizer: Tokenizer
    match config.tokenizer_type:
        case "SentencePieceTokenizer" | "Llama2Tokenizer":
            tokenizer = SentencePieceTokenizer(path)
        case "TikTokenizer":
            tokenizer = TikTokenizer(path, config.tiktoken_num_special_tokens)
        case "HuggingFaceTokenizer":
            tokenizer = HuggingFaceTokenizer(path)
        case None:
            raise ConfigError("A tokenizer is required: set --tokenizer-type, and --tokenizer-model to its file.")
    if config.vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"--vocab-size {config.vocab_size} differs from the {tokenizer.vocab_size} ids of "
            f"{config.tokenizer_model}: remove the flag."
        )
    return tokenizer


def tokenizer_file(config: TokenizerConfig) -> str | None:
    """The file that determines the ids; None without a tokenizer, or for one without a file."""
    path = config.tokenizer_model
    if config.tokenizer_type in (None, "NullTokenizer") or path is None:
        return None
    return _tokenizer_json(path) if config.tokenizer_type == "HuggingFaceTokenizer" else path


def _tokenizer_json(path: str) -> str:
    return os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path


def describe_tokenizer(config: TokenizerConfig) -> dict[str, str | None]:
    """The tokenizer in the keys of cached sample orders, equal to Megatron-LM with the same flags."""
    description: dict[str, str | None] = {
        "class": _MEGATRON_TOKENIZER_CLASS,
        "tokenizer_path": config.tokenizer_model,
    }
    match config.tokenizer_type:
        case "NullTokenizer":
            description |= {"tokenizer_path": None, "vocab_size": str((config.vocab_size or 0) + 1)}
        case "SentencePieceTokenizer" | "Llama2Tokenizer":
            description |= {"legacy": "False", "special_tokens": "None"}
        case "TikTokenizer":
            specials = str(config.tiktoken_num_special_tokens)
            description |= {"num_special_tokens": specials, "special_tokens": "None"}
        case "HuggingFaceTokenizer":
            description |= {
                "vocab_file": "None",
                "merges_file": "None",
                "additional_special_tokens": "[]",
                "use_fast": "True",
                "trust_remote_code": "False",
                "include_special_tokens": "True",
            }
    return description


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: set --tokenizer-model to the tokenizer file.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): use another tokenizer file.") from error


def _not_a(path: str, kind: str) -> str:
    return f"{path} is not {kind}: check that --tokenizer-model and --tokenizer-type belong together."


def _parse_ranks(path: str) -> dict[bytes, int]:
    """Token bytes and ranks; ranks must be 0..n-1."""
    ranks: dict[bytes, int] = {}
    try:
        for line in _read_file(path).splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise DataError(_not_a(path, "a file of base64 tokens and ranks")) from error
    if not ranks or set(ranks.values()) != set(range(len(ranks))):
        raise DataError(_not_a(path, "a complete file of base64 tokens and ranks"))
    return ranks


def _llama3_special_tokens(first_id: int, count: int) -> dict[str, int]:
    """Names and ids of ``count`` special tokens from ``first_id``."""
    if count <= max(_LLAMA3_SPECIAL_TOKENS):
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is too small for Llama 3: use 256, or at least "
            f"{max(_LLAMA3_SPECIAL_TOKENS) + 1}."
        )
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(count))
    return {_LLAMA3_SPECIAL_TOKENS.get(place) or next(reserved): first_id + place for place in range(count)}


def _cut_blank_runs(text: str) -> Iterator[str]:
    """``text`` in parts, cut only inside very long runs of whitespace."""
    if len(text) <= _MAX_BLANK_RUN:
        yield text
        return
    start = 0
    for run in _LONG_BLANK_RUN.finditer(text):
        for cut in range(run.start() + _MAX_BLANK_RUN, run.end(), _MAX_BLANK_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _named_special_tokens(directory: str) -> dict[str, str]:
    """Special tokens by role (``eos_token`` ...), from the files next to a tokenizer.json."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            continue
        try:
            content: Any = json.loads(_read_file(path))
        except ValueError as error:
            raise DataError(f"{path} is not JSON: correct it, or remove it.") from error
        for role, token in content.items() if isinstance(content, dict) else ():
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                named[role] = token
    return named


def _first_known(vocabulary: dict[str, int], named: str | None, usual: Sequence[str]) -> int | None:
    """The id of the named token, otherwise of the first usual one that exists."""
    for token in usual if named is None else (named, *usual):
        if token in vocabulary:
            return vocabulary[token]
    return None
