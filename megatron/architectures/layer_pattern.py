"""Which layers of a model are of a kind: the grammar of ``--moe-layer-freq``, ``--no-rope-freq`` and
``--window-attn-skip-freq``.

A number N stands for every N-th layer: for MoE layers those with ``i % N == 0``, for layers without rotary position
embedding (NoPE) those with ``(i + 1) % N == 0``, for layers with a window all but these (Megatron-LM's meanings):

    N = 4, layers    0 1 2 3 4 5 6 7
    MoE              1 0 0 0 1 0 0 0
    NoPE             0 0 0 1 0 0 0 1
    window           1 1 1 0 1 1 1 0

Otherwise the text is a list with 1 for a layer of the kind and 0 for another, written as

    sum     = product { "+" product }
    product = { count "*" } part { "*" count }
    part    = "[" bit { "," bit } "]" | "(" sum ")"

with the meaning that Python's lists give to it. The text is parsed, never evaluated.
"""

import re
from collections.abc import Callable, Iterable

# The pattern of --no-rope-freq that has no layer, and of --window-attn-skip-freq that skips none.
NO_LAYER = "0"
_LONGEST = 10_000  # layers of a pattern, so that a count cannot fill the memory
_DEEPEST = 20  # levels of parentheses
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([][()+*,]))")


class PatternError(ValueError):
    """A text that is no pattern; the message continues a sentence about it."""


def parse_layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """For each of ``num_layers`` layers whether it is an MoE layer; raises :class:`PatternError`."""
    frequency = _frequency(text)
    if frequency == 0:
        raise PatternError("must be at least 1")
    if frequency is not None:
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    return _parse_list(text, num_layers)


def parse_nope_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """For each of ``num_layers`` layers whether it has no rotary position embedding; raises :class:`PatternError`."""
    frequency = _frequency(text)
    if frequency is not None:
        return tuple(frequency > 0 and (layer + 1) % frequency == 0 for layer in range(num_layers))
    return _parse_list(text, num_layers)


def parse_window_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """For each of ``num_layers`` layers whether it has a window; raises :class:`PatternError`."""
    frequency = _frequency(text)
    if frequency is None:
        return _parse_list(text, num_layers)
    return tuple(frequency == 0 or (layer + 1) % frequency != 0 for layer in range(num_layers))


def _frequency(text: str) -> int | None:
    """The number that the whole pattern is; None for a list."""
    return _number(text.strip()) if re.fullmatch(r"\s*[0-9]+\s*", text) else None


def _parse_list(text: str, num_layers: int) -> tuple[bool, ...]:
    parser = _Parser(text)
    layers = parser.sum()
    if parser.token:
        raise PatternError(f"has {parser.token!r} where '+', '*' or the end is expected")
    if len(layers) != num_layers:
        raise PatternError(f"describes {len(layers)} layers, but --num-layers is {num_layers}")
    return tuple(bit == 1 for bit in layers)


def describe_layers(is_moe: Iterable[bool]) -> str:
    """The pattern of these MoE layers, equal for equal layers: a number if there is one, otherwise a list."""
    return _describe(is_moe, parse_layer_pattern, 1)  # 0 is no frequency of MoE layers


def describe_nope_layers(is_nope: Iterable[bool]) -> str:
    """The pattern of these layers without rotary position embedding, equal for equal layers."""
    return _describe(is_nope, parse_nope_pattern, 0)


def describe_window_layers(has_window: Iterable[bool]) -> str:
    """The pattern of these layers with a window, equal for equal layers."""
    return _describe(has_window, parse_window_pattern, 0)


def _describe(layers: Iterable[bool], parse: Callable[[str, int], tuple[bool, ...]], first: int) -> str:
    wanted = tuple(layers)
    for frequency in range(first, len(wanted) + 1):
        if parse(str(frequency), len(wanted)) == wanted:
            return str(frequency)
    return f"[{','.join(str(int(layer)) for layer in wanted)}]"


class _Parser:
    """Recursive descent over the tokens of a list."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self._position = 0
        text, end = text.rstrip(), 0
        while end < len(text):
            match = _TOKEN.match(text, end)
            if match is None:
                raise PatternError(f"has {text[end:].lstrip()[0]!r}, which is no part of a list of 0 and 1")
            self._tokens.append(match[1] or match[2])
            end = match.end()
        self._tokens.append("")  # the end

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
        return int(self._take(self.token in ("0", "1"), "0 or 1"))

    def _count(self) -> int:
        return _number(self._take(self.token.isdigit(), "a number"))

    def _expect(self, token: str) -> None:
        self._take(self.token == token, repr(token))

    def _take(self, is_expected: bool, expected: str) -> str:
        """The next token."""
        if not is_expected:
            raise PatternError(f"has {self.token or 'its end'!r} where {expected} is expected")
        self._position += 1
        return self._tokens[self._position - 1]


def _number(digits: str) -> int:
    """The number; of a longer one the first nine digits, which exceed every model, too."""
    return int(digits.lstrip("0")[:9] or "0")


def _repeated(layers: list[int], count: int) -> list[int]:
    if len(layers) * count > _LONGEST:
        raise PatternError(f"describes more than {_LONGEST:,} layers")
    return layers * count
