"""A SentencePiece BPE vocabulary as tiktoken's: byte strings in the order in which they are merged.

SentencePiece merges characters, always the neighbours whose piece has the highest score; tiktoken's rule merges bytes,
always those whose token has the lowest rank. With tokens that put the characters together before all pieces, and pieces
ranked by their scores, both come to the same pieces. What then is left of a character without a piece stands for its
bytes, as with SentencePiece's byte fallback.

Where no piece of the vocabulary has two neighbouring characters, no merge joins them, so that texts may be cut there.
"""

import base64
import re
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

BLANK = "\u2581"
"""SentencePiece's sign for a blank."""

_MOST_BYTES = 3  # that one token may stand for: all but the last of a character


class SentencePieceRanks(NamedTuple):
    """Tokens and how to use them; texts are to have one blank in front, as SentencePiece puts it."""

    tokens: list[bytes]
    """By rank."""
    ids: npt.NDArray[np.int32]
    """SentencePiece's ids of each token, [tokens, 3], filled up with -1."""
    split: str
    """Pattern of what merges never leave."""

    @classmethod
    def of(cls, model: bytes) -> Self | None:
        """The ranks of a model's file; None if it does more than to merge a text as it is: unigrams, normalisation,
        symbols of users, pieces across blanks. Llama 2's model and those of tools/train_tokenizer.py do not."""
        from sentencepiece import sentencepiece_model_pb2

        proto: Any = sentencepiece_model_pb2
        content = proto.ModelProto.FromString(model)
        types = proto.ModelProto.SentencePiece
        by_type: dict[int, dict[str, int]] = {}
        for number, piece in enumerate(content.pieces):
            by_type.setdefault(piece.type, {})[piece.piece] = number
        pieces = {piece.replace(BLANK, " "): number for piece, number in by_type.pop(types.NORMAL, {}).items()}
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        byte_ids = [by_type[types.BYTE][name] for name in names if name in by_type.get(types.BYTE, {})]
        merged = [piece for piece in pieces if len(piece) > 1]
        scores = {piece: content.pieces[pieces[piece]].score for piece in merged}
        if (
            not _merges_text_as_it_is(content, proto)
            or by_type.keys() - {types.BYTE, types.CONTROL, types.UNKNOWN}
            or len(byte_ids) < len(names)
            or len(set(scores.values())) < len(merged)
            or any(" " in piece.lstrip(" ") for piece in pieces)
            or not _come_to_themselves(merged, pieces, content)
        ):
            return None
        characters = {character.encode() for piece in pieces for character in piece} - set(map(_byte, range(256)))
        beginnings = {character[:length] for character in characters for length in range(2, len(character))}
        tokens = [
            *map(_byte, range(256)),
            *sorted(beginnings),
            *sorted(characters),
            *(piece.encode() for piece in sorted(merged, key=lambda piece: -scores[piece])),
        ]
        numbers = {piece.encode(): number for piece, number in pieces.items()}
        ids = np.full((len(tokens), _MOST_BYTES), -1, np.int32)
        for row, token in zip(ids, tokens, strict=True):
            found = [numbers[token]] if token in numbers else [byte_ids[byte] for byte in token]
            row[: len(found)] = found
        return cls(tokens, ids, _split(pieces))

    def file(self) -> bytes:
        """The tokens as a file of tiktoken."""
        return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.tokens))

    def ids_of(self, ranks: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """SentencePiece's ids of a text."""
        ids = self.ids[ranks]
        return ids[ids >= 0]


def _byte(value: int) -> bytes:
    return bytes([value])


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


def _come_to_themselves(texts: list[str], ids: dict[str, int], model: Any) -> bool:
    """Whether each piece is what SentencePiece makes of its text: libraries look for whole words before they merge."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    model.normalizer_spec.add_dummy_prefix = False
    processor.LoadFromSerializedProto(model.SerializeToString())
    return bool(processor.encode(texts, num_threads=1) == [[ids[text]] for text in texts])


def _split(pieces: dict[str, int]) -> str:
    """Blanks and, behind them, characters of kinds that some piece has side by side: letters, digits, others.

    What is not in the vocabulary, never merged, counts as letters, so that it does not matter which Unicode a library
    knows.
    """
    others = "".join(sorted({character for piece in pieces for character in piece if _kind(character) == "others"}))
    members = {"digits": "0-9", "others": re.escape(others.replace(" ", "")) or "\0"}
    pairs = {(_kind(left), _kind(right)) for piece in pieces for left, right in pairwise(piece.lstrip(" "))}
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
