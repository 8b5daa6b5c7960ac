"""Range checks of numbers, shared by the flag groups. NaN and infinity are out of every range."""

import math
from collections.abc import Callable, Mapping

from megatron.errors import ConfigError

Values = Mapping[str, float | int | None]
"""Value by flag; None (not given) passes."""


def require_at_least(minimum: int, values: Values) -> None:
    """Raise :class:`ConfigError` for the values below ``minimum``."""
    bound = "be finite and not negative" if minimum == 0 else f"be at least {minimum}"
    _refuse(values, lambda value: minimum <= value < math.inf, bound)


def require_positive(values: Values) -> None:
    """Raise :class:`ConfigError` for the values that are not above zero."""
    _refuse(values, lambda value: 0 < value < math.inf, "be positive and finite")


def require_fraction(values: Values) -> None:
    """Raise :class:`ConfigError` for the values outside [0, 1)."""
    _refuse(values, lambda value: 0 <= value < 1, "be at least 0 and below 1")


def _refuse(values: Values, is_in_range: Callable[[float], bool], bound: str) -> None:
    outside = {flag: value for flag, value in values.items() if value is not None and not is_in_range(value)}
    if outside:
        raise ConfigError(*(f"{flag} {value} must {bound}." for flag, value in outside.items()))
