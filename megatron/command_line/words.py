"""The words of a command line: flags with the words after them, and values from words."""

import difflib
import re
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from megatron.errors import ConfigError

COMMAND_LINE = "the command line"


class Given(NamedTuple):
    """A flag that is given, with the words after it."""

    flag: str
    """The name with hyphens; empty for the words before the first flag."""
    values: tuple[str, ...]
    origin: str = COMMAND_LINE
    """Where it stands."""

    @property
    def words(self) -> list[str]:
        """The words that are split into this flag."""
        # A value that begins with a hyphen must not be taken for a flag.
        if len(self.values) == 1 and _begins_flag(self.values[0]):
            return [f"{self.flag}={self.values[0]}"]
        return [self.flag, *self.values] if self.flag else list(self.values)

    @property
    def as_typed(self) -> str:
        return " ".join([self.flag, *self.values])


def split_words(arguments: Iterable[str], origin: str = COMMAND_LINE) -> list[Given]:
    """The flags in ``arguments`` in order. A word that begins with a hyphen and is no number begins a flag."""
    flag, values = "", list[str]()
    found = []
    for word in arguments:
        if not _begins_flag(word):
            values.append(word)
            continue
        found.append(Given(flag, tuple(values), origin))
        name, has_value, value = word.partition("=")
        flag, values = name.replace("_", "-"), [value] if has_value else []
    found.append(Given(flag, tuple(values), origin))
    return [given for given in found if given.flag or given.values]


def _begins_flag(word: str) -> bool:
    # -1 and -inf are values.
    return bool(re.match(r"--|-[A-Za-z]", word)) and not re.fullmatch(r"-(inf|nan)", word)


def most_values(kind: Any) -> float:
    """The number of words that a flag of the type ``kind`` takes at most."""
    if kind is bool:
        return 0
    kind = _without_none(kind)
    if get_origin(kind) is not tuple:
        return 1
    return inf if get_args(kind)[-1] is Ellipsis else len(get_args(kind))


def _without_none(kind: Any) -> Any:
    """The type of the value that is given for an optional one."""
    parts = [part for part in get_args(kind) if part is not NoneType]
    return parts[0] if NoneType in get_args(kind) else kind


def value_of(flag: str, kind: Any, words: Sequence[str]) -> Any:
    """The value of a flag of the type ``kind``, which is no switch, from the words after it.

    Raises :class:`ConfigError` for words that this flag does not take.
    """
    if NoneType in get_args(kind) and list(words) == ["None"]:
        return None
    kind = _without_none(kind)
    if get_origin(kind) is not tuple:
        if not words:
            raise ConfigError(f"{flag} has no value: add {example(kind)} after it.")
        if len(words) > 1:
            raise ConfigError(surplus(words[1]))
        return _scalar(flag, kind, words[0])
    kinds = get_args(kind)
    if kinds[-1] is Ellipsis:
        return tuple(_scalar(flag, kinds[0], word) for word in words)
    if len(words) > len(kinds):
        raise ConfigError(surplus(words[len(kinds)]))
    if len(words) < len(kinds):
        raise ConfigError(f"{flag} needs {len(kinds)} values, not {len(words)}: add {example(kinds[0])} for each.")
    return tuple(_scalar(flag, part, word) for part, word in zip(kinds, words, strict=True))


def surplus(word: str) -> str:
    """The sentence about a word that belongs to no flag."""
    return f"{word!r} is not a value of any flag: remove it, or check the number of values of the flag before it."


def _scalar(flag: str, kind: Any, word: str) -> Any:
    if get_origin(kind) is Literal:
        return _choice(flag, get_args(kind), word)
    if kind is bool:
        return _choice(flag, ("True", "False"), word) == "True"
    if kind is int:
        return _whole_number(flag, word)
    if kind is float:
        try:
            return float(word)
        except ValueError:
            raise ConfigError(f"{flag} needs a number, not {word!r}: write one such as 3e-4.") from None
    return Path(word) if kind is Path else word


# What other programs call a value.
_VALUE_SYNONYMS = {("--optimizer", "adamw"): "adam, whose weight decay is decoupled as AdamW's"}


def _choice(flag: str, choices: Sequence[Any], word: str) -> Any:
    for choice in choices:
        if str(choice) == word:
            return choice
    by_name = {str(choice).lower(): str(choice) for choice in choices}
    nearest = difflib.get_close_matches(word.lower(), by_name, 1, 0.75)
    meant = _VALUE_SYNONYMS.get((flag, word.lower())) or (by_name[nearest[0]] if nearest else None)
    raise ConfigError(
        f"{flag} {word!r} is unknown: " + (f"did you mean {meant}?" if meant else f"use {one_of(choices)}.")
    )


def one_of(choices: Sequence[Any]) -> str:
    """The choices in words: "a, b or c"."""
    names = [str(choice) for choice in choices]
    return " or ".join([*([", ".join(names[:-1])] if names[:-1] else []), names[-1]])


_UNITS = {"k": 1024, "K": 1024, "m": 2**20, "M": 2**20}


def _whole_number(flag: str, word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        pass
    else:
        if abs(number) < 2**63:
            return number
        raise ConfigError(f"{flag} {word} is too large: use a number below 2^63.")
    # 8k, 1M and 1e6 are common, and ambiguous: the message has the number in digits.
    remedy = "write it in digits"
    if suffixed := re.fullmatch(r"(\d+)([kKmM])", word):
        remedy = f"write {int(suffixed[1]) * _UNITS[suffixed[2]]}"
    elif re.fullmatch(r"[\d.]+(e\+?\d+)?", word, re.IGNORECASE) and word.count(".") < 2 and float(word).is_integer():
        remedy = f"write {int(float(word))}"
    raise ConfigError(f"{flag} needs a whole number, not {word!r}: {remedy}.")


def example(kind: Any) -> str:
    """A value of the type ``kind`` in words."""
    if get_origin(kind) is Literal:
        return one_of(get_args(kind))
    return {int: "a whole number", float: "a number", bool: "True or False"}.get(kind, "one")
