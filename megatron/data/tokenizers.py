"""Tokenizers: text to token ids and back.

Special tokens are never parsed from text: they are ordinary text in a document. Tokenizer files are read as data;
nothing in them is unpickled or executed, and nothing is downloaded.
"""

import functools
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from megatron.config.data import TokenizerConfig
from megatron.data.tokenizer_formats import (
    END_OF_TEXT,
    LLAMA3_SPLIT,
    ByteLengths,
    gpt2_description,
    lengths_of_bytes,
    lengths_of_pieces,
    llama3_special_tokens,
    not_a,
    parse_ranks,
    read_file,
    sentencepiece_description,
    tiktoken_description,
)
from megatron.data.verified_encoder import (
    AWKWARD_TEXTS,
    Encode,
    TokenizedTexts,
    VerifiedEncoder,
    cut_blank_runs,
    encode_in_parts,
    fast_sentencepiece,
    fast_tiktoken,
    fast_tokenizer_json,
    has_new_characters,
    is_panic,
)
from megatron.errors import ConfigError, DataError

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_TOKENS_PER_COMPARED = 64  # every 64th token is encoded by both libraries before the faster one is used

_END_OF_DOCUMENT_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>")
_BEGIN_OF_DOCUMENT_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>")

# The class of every text tokenizer in the keys of Megatron-LM's sample-order caches.
_MEGATRON_TOKENIZER_CLASS = "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"


class Tokenizer(ABC):
    """Maps text to ids in 0..vocab_size-1 and back."""

    vocab_size: int  # number of ids, including special ones
    eod: int  # end of document
    bos: int | None  # beginning of text, if any; never added by ``tokenize``

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

    def special_id(self, name: str) -> int | None:
        """The id of the token ``name``; None if there is none."""
        return int(name) if name.isdecimal() and int(name) < self.vocab_size else None

    def byte_lengths(self) -> ByteLengths | None:
        """Bytes of the tokens' text, 0 for special tokens; None if a token has no bytes of its own."""
        return None

    def tokenizer_json(self) -> bytes | None:
        """The content of a ``tokenizer.json`` that gives the same ids; None if there is none."""
        return None


class _LibraryTokenizer(Tokenizer):
    """A tokenizer of a library. Arrays of ids come from a faster library, if available, verified against it."""

    _library: str
    _path: str

    @abstractmethod
    def _fast_encode(self, content: bytes) -> Encode | None:
        """The faster encoder for this file; None if there is none."""

    @cached_property
    def _encoder(self) -> VerifiedEncoder | None:
        """Created on first use, which never happens in training."""
        fast = self._fast_encode(read_file(self._path))
        if fast is None:
            return None
        encoder = VerifiedEncoder(fast, super().tokenize_to_arrays, self._library)
        # Before its first use: awkward texts, and a part of the vocabulary.
        tokens = [self.detokenize([token]) for token in range(0, self.vocab_size, _TOKENS_PER_COMPARED)]
        return encoder if encoder.agree_on([*AWKWARD_TEXTS, *tokens]) else None

    @property
    def encoded_by(self) -> str:
        return self._library if self._encoder is None else "gigatoken"

    def tokenize_to_arrays(self, texts: Sequence[str]) -> TokenizedTexts:
        return super().tokenize_to_arrays(texts) if self._encoder is None else self._encoder.encode_batch(texts)


class SentencePieceTokenizer(_LibraryTokenizer):
    """A SentencePiece model, such as Llama 2's ``tokenizer.model``; end of document is its ``</s>``.

    SentencePiece writes a space as U+2581, so that one character of a text comes back as a space.
    """

    _library = "sentencepiece"

    def __init__(self, path: str) -> None:
        from sentencepiece import SentencePieceProcessor

        content = read_file(path)
        self._processor = SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(content)
        except (RuntimeError, TypeError, UnicodeDecodeError) as error:  # the last in the text of an error
            raise DataError(not_a(path, "a SentencePiece model")) from error
        if not loaded or not self._processor.get_piece_size():
            raise DataError(not_a(path, "a SentencePiece model"))
        self.vocab_size = int(self._processor.get_piece_size())
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise DataError(f"{path} has no end-of-sentence token, which ends documents: use another model.")
        bos = int(self._processor.bos_id())
        self.bos = bos if bos >= 0 else None
        self._path = path

    def _fast_encode(self, content: bytes) -> Encode | None:
        return fast_sentencepiece(content)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text

    def special_id(self, name: str) -> int | None:
        token = int(self._processor.piece_to_id(name))
        return None if self._processor.is_unknown(token) else token

    def byte_lengths(self) -> ByteLengths | None:
        model = self._processor
        pieces = {
            token: model.decode([token]) if model.is_unknown(token) else model.id_to_piece(token)
            for token in range(self.vocab_size)
            if not model.is_control(token)
        }
        single_bytes = {token for token in pieces if model.is_byte(token)}
        return lengths_of_pieces(pieces, single_bytes, self.vocab_size, self._decode)

    def special_pieces(self) -> dict[str, str | None]:
        """The names of special tokens by role, None where the model has none."""
        model = self._processor
        roles = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        return {role: model.id_to_piece(token) if token >= 0 else None for role, token in roles.items()}

    def tokenizer_json(self) -> bytes | None:
        from tokenizers import Tokenizer as FastTokenizer

        description = sentencepiece_description(read_file(self._path))
        if description is None:
            return None
        content = json.dumps(description).encode()
        same = FastTokenizer.from_buffer(content)
        same.encode_special_tokens = True  # "as text"
        texts = [*AWKWARD_TEXTS, *(self._decode([token]) for token in range(self.vocab_size))]
        found = [same.encode(text, add_special_tokens=False).ids for text in texts]
        return content if found == self.tokenize_batch(texts) else None


class TikTokenizer(_LibraryTokenizer):
    """Llama 3's ``tokenizer.model``: one token in base64 and its rank per line; special tokens follow."""

    _library = "tiktoken"

    def __init__(self, path: str, num_special_tokens: int = 256) -> None:
        import tiktoken

        ranks = parse_ranks(path, read_file(path))
        specials = llama3_special_tokens(len(ranks), num_special_tokens)
        self._specials = specials
        self._encoding = tiktoken.Encoding(
            os.path.basename(path), pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=specials
        )
        self.vocab_size = len(ranks) + num_special_tokens
        self.bos = specials["<|begin_of_text|>"]
        self.eod = specials["<|end_of_text|>"]
        self._path = path

    def _fast_encode(self, content: bytes) -> Encode | None:
        encode = fast_tiktoken(parse_ranks(self._path, content), LLAMA3_SPLIT)
        if encode is None:
            return None

        def encode_as_tiktoken(texts: Sequence[str]) -> TokenizedTexts:
            new = [place for place, text in enumerate(texts) if has_new_characters(text)]
            if not new:
                return encode_in_parts(encode, texts)
            # Texts with characters that the libraries split differently are left to tiktoken.
            left_out = ["" if place in new else text for place, text in enumerate(texts)]
            tokens, lengths = encode_in_parts(encode, left_out)
            ids = np.split(tokens, np.cumsum(lengths)[:-1])
            for place in new:
                ids[place] = np.array(self.tokenize(texts[place]), np.int32)
            return TokenizedTexts(np.concatenate(ids), np.array([*map(len, ids)], np.int32))

        return encode_as_tiktoken

    def tokenize(self, text: str) -> list[int]:
        return [token for part in cut_blank_runs(text) for token in self._encoding.encode_ordinary(part)]

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

    def special_id(self, name: str) -> int | None:
        return self._specials.get(name)

    def byte_lengths(self) -> ByteLengths | None:
        ordinary = range(len(self._encoding.token_byte_values()))
        lengths = {token: len(self._encoding.decode_single_token_bytes(token)) for token in ordinary}
        return lengths_of_bytes(lengths, self.vocab_size)

    def tokenizer_json(self) -> bytes:
        ranks = parse_ranks(self._path, read_file(self._path))
        specials = llama3_special_tokens(len(ranks), self.vocab_size - len(ranks))
        return json.dumps(tiktoken_description(ranks, LLAMA3_SPLIT, specials)).encode()


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A ``tokenizer.json``, or a directory with one.

    The end-of-document token is the ``eos_token`` of tokenizer_config.json or special_tokens_map.json in the same
    directory, otherwise one of the usual names.
    """

    _library = "tokenizers"
    description: bytes  # the content of tokenizer.json

    def __init__(self, path: str) -> None:
        path = _tokenizer_json(path)
        vocabulary = self._load(read_file(path), path)
        named = _named_special_tokens(os.path.dirname(path))
        eod = _first_known(vocabulary, named.get("eos_token"), _END_OF_DOCUMENT_NAMES)
        if eod is None:
            raise DataError(
                f"{path} has no end-of-document token: add eos_token to tokenizer_config.json in the same directory."
            )
        self.eod = eod
        self.bos = _first_known(vocabulary, named.get("bos_token"), _BEGIN_OF_DOCUMENT_NAMES)

    def _load(self, description: bytes, path: str) -> dict[str, int]:
        """Read the content of a tokenizer.json; returns the ids of all tokens."""
        from tokenizers import Tokenizer as FastTokenizer

        self.description, self._path = description, path
        try:
            self._tokenizer = FastTokenizer.from_buffer(description)
        except BaseException as error:  # the library raises bare Exception, or panics
            if isinstance(error, Exception) or is_panic(error):
                raise DataError(not_a(path, "a tokenizer.json")) from error
            raise
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "as text"
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        return vocabulary

    def _fast_encode(self, content: bytes) -> Encode | None:
        return fast_tokenizer_json(self.description)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(e.ids) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def special_id(self, name: str) -> int | None:
        token: int | None = self._tokenizer.token_to_id(name)
        return token

    def byte_lengths(self) -> ByteLengths | None:
        decoder = json.loads(self.description).get("decoder") or {}
        kinds = [part.get("type") for part in decoder.get("decoders", [decoder])]
        pieces = {token: piece for piece, token in self._tokenizer.get_vocab(with_added_tokens=False).items()}
        added = self._tokenizer.get_added_tokens_decoder().items()
        texts = {token: "" if one.special else one.content for token, one in added}
        if "ByteLevel" in kinds:  # a character of a piece stands for a byte
            lengths = {token: len(piece) for token, piece in pieces.items()}
            lengths |= {token: len(text.encode()) for token, text in texts.items()}
            return lengths_of_bytes(lengths, self.vocab_size)
        if not {"ByteFallback", "Metaspace"} & set(kinds):
            return None
        single_bytes = {token for token, piece in pieces.items() if _BYTE_PIECE.fullmatch(piece)}
        return lengths_of_pieces(pieces | texts, single_bytes, self.vocab_size, self._decode)

    def tokenizer_json(self) -> bytes:
        return self.description


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """GPT-2's byte-level BPE in two files, vocab.json and merges.txt; ``<|endoftext|>`` begins and ends documents."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        contents = read_file(vocab_file, "--vocab-file"), read_file(merge_file, "--merge-file")
        vocabulary = self._load(gpt2_description(*contents, vocab_file, merge_file), vocab_file)
        self.bos = self.eod = vocabulary[END_OF_TEXT]


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
        return NullTokenizer(config.vocab_size)
    path = config.tokenizer_model or ""
    tokenizer: Tokenizer
    match config.canonical_type:
        case "SentencePieceTokenizer":
            tokenizer = SentencePieceTokenizer(path)
        case "TikTokenizer":
            tokenizer = TikTokenizer(path, config.tiktoken_num_special_tokens)
        case "HuggingFaceTokenizer":
            tokenizer = HuggingFaceTokenizer(path)
        case "GPT2BPETokenizer":
            tokenizer = GPT2BPETokenizer(config.vocab_file or "", config.merge_file or "")
        case None:
            raise ConfigError("A tokenizer is required: set --tokenizer-type, and --tokenizer-model to its file.")
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {config.vocab_size} is below the {tokenizer.vocab_size} ids of "
            f"{tokenizer_files(config)[0]}: use the model's tokenizer, or raise or remove the flag."
        )
    return tokenizer


def tokenizer_files(config: TokenizerConfig) -> tuple[str, ...]:
    """The files that determine the ids; none without a tokenizer, or for one without a file."""
    if config.tokenizer_type == "GPT2BPETokenizer":
        return tuple(path for path in (config.vocab_file, config.merge_file) if path is not None)
    path = config.tokenizer_model
    if config.tokenizer_type in (None, "NullTokenizer") or path is None:
        return ()
    return (_tokenizer_json(path) if config.tokenizer_type == "HuggingFaceTokenizer" else path,)


def _tokenizer_json(path: str) -> str:
    return os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path


def describe_tokenizer(config: TokenizerConfig) -> dict[str, str | None]:
    """The tokenizer in the keys of cached sample orders, equal to Megatron-LM with the same flags."""
    description: dict[str, str | None] = {"class": _MEGATRON_TOKENIZER_CLASS, "tokenizer_path": config.tokenizer_model}
    # Spelling and order are Megatron-LM's: the md5 of the description's text is the key.
    fast = {"use_fast": "True", "trust_remote_code": "False", "include_special_tokens": "True"}
    match config.canonical_type:
        case "NullTokenizer":
            description |= {"tokenizer_path": None, "vocab_size": str((config.vocab_size or 0) + 1)}
        case "SentencePieceTokenizer":
            description |= {"legacy": "False", "special_tokens": "None"}
        case "TikTokenizer":
            specials = str(config.tiktoken_num_special_tokens)
            description |= {"num_special_tokens": specials, "special_tokens": "None"}
        case "GPT2BPETokenizer":
            description |= {
                "tokenizer_path": "GPT2BPETokenizer",
                "additional_special_tokens": "[]",
                "vocab_file": str(config.vocab_file),
                "merges_file": str(config.merge_file),
                **fast,
            }
        case "HuggingFaceTokenizer":
            description |= {"vocab_file": "None", "merges_file": "None", "additional_special_tokens": "[]", **fast}
    return description


def _named_special_tokens(directory: str) -> dict[str, str]:
    """Special tokens by role (``eos_token`` ...), from the files next to a tokenizer.json."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            continue
        try:
            content: Any = json.loads(read_file(path))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: correct it, or remove it.") from error
        for role, token in content.items() if isinstance(content, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                named[role] = text
    return named


def _first_known(vocabulary: dict[str, int], named: str | None, usual: Sequence[str]) -> int | None:
    """The id of the named token, otherwise of the first usual one that exists."""
    for token in usual if named is None else (named, *usual):
        if token in vocabulary:
            return vocabulary[token]
    return None


@functools.cache
def shared_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """One tokenizer per process; forked workers inherit their parent's."""
    tokenizer = build_tokenizer(config)
    tokenizer.tokenize_to_arrays([])
    return tokenizer
