"""Range checks of numbers, shared by the flag groups. NaN and infinity are out of every range."""

import math
from collections.abc import Mapping

from megatron.errors import ConfigError

Values = Mapping[str, float | int | None]
"""Value by flag; None (not given) passes."""


def require_at_least(minimum: int, values: Values) -> None:
    """Raise :class:`ConfigError` for the first value below ``minimum``."""
    for flag, value in values.items():
        if value is not None and not minimum <= value < math.inf:
            bound = "be finite and not negative" if minimum == 0 else f"be at least {minimum}"
            raise ConfigError(f"{flag} {value} must {bound}.")


def require_positive(values: Values) -> None:
    """Raise :class:`ConfigError` for the first value that is not above zero."""
    for flag, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} {value} must be positive and finite.")


def require_fraction(values: Values) -> None:
    """Raise :class:`ConfigError` for the first value outside [0, 1)."""
    for flag, value in values.items():
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{flag} {value} must be at least 0 and below 1.")
