"""Byte-pair encoding by a fast library, verified against the reference libraries.

GigaToken returns the ids of tiktoken, SentencePiece and Hugging Face's tokenizers many times as fast. Wrong ids would
silently damage a corpus, so GigaToken is compared with the reference library before its first use and during use.
Vocabularies that are not known to be equal use the reference library.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.tokenizer_formats import byte_characters, is_plain_bpe, tiktoken_description
from megatron.errors import TokenizerMismatchError


class TokenizedTexts(NamedTuple):
    """The ids of several texts as arrays."""

    tokens: npt.NDArray[np.int32]  # [tokens] all texts, concatenated
    lengths: npt.NDArray[np.int32]  # [texts] tokens of each text


Encode = Callable[[Sequence[str]], TokenizedTexts]

# Texts that tokenizers often handle differently.
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

_COMPARED_CHARACTERS = 1000  # of one text per batch: about a percent of the time
_STRIDE = 7919  # a prime, so that different parts of texts of similar lengths are compared


class VerifiedEncoder:
    """Ids from ``fast``; a part of one text per batch is also encoded by ``trusted``, the encoder of ``library``."""

    def __init__(self, fast: Encode, trusted: Encode, library: str) -> None:
        self._fast = fast
        self._trusted = trusted
        self._library = library
        self._batches = 0

    def agree_on(self, texts: Sequence[str]) -> bool:
        return all(map(np.array_equal, self._encode(texts), self._trusted(texts)))

    def encode_batch(self, texts: Sequence[str]) -> TokenizedTexts:
        """The ids of each text. Raises :class:`TokenizerMismatchError` if the two encoders differ."""
        if texts:
            # A part of one text, another one in every batch.
            text = texts[self._batches % len(texts)]
            start = self._batches * _STRIDE % max(1, len(text) - _COMPARED_CHARACTERS + 1)
            part = text[start : start + _COMPARED_CHARACTERS]
            self._batches += 1
            if not self.agree_on([part]):
                raise TokenizerMismatchError(
                    f"gigatoken and {self._library} give different ids for the text {part[:80]!r}...: install the "
                    f"versions in requirements.txt, or uninstall gigatoken to use {self._library} alone, and start "
                    "again."
                )
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> TokenizedTexts:
        try:
            return self._fast(texts)
        except BaseException as error:
            # Half a surrogate pair, which tiktoken replaces, or a text that gigatoken fails on.
            if is_panic(error) or not all(map(_is_unicode, texts)):
                return self._trusted(texts)
            raise


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked; such errors are no :class:`Exception` and cannot be imported."""
    return type(error).__name__ == "PanicException"


class GigaTokenEncoder:
    """Encodes with a ``gigatoken.Tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> TokenizedTexts:
        # On this thread alone: worker processes are the parallelism, and a forked one has no threads of GigaToken.
        rows = self.tokenizer.encode_batch(list(texts), parallel=False).layout
        return TokenizedTexts(rows.content.data.view(np.int32), np.diff(rows.offsets.data).astype(np.int32))


def fast_tiktoken(ranks: Mapping[bytes, int], split: str) -> GigaTokenEncoder | None:
    """GigaToken's encoder for tiktoken's ranks of tokens, which include all bytes."""
    description = tiktoken_description(ranks, split, {})
    return _build(lambda gigatoken: gigatoken.Tokenizer.from_json(json.dumps(description | _NO_EXTRAS)))


def fast_tokenizer_json(content: bytes) -> GigaTokenEncoder | None:
    """GigaToken's encoder for a tokenizer.json; None unless it is byte-level BPE without a normalizer.

    GigaToken refuses unknown splits. Entries that add or parse special tokens are removed.
    """
    description = json.loads(content)
    if not _is_plain_byte_level(description):
        return None
    return _build(lambda gigatoken: gigatoken.Tokenizer.from_json(json.dumps(description | _NO_EXTRAS)))


def fast_sentencepiece(content: bytes) -> GigaTokenEncoder | None:
    """GigaToken's encoder for a SentencePiece model; None unless it is BPE without normalisation and without
    user-defined symbols."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model = proto.ModelProto.FromString(content)
    normalizer = model.normalizer_spec
    if not is_plain_bpe(model, proto) or not normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces:
        return None
    # GigaToken finds control tokens in texts by their names, which are ordinary text here: names that no text has.
    for number, piece in enumerate(model.pieces):
        if piece.type == proto.ModelProto.SentencePiece.CONTROL:
            piece.piece = f"\ufdd0{number}\ufdd0"  # no character
            piece.type = proto.ModelProto.SentencePiece.NORMAL
    return _build(lambda gigatoken: gigatoken.Tokenizer.from_sentencepiece(model.SerializeToString()))


_NO_EXTRAS: dict[str, Any] = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None}


def _build(build: Callable[[ModuleType], Any]) -> GigaTokenEncoder | None:
    """None if GigaToken is not installed or refuses the vocabulary."""
    try:
        import gigatoken

        return GigaTokenEncoder(build(gigatoken))
    except (ImportError, ValueError, OSError, RuntimeError):
        return None
    except BaseException as error:
        if is_panic(error):
            return None
        raise


def _is_plain_byte_level(description: dict[str, Any]) -> bool:
    model = description.get("model") or {}
    return (
        model.get("type") == "BPE"
        and not any(model.get(name) for name in ("byte_fallback", "dropout", "unk_token"))
        and not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        and model["vocab"].keys() >= set(byte_characters().values())
        and description.get("normalizer") is None
        and _cuts_once(description.get("pre_tokenizer") or {})
        and all(token.get("special") for token in description.get("added_tokens") or ())
    )


def _cuts_once(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether one regular expression cuts the text: GPT-2's, or a split's."""
    *cuts, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    if not cuts:
        return bool(last.get("use_regex", True))
    known = {"type": "Split", "behavior": "Isolated", "invert": False}
    return len(cuts) == 1 and cuts[0].items() >= known.items() and not last.get("use_regex", True)


# tiktoken's regular expressions overflow their stack on about 300,000 consecutive blanks.
_MAX_BLANK_RUN = 100_000
_LONG_BLANK_RUN = re.compile(rf"(?<!\s)\s{{{_MAX_BLANK_RUN + 1},}}+")
# Letters and digits of Unicode 17, in UTF-8: they are letters for gigatoken, not for tiktoken's regular expressions.
_NEW_CHARACTERS = (
    re.compile(rb"\xe0(?:\xa2\x8f|[\xb1\xb3]\x9c)"),
    re.compile(rb"\xea\x9f[\x8e-\xb1]"),
    re.compile(
        rb"\xf0(?:\x90[\xa5\xbb]|\x91[\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]|\x9e\x9b|\xab\x9c|\xac\xba|[\xb2\xb3])"
    ),
)


def cut_blank_runs(text: str) -> Iterator[str]:
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


def has_new_characters(text: str) -> bool:
    if text.isascii():
        return False
    content = text.encode("utf-8", "surrogatepass")
    return any(characters.search(content) for characters in _NEW_CHARACTERS)


def encode_in_parts(encode: Encode, texts: Sequence[str]) -> TokenizedTexts:
    """The ids of texts that :func:`cut_blank_runs` cuts."""
    if max(map(len, texts), default=0) <= _MAX_BLANK_RUN:
        return encode(texts)
    parts = [[*cut_blank_runs(text)] for text in texts]
    tokens, lengths = encode([part for of_text in parts for part in of_text])
    starts = np.cumsum([0, *map(len, parts[:-1])])
    return TokenizedTexts(tokens, np.add.reduceat(lengths, starts))
