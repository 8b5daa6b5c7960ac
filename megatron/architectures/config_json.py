"""Values of ``config.json``, checked. Each function raises ``ValueError`` without the final period."""

import math
from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
"""The content of ``config.json``."""


def size(fields: Fields, name: str, default: int | None = None) -> int:
    """A positive integer."""
    value = _present(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a positive number: correct the file")
    return value


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """A finite number that is not negative."""
    value = _present(fields, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, not a number: correct the file")
    return float(value)


def flag(fields: Fields, name: str, default: bool) -> bool:
    """A boolean."""
    value = _present(fields, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not a boolean: correct the file")
    return value


def _present(fields: Fields, name: str, default: float | bool | None) -> Any:
    value = default if fields.get(name) is None else fields[name]
    if value is None:
        raise ValueError(f"{name} is missing: correct the file")
    return value
