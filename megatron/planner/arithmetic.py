"""Figures with the formulas that give them: a formula is evaluated as it is printed.

A formula is text with symbols of one letter, in which neighbours are multiplied: ``2 (n - 1) / n S / B``.
"""

import ast
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_SYMBOL, _NEIGHBOURS = re.compile(r"\b[A-Za-z]\b"), re.compile(r"(?<=[\w)]) (?=[\w(])")


@dataclass(frozen=True)
class Figure:
    """A number, its formula and its source."""

    name: str
    value: float
    unit: str
    """``B`` and ``FLOP/s`` are shown with a prefix, ``share`` in percent."""
    symbols: str
    """The formula; empty if the value is recorded or simulated."""
    numbers: str
    """The formula with its numbers."""
    source: str
    column: str = ""
    """Heading of the column, if figures of one name stand side by side."""

    @property
    def shown(self) -> str:
        """The value with its unit, in four digits."""
        if self.unit == "share":
            return f"{100 * self.value:.4g} %"
        if self.unit not in ("B", "FLOP/s"):
            return f"{written(self.value)} {self.unit}".rstrip()
        step = min(4, max(0, int(math.log10(max(self.value, 1)) / 3 + 1e-9)))
        return f"{written(self.value / 1000**step)} {' kMGT'[step].strip()}{self.unit}"

    @property
    def formula(self) -> str:
        """``6 N D = 6 x 405e9 x 15e12 = 3.645e25 FLOP``."""
        numbers = "" if self.numbers in (self.symbols, written(self.value)) else self.numbers
        return " = ".join(filter(None, [self.symbols, numbers, self.shown]))


def figure(
    name: str, formula: str, unit: str, source: str, column: str = "", value: float | None = None, /, **numbers: float
) -> Figure:
    """The figure of a formula with these ``numbers`` by symbol; raises :class:`ArithmeticError` if it has no value.

    Where a function of the project has computed the ``value``, the formula says how.
    """
    if value is None:
        value = _evaluate(ast.parse(_NEIGHBOURS.sub(" * ", formula), mode="eval").body, numbers)
    if not math.isfinite(value):
        raise OverflowError(f"{name} is not finite")
    with_numbers = _SYMBOL.sub(lambda symbol: written(numbers[symbol[0]]), formula)
    return Figure(name, value, unit, formula, _NEIGHBOURS.sub(" x ", with_numbers), source, column)


def _evaluate(node: ast.AST, numbers: Mapping[str, float]) -> float:
    match node:
        case ast.BinOp(left, operation, right):
            return float(_OPERATORS[type(operation)](_evaluate(left, numbers), _evaluate(right, numbers)))
        case ast.Call(ast.Name(function), [argument]):
            return float(getattr(math, function)(_evaluate(argument, numbers)))
        case ast.Name(symbol):
            return numbers[symbol]
        case ast.Constant(int() | float() as value):
            return value
    raise AssertionError(ast.dump(node))


def written(value: float) -> str:
    """A number in four digits, below 1e9 with all digits before the point: 405e9, 3.645e25, 25,312,500."""
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.4g}"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    mantissa, exponent = f"{value:.3e}".split("e")
    # Giga, tera and peta where they need no fraction.
    power = int(exponent) // 3 * 3
    shifted = round(float(mantissa) * 10 ** (int(exponent) - power), 3)
    return f"{shifted:.0f}e{power}" if shifted.is_integer() and power <= 15 else f"{float(mantissa):g}e{int(exponent)}"
