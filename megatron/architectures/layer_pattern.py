"""Which layers of a model are MoE layers: the grammar of ``--moe-layer-freq``.

A number N makes layer i an MoE layer if ``i % N == 0``. Otherwise the text is a list with 1 for an MoE layer and 0 for
a dense one, written as

    sum     = product { "+" product }
    product = { count "*" } part { "*" count }
    part    = "[" bit { "," bit } "]" | "(" sum ")"

with the meaning that Python's lists give to it. The text is parsed, never evaluated.
"""

import re
from collections.abc import Iterable

_LONGEST = 10_000
"""Layers of a pattern, so that a count cannot fill the memory."""
_DEEPEST = 20
"""Levels of parentheses."""
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([][()+*,]))")


class PatternError(ValueError):
    """A text that is no pattern; the message continues a sentence about it."""


def parse_layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """For each of ``num_layers`` layers whether it is an MoE layer; raises :class:`PatternError`."""
    if re.fullmatch(r"\s*[0-9]+\s*", text):
        frequency = _number(text.strip())
        if frequency == 0:
            raise PatternError("must be at least 1")
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    parser = _Parser(_tokens_of(text))
    layers = parser.sum()
    if parser.token:
        raise PatternError(f"has {parser.token!r} where '+', '*' or the end is expected")
    if len(layers) != num_layers:
        raise PatternError(f"describes {len(layers)} layers, but --num-layers is {num_layers}")
    return tuple(bit == 1 for bit in layers)


def describe_layers(is_moe: Iterable[bool]) -> str:
    """The pattern of these layers, equal for equal layers: a number if there is one, otherwise a list."""
    layers = tuple(is_moe)
    for frequency in range(1, len(layers) + 1):
        if layers == tuple(layer % frequency == 0 for layer in range(len(layers))):
            return str(frequency)
    return f"[{','.join(str(int(layer)) for layer in layers)}]"


def _tokens_of(text: str) -> list[str]:
    tokens, end = [], 0
    text = text.rstrip()
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            raise PatternError(f"has {text[end:].lstrip()[0]!r}, which is no part of a list of 0 and 1")
        tokens.append(match[1] or match[2])
        end = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]  # "" is the end
        self._position = 0

    @property
    def token(self) -> str:
        return self._tokens[self._position]

    def sum(self, depth: int = 0) -> list[int]:
        layers = self._product(depth)
        while self.token == "+":
            self._position += 1
            layers = _repeated(layers + self._product(depth), 1)
        return layers

    def _product(self, depth: int) -> list[int]:
        count = 1
        while self.token.isdigit():
            count *= self._count()
            self._expect("*")
        part = self._part(depth)
        while self.token == "*":
            self._position += 1
            count *= self._count()
        return _repeated(part, count)

    def _part(self, depth: int) -> list[int]:
        if self.token == "(":
            if depth == _DEEPEST:
                raise PatternError(f"has more than {_DEEPEST} levels of parentheses")
            self._position += 1
            layers = self.sum(depth + 1)
            self._expect(")")
            return layers
        self._expect("[")
        layers = [self._bit()]
        while self.token == ",":
            self._position += 1
            layers.append(self._bit())
        self._expect("]")
        return layers

    def _bit(self) -> int:
        if self.token not in ("0", "1"):
            raise PatternError(f"has {self.token or 'its end'!r} where 0 or 1 is expected")
        self._position += 1
        return int(self._tokens[self._position - 1])

    def _count(self) -> int:
        if not self.token.isdigit():
            raise PatternError(f"has {self.token or 'its end'!r} where a number is expected")
        self._position += 1
        return _number(self._tokens[self._position - 1])

    def _expect(self, token: str) -> None:
        if self.token != token:
            raise PatternError(f"has {self.token or 'its end'!r} where {token!r} is expected")
        self._position += 1


def _number(digits: str) -> int:
    """The number; of a longer one the first nine digits, which exceed every model, too."""
    return int(digits.lstrip("0")[:9] or "0")


def _repeated(layers: list[int], count: int) -> list[int]:
    if len(layers) * count > _LONGEST:
        raise PatternError(f"describes more than {_LONGEST:,} layers")
    return layers * count
