"""A SentencePiece BPE vocabulary as a tiktoken vocabulary: byte strings in the order of their merges.

SentencePiece merges the neighbouring characters whose piece has the highest score; tiktoken merges the bytes whose
token has the lowest rank. If tokens that merge the bytes of characters come first, and the pieces follow by their
scores, both give the same pieces. A character without a piece remains as bytes, as with SentencePiece's byte fallback.

Two kinds of characters that are neighbours in no piece are never merged, so texts may be split between them.
"""

import base64
import re
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

BLANK = "\u2581"
"""SentencePiece's sign for a blank."""

_MOST_BYTES = 4  # of a character without a piece


class SentencePieceRanks(NamedTuple):
    """The tokens, for texts with one blank in front, which SentencePiece adds."""

    tokens: list[bytes]
    """By rank."""
    ids: npt.NDArray[np.int32]
    """SentencePiece's ids of each token, [tokens, 4], padded with -1."""
    split: str
    """Pattern of the parts of a text; no merge crosses its matches."""

    @classmethod
    def of(cls, model: bytes) -> Self | None:
        """The ranks of a model's file; None for a model with unigrams, normalisation, user-defined symbols or pieces
        across blanks. Llama 2's models and those of tools/train_tokenizer.py have none of these."""
        from sentencepiece import sentencepiece_model_pb2

        proto: Any = sentencepiece_model_pb2
        content = proto.ModelProto.FromString(model)
        types = proto.ModelProto.SentencePiece
        by_type: dict[int, dict[str, int]] = {kind: {} for kind in (types.NORMAL, types.BYTE)}
        for number, piece in enumerate(content.pieces):
            by_type.setdefault(piece.type, {})[piece.piece.replace(BLANK, " ")] = number
        pieces = by_type[types.NORMAL]
        byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
        if (
            by_type.keys() - {types.NORMAL, types.BYTE, types.CONTROL, types.UNKNOWN}
            or not by_type[types.BYTE].keys() >= set(byte_names)
            or not _merges_text_as_it_is(content, proto)
            or not _can_be_ranked(pieces, content)
        ):
            return None
        merged = sorted(
            (piece for piece in pieces if len(piece) > 1), key=lambda piece: -_score(content, pieces[piece])
        )
        tokens = _tokens(pieces, merged)
        byte_ids = [by_type[types.BYTE][name] for name in byte_names]
        numbers = {piece.encode(): number for piece, number in pieces.items()}
        ids = np.full((len(tokens), _MOST_BYTES), -1, np.int32)
        for row, token in zip(ids, tokens, strict=True):
            found = [numbers[token]] if token in numbers else [byte_ids[byte] for byte in token]
            row[: len(found)] = found
        return cls(tokens, ids, _split(pieces))

    def tiktoken_file(self) -> bytes:
        """The tokens as a file of tiktoken."""
        return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.tokens))

    def ids_of(self, ranks: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """SentencePiece's ids of a text."""
        ids = self.ids[ranks]
        return ids[ids >= 0]


def _merges_text_as_it_is(model: Any, proto: Any) -> bool:
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    return (
        trainer.model_type == proto.TrainerSpec.BPE
        and not trainer.treat_whitespace_as_suffix
        and not normalizer.precompiled_charsmap
        and normalizer.add_dummy_prefix
        and normalizer.escape_whitespaces
        and not normalizer.remove_extra_whitespaces
    )


def _can_be_ranked(pieces: dict[str, int], model: Any) -> bool:
    """Whether all pieces of several characters have different scores, no piece has a blank after other characters, and
    SentencePiece encodes the text of each piece as this piece: tiktoken looks up whole words before it merges."""
    from sentencepiece import SentencePieceProcessor

    merged = [piece for piece in pieces if len(piece) > 1]
    if len({_score(model, pieces[piece]) for piece in merged}) < len(merged):
        return False
    if any(" " in piece.lstrip(" ") for piece in pieces):
        return False
    as_it_is = type(model).FromString(model.SerializeToString())
    as_it_is.normalizer_spec.add_dummy_prefix = False
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(as_it_is.SerializeToString())
    return bool(processor.encode(merged, num_threads=1) == [[pieces[piece]] for piece in merged])


def _score(model: Any, number: int) -> float:
    return float(model.pieces[number].score)


def _tokens(pieces: dict[str, int], merged: list[str]) -> list[bytes]:
    """All bytes, the tokens that merge bytes to characters, and the ``merged`` pieces in order."""
    every_byte = [bytes([value]) for value in range(256)]
    characters = {character.encode() for piece in pieces for character in piece}.difference(every_byte)
    beginnings = {character[:length] for character in characters for length in range(2, len(character))}
    return [*every_byte, *sorted(beginnings), *sorted(characters), *(piece.encode() for piece in merged)]


def _split(pieces: dict[str, int]) -> str:
    """Blanks, followed by characters of kinds (letters, digits, others) that are neighbours in some piece.

    Characters outside of the vocabulary are never merged and count as letters, so the pattern does not depend on a
    library's version of Unicode.
    """
    kinds = {character: _kind(character) for character in set().union(*pieces)}
    others = "".join(sorted(character for character, kind in kinds.items() if kind == "others"))
    # A class cannot be empty: use NUL, which is in no piece then.
    members = {"digits": "0-9", "others": re.escape(others.replace(" ", "")) or "\0"}
    pairs = {(kinds[left], kinds[right]) for piece in pieces for left, right in pairwise(piece.lstrip(" "))}
    groups = [{"letters"}, {"digits"}, {"others"}]
    for pair in pairs:
        together = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in together] + [set().union(*together)]
    choices = []
    for group in groups:
        within = "".join(characters for kind, characters in members.items() if kind in group)
        beyond = "".join(characters for kind, characters in members.items() if kind not in group)
        repeats = any({left, right} <= group for left, right in pairs)
        choices.append((f"[^ {beyond}]" if "letters" in group else f"[{within}]") + ("+" if repeats else ""))
    return f" *(?:{'|'.join(choices)})| +"


def _kind(character: str) -> str:
    if character in "0123456789":
        return "digits"
    return "letters" if character.isalpha() else "others"
