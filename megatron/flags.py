"""Flags as fields of a dataclass: their names and values, and a refusal that the groups share."""

from collections.abc import Iterable
from typing import Any

from megatron.errors import ConfigError


def flag_of(name: str) -> str:
    """The flag of the field ``name``."""
    return "--" + name.replace("_", "-")


def values_of(group: Any, *names: str) -> dict[str, Any]:
    """Value by flag, of the fields ``names``."""
    return {flag_of(name): getattr(group, name) for name in names}


def changed_flags(group: Any, *names: str) -> list[str]:
    """The flags among the fields ``names`` that are not at their default; ``--no-NAME`` for a switch turned off."""
    changed = [name for name in names if getattr(group, name) != type(group).__dataclass_fields__[name].default]
    return [flag_of(f"no_{name}" if getattr(group, name) is False else name) for name in changed]


def require_flag(needed: str, is_given: bool, dependent: Iterable[str]) -> None:
    """Raise :class:`ConfigError` for the first ``dependent`` flag, unless the flag that it needs is given."""
    if not is_given:
        for flag in dependent:
            raise ConfigError(f"{flag} needs {needed}: add it, or remove {flag}.")
