"""UTF-8 bytes of the text of each token of a vocabulary."""

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SPACE = "\u2581"
"""A space in pieces of SentencePiece."""


class ByteLengths(NamedTuple):
    """Bytes that each token adds to a text, [v] int64."""

    inside: npt.NDArray[np.int64]
    """After another token."""
    first: npt.NDArray[np.int64]
    """As the first token of a text."""


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
