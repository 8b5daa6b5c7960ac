"""Byte-pair encoding by a fast library, verified against the reference libraries.

splintr returns the ids of tiktoken, SentencePiece and Hugging Face's tokenizers several times as fast. Wrong ids would
silently damage a corpus, so splintr is compared with the reference library before its first use and during use.
Vocabularies that are not known to be equal use the reference library.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from megatron.data.sentencepiece_ranks import BLANK, SentencePieceRanks
from megatron.errors import TokenizerMismatchError

Encode = Callable[[str], bytes]
"""The ids of a text as int32 bytes."""

AWKWARD_TEXTS = (
    "",
    " ",
    "  two before",
    "two after  ",
    "\n\nm",
    "\tif x:\r\n\t\treturn 12345\n\n\n    # '''I'M  they'Ll\n",
    "na\u00efve caf\u00e9 \u00a0 \u4e2d\u6587\u3000\u0939\u093f \U0001f600\ufeff e\u0301 \u2581 \ufffd",
    "nul \0 bell \a \x7f \x85 \u2028",
    "</s> <s> <unk> <0x0A> <|end_of_text|> <|begin_of_text|> <|endoftext|>",
)
"""Texts that tokenizers often handle differently."""

_COMPARED_CHARACTERS = 1000  # of one text per batch: a percent of the time
_STRIDE = 7919  # a prime, so that different parts of texts of similar lengths are compared


class VerifiedEncoder:
    """Ids from ``fast``; a part of one text per batch is also encoded by ``trusted``, the encoder of ``library``."""

    def __init__(self, fast: Encode, trusted: Encode, library: str) -> None:
        self._fast = fast
        self._trusted = trusted
        self._library = library
        self._batches = 0

    def agree_on(self, texts: Iterable[str]) -> bool:
        """Whether both encoders return the same ids for each text."""
        return all(self._encode(text) == self._trusted(text) for text in texts)

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text. Raises :class:`TokenizerMismatchError` if the two encoders differ."""
        if texts:
            self._compare(texts[self._batches % len(texts)])
        return list(map(self._encode, texts))

    def _compare(self, text: str) -> None:
        start = self._batches * _STRIDE % max(1, len(text) - _COMPARED_CHARACTERS + 1)
        part = text[start : start + _COMPARED_CHARACTERS]
        self._batches += 1
        if not self.agree_on([part]):
            raise TokenizerMismatchError(
                f"splintr and {self._library} give different ids for the text {part[:80]!r}...: install the versions "
                f"in requirements.txt, or uninstall splintr-rs to use {self._library} alone, and start again."
            )

    def _encode(self, text: str) -> bytes:
        try:
            return self._fast(text)
        except BaseException as error:
            # Half a surrogate pair, which tiktoken replaces, or a text that splintr fails on.
            if isinstance(error, UnicodeEncodeError) or is_panic(error):
                return self._trusted(text)
            raise


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked; such errors are no :class:`Exception` and cannot be imported."""
    return type(error).__name__ == "PanicException"


def fast_tiktoken(model: bytes, split: str) -> Encode | None:
    """splintr's encoder for a file of base64 tokens and ranks that includes all bytes."""
    return _build(lambda splintr: splintr.Tokenizer.from_bytes(model, split, {}).encode_flat)


def fast_tokenizer_json(content: bytes, split: str) -> Encode | None:
    """splintr's encoder for a tokenizer.json; None unless it is byte-level BPE that splits texts by ``split`` or like
    GPT-2, since splintr's regular expressions differ from other libraries'. Entries that add or parse special tokens
    are removed."""
    description = json.loads(content)
    if not _is_plain_byte_level(description, split):
        return None
    description |= {"added_tokens": [], "post_processor": None}
    return _build(lambda splintr: splintr.from_json_bytes(json.dumps(description).encode()).encode_flat)


def fast_sentencepiece(model: bytes, trusted: Encode) -> Encode | None:
    """splintr's encoder for a SentencePiece model; None unless it is BPE without normalisation."""
    ranks = SentencePieceRanks.of(model)
    if ranks is None:
        return None
    file, split = ranks.tiktoken_file(), ranks.split
    encode_flat = _build(lambda splintr: splintr.Tokenizer.from_bytes(file, split, {}).pcre2().encode_flat)
    if encode_flat is None:
        return None

    def encode(text: str) -> bytes:
        # SentencePiece puts a blank before what is not empty, and takes its sign for a blank for one.
        if not text or BLANK in text:
            return trusted(text)
        return ranks.ids_of(np.frombuffer(encode_flat(f" {text}"), np.uint32)).tobytes()

    return encode


def _build(build: Callable[[ModuleType], Encode]) -> Encode | None:
    """None if splintr is not installed or refuses the vocabulary."""
    try:
        import splintr

        return build(splintr)
    except (ImportError, ValueError, OSError):
        return None
    except BaseException as error:
        if is_panic(error):
            return None
        raise


def _is_plain_byte_level(description: dict[str, Any], split: str) -> bool:
    model = description.get("model") or {}
    return (
        model.get("type") == "BPE"
        and not any(model.get(name) for name in ("byte_fallback", "dropout", "unk_token"))
        and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        # A token for each byte: bytes that are no visible character of Latin-1 are written as U+0100 and on.
        and sum(len(token) == 1 and ord(token) < 0x144 for token in model["vocab"]) == 256
        and _merges_by_id(model)
        and description.get("normalizer") is None
        and _cuts_by(split, description.get("pre_tokenizer") or {})
        and all(token.get("special") for token in description.get("added_tokens") or ())
    )


def _merges_by_id(model: dict[str, Any]) -> bool:
    """Whether merges are in the order of the resulting ids, as after training."""
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    ids = [model["vocab"].get("".join(merge), -1) for merge in merges]
    return all(left <= right for left, right in pairwise(ids))


def _cuts_by(split: str, pre_tokenizer: dict[str, Any]) -> bool:
    *cuts, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    if not cuts:
        return bool(last.get("use_regex", True))
    known = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    return cuts == [known] and not last.get("use_regex", True)
