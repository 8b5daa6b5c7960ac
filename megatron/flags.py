"""Flags as fields of a dataclass: their names and values, and a refusal that the groups share."""

from collections.abc import Iterable
from typing import Any

from megatron.errors import ConfigError


def flag_of(name: str) -> str:
    """The flag of the field ``name``."""
    return "--" + name.replace("_", "-")


def words_of(name: str, value: Any) -> list[str]:
    """The words of the command line that set the field ``name`` to ``value``."""
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), *map(str, value if isinstance(value, tuple) else (value,))]


def values_of(group: Any, *names: str) -> dict[str, Any]:
    """Value by flag, of the fields ``names``."""
    return {flag_of(name): getattr(group, name) for name in names}


def changed_flags(group: Any, *names: str) -> list[str]:
    """The flags among the fields ``names`` that are not at their default, without their values."""
    values = {name: getattr(group, name) for name in names}
    defaults = type(group).__dataclass_fields__
    return [words_of(name, value)[0] for name, value in values.items() if value != defaults[name].default]


def changed_words(group: Any, *names: str) -> list[str]:
    """The words of the command line for the fields ``names``, by default all, that are not at their default."""
    wanted = names or tuple(type(group).__dataclass_fields__)
    return [
        word
        for name in wanted
        if changed_flags(group, name) and getattr(group, name) is not None
        for word in words_of(name, getattr(group, name))
    ]


def require_flag(needed: str, is_given: bool, dependent: Iterable[str]) -> None:
    """Raise :class:`ConfigError` for the ``dependent`` flags, unless the flag that they need is given."""
    dependent = tuple(dependent)
    if dependent and not is_given:
        raise ConfigError(*(f"{flag} needs {needed}: add it, or remove {flag}." for flag in dependent))
