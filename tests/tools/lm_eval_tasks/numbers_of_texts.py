"""A metric of a task of one's own."""

from collections.abc import Sequence


def number(references: Sequence[str], predictions: Sequence[str]) -> int:
    """A number that another text has another of."""
    return sum(place * ord(letter) for place, letter in enumerate(predictions[0], start=1))
