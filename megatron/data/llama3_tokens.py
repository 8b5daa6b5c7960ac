"""Llama 3's split of texts, ranks and special tokens, as tiktoken and faster libraries need them."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence

import numpy as np

from megatron.data.tokenizer_formats import not_a
from megatron.data.verified_encoder import Encode, TokenizedTexts
from megatron.errors import ConfigError, DataError

# Llama 3 splits text before it merges bytes: contractions, words, up to three digits, punctuation, whitespace.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A word with its contraction: one part of a text under Llama 4's pattern, two under Llama 3's.
_CONTRACTED_WORD = re.compile(rb"[A-Za-z]'(?:s|t|re|ve|m|ll|d)$")
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
# Letters and digits of Unicode 17, in UTF-8: gigatoken knows them, tiktoken's regular expressions do not.
_NEW_CHARACTERS = (
    re.compile(rb"\xe0(?:\xa2\x8f|[\xb1\xb3]\x9c)"),
    re.compile(rb"\xea\x9f[\x8e-\xb1]"),
    re.compile(
        rb"\xf0(?:\x90[\xa5\xbb]|\x91[\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]|\x9e\x9b|\xab\x9c|\xac\xba|[\xb2\xb3])"
    ),
)


def parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """Token bytes and ranks; ranks must be 0..n-1."""
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise DataError(not_a(path, "a file of base64 tokens and ranks")) from error
    foreign = next((token for token in ranks if _CONTRACTED_WORD.search(token)), None)
    if foreign is not None:
        raise DataError(
            f"{path} has the token {foreign.decode(errors='replace')!r}, which Llama 3's pattern never makes, so it is "
            "the file of Llama 4 or of another model: use --tokenizer-type HuggingFaceTokenizer with the model's "
            "tokenizer.json."
        )
    if not ranks or set(ranks.values()) != set(range(len(ranks))):
        raise DataError(not_a(path, "a complete file of base64 tokens and ranks"))
    return ranks


def llama3_special_tokens(first_id: int, count: int) -> dict[str, int]:
    """Names and ids of ``count`` special tokens from ``first_id``."""
    if count <= max(_LLAMA3_SPECIAL_TOKENS):
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is too small for Llama 3: use 256, or at least "
            f"{max(_LLAMA3_SPECIAL_TOKENS) + 1}."
        )
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(count))
    return {_LLAMA3_SPECIAL_TOKENS.get(place) or next(reserved): first_id + place for place in range(count)}


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
