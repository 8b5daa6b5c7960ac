"""Byte-pair encoding as fast as there is, compared with the libraries that the field trusts.

splintr gives the ids of tiktoken, SentencePiece and Hugging Face's tokenizers several times as fast. Wrong ids would
spoil a corpus without a sign, so a part of what is encoded is encoded by the trusted library, too.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron.config.errors import TokenizerMismatchError
from megatron.data.sentencepiece_ranks import BLANK, SentencePieceRanks

Encode = Callable[[str], bytes]
"""The ids of a text as int32 bytes."""

_COMPARED_CHARACTERS = 1000  # of one text per batch: a percent of the time


class VerifiedEncoder:
    """Ids by ``fast``; for the beginning of one text per batch by ``trusted``, the encoder of ``library``, too."""

    def __init__(self, fast: Encode, trusted: Encode, library: str) -> None:
        self._fast = fast
        self._trusted = trusted
        self._library = library
        self._batches = 0

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text. Raises :class:`TokenizerMismatchError` if the two encoders differ."""
        if texts:
            self._compare(texts[self._batches % len(texts)][:_COMPARED_CHARACTERS])
            self._batches += 1
        return list(map(self._encode, texts))

    def _encode(self, text: str) -> bytes:
        try:
            return self._fast(text)
        except UnicodeEncodeError:  # half a surrogate pair, which is not UTF-8
            return self._trusted(text)

    def _compare(self, text: str) -> None:
        if self._encode(text) != self._trusted(text):
            raise TokenizerMismatchError(
                f"splintr and {self._library} give different ids for the text {text[:80]!r}...: install the versions "
                f"in requirements.txt, or uninstall splintr-rs to use {self._library} alone."
            )


def fast_tiktoken(model: bytes, split: str) -> Encode | None:
    """splintr's encoder for a file of base64 tokens and ranks; None where splintr is not installed."""
    try:
        import splintr
    except ImportError:
        return None
    return _or_none(lambda: splintr.Tokenizer.from_bytes(model, split, {}).encode_flat)


def fast_tokenizer_json(content: bytes) -> Encode | None:
    """splintr's encoder for a tokenizer.json; None for other than byte-level BPE of the text as it is.

    What would add special tokens, or look for them in a text, is taken out of the file.
    """
    try:
        import splintr
    except ImportError:
        return None
    description = json.loads(content)
    if not _is_plain_byte_level(description):
        return None
    description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    changed = json.dumps(description).encode()
    return _or_none(lambda: splintr.from_json_bytes(changed).encode_flat)


def fast_sentencepiece(model: bytes, trusted: Encode) -> Encode | None:
    """splintr's encoder for a SentencePiece model; None for other than BPE of the text as it is."""
    try:
        import splintr
    except ImportError:
        return None
    ranks = SentencePieceRanks.of(model)
    if ranks is None:
        return None
    encode_flat = _or_none(lambda: splintr.Tokenizer.from_bytes(ranks.file(), ranks.split, {}).pcre2().encode_flat)
    if encode_flat is None:
        return None

    def encode(text: str) -> bytes:
        # SentencePiece puts a blank before what is not empty, and takes its sign for a blank for one.
        if not text or BLANK in text:
            return trusted(text)
        return ranks.ids_of(np.frombuffer(encode_flat(f" {text}"), np.uint32)).tobytes()

    return encode


def _or_none(build: Callable[[], Encode]) -> Encode | None:
    """None for a vocabulary that splintr refuses."""
    try:
        return build()
    except (ValueError, OSError):
        return None


def _is_plain_byte_level(description: dict[str, Any]) -> bool:
    steps = description.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    return (
        description["model"].get("type") == "BPE"
        and not description["model"].get("byte_fallback")
        and not description["model"].get("dropout")
        and description.get("normalizer") is None
        and bool(steps)
        and steps[-1].get("type") == "ByteLevel"
        and not steps[-1].get("add_prefix_space")
        and all(token.get("special") for token in description.get("added_tokens") or ())
    )
