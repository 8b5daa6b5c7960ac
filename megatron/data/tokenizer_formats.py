"""Files of tokenizers: what they hold, and a ``tokenizer.json`` that gives the same ids.

Llama 3's file has ranks of byte strings, Llama 2's is a SentencePiece model, GPT-2 has two files. Files are read as
data.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError
from megatron.urls import from_hub, is_hub_name

#   format             file                                   tokenizer.json
#   TikTokenizer       lines of base64 token, rank            merges: all cuts of a token in two tokens, by rank
#   SentencePiece      a protobuf of pieces and scores        merges by score; None for unigram models
#   GPT2BPE            vocab.json, merges.txt                 both files as they are


def read_file(path: str, flag: str = "--tokenizer-model") -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        if is_hub_name(path):
            raise DataError(
                f"{path} does not exist: {from_hub(path)} and set {flag} to the tokenizer there."
            ) from error
        raise DataError(f"{path} does not exist: set {flag} to the tokenizer file.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): use another tokenizer file.") from error


def not_a(path: str, kind: str) -> str:
    return f"{path} is not {kind}: check that --tokenizer-model and --tokenizer-type belong together."


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


def parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """Token bytes and ranks, which must be 0..n-1; raises :class:`DataError`."""
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


END_OF_TEXT = "<|endoftext|>"
_VERSION = "#version"  # begins the first line of a file of merges


def gpt2_description(vocabulary: bytes, merges: bytes, vocab_file: str, merge_file: str) -> bytes:
    """The ``tokenizer.json`` of byte-level BPE with the contents of the two files, whose names are for errors."""
    ids = _vocabulary(vocabulary, vocab_file)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    description: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": special_tokens([(ids[END_OF_TEXT], END_OF_TEXT)]),
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": _merges(merges, merge_file, ids)},
    }
    return json.dumps(description).encode()


def _vocabulary(content: bytes, path: str) -> dict[str, int]:
    remedy = "set --vocab-file to the vocab.json of a GPT-2 tokenizer"
    try:
        ids = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): {remedy}.") from error
    if not isinstance(ids, dict) or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise DataError(f"{path} is not a JSON object of tokens and ids: {remedy}.")
    if END_OF_TEXT not in ids:
        raise DataError(f"{path} has no {END_OF_TEXT}, which ends documents: {remedy}.")
    return ids


def _merges(content: bytes, path: str, ids: dict[str, int]) -> list[list[str]]:
    remedy = "set --merge-file to the merges.txt that belongs to --vocab-file"
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): {remedy}.") from error
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or line.startswith(_VERSION):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            raise DataError(
                f"Line {number} of {path}, {line[:40]!r}, merges no two tokens of the vocabulary: {remedy}."
            )
        merges.append(pair)
    return merges


Description = dict[str, Any]

SPACE = "\u2581"  # stands for a space in pieces of SentencePiece


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in the vocabulary of byte-level BPE, as GPT-2 chose them."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def special_tokens(names: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    """The entries of special tokens with these ids and names."""
    how = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": token, "content": name, "special": True, **how} for token, name in names]


def tiktoken_description(ranks: Mapping[bytes, int], split: str, specials: Mapping[str, int]) -> Description:
    """The ``tokenizer.json`` of tiktoken's ranks, which include all bytes, and the regular expression ``split``."""
    # tiktoken merges the neighbours whose concatenation has the lowest rank: every division of a token in two tokens is
    # a merge. A word that is a token is never merged (ignore_merges).
    characters = byte_characters()
    names = {token: "".join(map(characters.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token, name in sorted(names.items(), key=lambda entry: ranks[entry[0]]):
        cuts = ((token[:cut], token[cut:], cut) for cut in range(1, len(token)))
        found = [(ranks[left], ranks[right], cut) for left, right, cut in cuts if left in ranks and right in ranks]
        merges += [(name[:cut], name[cut:]) for _, _, cut in sorted(found)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": special_tokens((token, name) for name, token in specials.items()),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {name: ranks[token] for token, name in names.items()},
            "merges": merges,
        },
    }


def sentencepiece_description(content: bytes) -> Description | None:
    """The ``tokenizer.json`` of a SentencePiece model; None if the library tokenizers cannot give exactly its ids.

    It cannot for unigram models, whose scores SentencePiece adds in fp32 and tokenizers in fp64, so that they choose
    differently between divisions of nearly equal scores; for models that replace characters (``nmt_nfkc``); and for BPE
    with user-defined symbols or with merges of equal scores.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model, types = proto.ModelProto.FromString(content), proto.ModelProto.SentencePiece
    normalizer = model.normalizer_spec
    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    # Control, unknown and byte tokens are never found in a text by their names.
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == types.NORMAL}
    merged = [score for piece, score in scores.items() if len(piece) > 1]
    has_all_characters, are_distinct = set("".join(scores)) <= scores.keys(), len(set(merged)) == len(merged)
    if not (is_plain_bpe(model, proto) and has_all_characters and are_distinct):
        return None
    # SentencePiece merges the neighbours whose concatenation has the highest score.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    unknown = next(piece.piece for piece in model.pieces if piece.type == types.UNKNOWN)
    named = ((ids[piece.piece], piece.piece) for piece in model.pieces if piece.type in (types.CONTROL, types.UNKNOWN))
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    surplus = {"type": "Replace", "pattern": {"Regex": rf"\A +| +(?= )|[ {SPACE}]+\z"}, "content": ""}
    prefix = {"type": "Prepend", "prepend": SPACE}
    normalizers = [surplus] * normalizer.remove_extra_whitespaces + [prefix] * normalizer.add_dummy_prefix + [blanks]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * normalizer.add_dummy_prefix
    return {
        "version": "1.0",
        "added_tokens": special_tokens(named),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": model.trainer_spec.byte_fallback,
            "vocab": ids,
            "merges": merges,
        },
    }


def is_plain_bpe(model: Any, proto: Any) -> bool:
    """Whether a SentencePiece model is BPE that replaces no character but a space, without user-defined symbols."""
    normalizer, trainer, types = model.normalizer_spec, model.trainer_spec, proto.ModelProto.SentencePiece
    return (
        trainer.model_type == proto.TrainerSpec.BPE
        and not trainer.treat_whitespace_as_suffix
        and not normalizer.precompiled_charsmap
        and normalizer.escape_whitespaces
        and {piece.type for piece in model.pieces} <= {types.NORMAL, types.BYTE, types.CONTROL, types.UNKNOWN}
    )


class ByteLengths(NamedTuple):
    """UTF-8 bytes that each token of a vocabulary adds to a text, [v] int64."""

    inside: npt.NDArray[np.int64]  # after another token
    first: npt.NDArray[np.int64]  # as the first token of a text


def lengths_of_bytes(lengths: Mapping[int, int], vocab_size: int) -> ByteLengths:
    """Lengths that do not depend on the place in the text; 0 for other tokens."""
    array = np.zeros(vocab_size, np.int64)
    array[list(lengths)] = list(lengths.values())
    return ByteLengths(array, array)


def lengths_of_pieces(
    pieces: Mapping[int, str], single_bytes: Set[int], vocab_size: int, decode: Callable[[list[int]], str]
) -> ByteLengths:
    """Lengths of SentencePiece's pieces, of which ``single_bytes`` stand for a byte; 0 for other tokens.

    If ``decode`` drops a space at the beginning of a text, the first piece is shorter.
    """
    spaced = [token for token, piece in pieces.items() if piece.startswith(SPACE)]
    drops_space = bool(spaced) and decode(spaced[:1]) == pieces[spaced[0]].replace(SPACE, " ")[1:]
    inside, first = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for token, piece in pieces.items():
        inside[token] = 1 if token in single_bytes else len(piece.replace(SPACE, " ").encode())
        first[token] = inside[token] - (drops_space and piece.startswith(SPACE))
    return ByteLengths(inside, first)
