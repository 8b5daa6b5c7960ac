"""The content of a ``tokenizer.json`` that gives the ids of another library's model."""

from collections.abc import Iterable, Mapping
from typing import Any

Description = dict[str, Any]

_BLANK = "\u2581"  # SentencePiece writes it for a space


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
    """tiktoken's ranks of tokens, which include all bytes, with the regular expression that cuts texts."""
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
    """A SentencePiece model; None if the library tokenizers cannot give exactly its ids.

    That is so for unigram models, whose scores SentencePiece adds in fp32 and tokenizers in fp64, so that they choose
    differently between divisions of nearly equal scores; for models that replace characters (``nmt_nfkc``); and for BPE
    with user-defined symbols or with merges of equal scores.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model, types = proto.ModelProto.FromString(content), proto.ModelProto.SentencePiece
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    # Control, unknown and byte tokens are never found in a text by their names.
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == types.NORMAL}
    merged = [score for piece, score in scores.items() if len(piece) > 1]
    if (
        trainer.model_type != proto.TrainerSpec.BPE
        or trainer.treat_whitespace_as_suffix
        or normalizer.precompiled_charsmap
        or not normalizer.escape_whitespaces
        or {piece.type for piece in model.pieces} - {types.NORMAL, types.BYTE, types.CONTROL, types.UNKNOWN}
        or not set("".join(scores)) <= scores.keys()
        or len(set(merged)) < len(merged)
    ):
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
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    surplus = {"type": "Replace", "pattern": {"Regex": rf"\A +| +(?= )|[ {_BLANK}]+\z"}, "content": ""}
    prefix = {"type": "Prepend", "prepend": _BLANK}
    normalizers = [surplus] * normalizer.remove_extra_whitespaces + [prefix] * normalizer.add_dummy_prefix + [blanks]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
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
            "byte_fallback": trainer.byte_fallback,
            "vocab": ids,
            "merges": merges,
        },
    }
