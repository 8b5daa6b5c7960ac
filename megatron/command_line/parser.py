"""The parser of a command line: flags to a dataclass, and everything that is wrong with them at once.

argparse, and what is built on it (tyro, jsonargparse), stops at the first mistake, and cannot say what a flag of
another program is called here.
"""

import difflib
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron.command_line.flag import Flag, commands_help, flags_of, groups_of, tool_help
from megatron.command_line.words import Given, example, most_values, one_of, split_words, surplus, value_of
from megatron.errors import ConfigError

C = TypeVar("C")


@dataclass
class Values:
    """The values of flags, by field, and what is wrong with the others."""

    of_field: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    """What sets a field."""
    mistakes: list[ConfigError] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    """Fields whose flag has a mistake."""


class Parser(Generic[C]):
    """The flags of the dataclass ``config``, in ``program``, whose name stands in messages."""

    def __init__(self, config: type[C], program: str, synonyms: Mapping[str, str] | None = None) -> None:
        self.config, self.program, self.synonyms = config, program, synonyms or {}

    @cached_property
    def flags(self) -> dict[str, Flag]:
        """Every flag by name, aliases among them."""
        return {
            name: flag
            for flag in flags_of(self.config)
            for name in (flag.name, *flag.argument.aliases)
            if not flag.argument.is_positional
        }

    @cached_property
    def spellings(self) -> Collection[str]:
        """Every flag, and the ``--no-`` forms."""
        return [*self.flags, *(f"--no-{name[2:]}" for name, flag in self.flags.items() if flag.is_switch)]

    def find(self, spelling: str) -> tuple[Flag, bool] | None:
        """A flag, and whether it is spelled in its positive form."""
        if spelling in self.flags:
            return self.flags[spelling], True
        positive = self.flags.get(f"--{spelling.removeprefix('--no-')}") if spelling.startswith("--no-") else None
        return None if positive is None or not positive.is_switch else (positive, False)

    def suggestion(self, flag: str) -> str:
        """What to write instead of the unknown ``flag``."""
        synonym = self.synonyms.get(flag.lstrip("-"))
        nearest = [synonym] if synonym else difflib.get_close_matches(f"--{flag.lstrip('-')}", self.spellings, 1, 0.7)
        return f"did you mean {nearest[0]}?" if nearest else "see --help."

    def unknown(self, given: Given) -> ConfigError:
        """The error for a flag that this program does not have."""
        return ConfigError(f"{given.flag} is not a flag of {self.program}: {self.suggestion(given.flag)}")

    def value(self, flag: Flag, name: str, words: Sequence[str]) -> Any:
        """The value of ``flag``, which is no switch, given as ``name``."""
        return value_of(name, flag.kind, words)

    def read(self, given: Iterable[Given]) -> Values:
        """The values of all flags in ``given``; the last one counts."""
        values, loose = Values(), list[str]()
        takes_loose = any(flag.argument.is_positional for flag in flags_of(self.config))
        for one in given:
            found = self.find(one.flag)
            try:
                if found is None:
                    if one.flag or not takes_loose:
                        raise self._unknown(one)
                    loose += one.values
                    continue
                flag, is_positive = found
                words = one.values or tuple(filter(None, [flag.argument.alone]))
                if takes_loose and len(words) > most_values(flag.kind):
                    most = int(most_values(flag.kind))
                    loose += words[most:]
                    words = words[:most]
                values.of_field[flag.field.name] = (
                    self._switch(one, words, is_positive) if flag.is_switch else self.value(flag, one.flag, words)
                )
                values.given[flag.field.name] = one
            except ConfigError as error:
                values.mistakes.append(error)
                values.wrong |= {found[0].field.name} if found else set()
        if takes_loose:
            self._place(loose, values)
        return values

    def _place(self, loose: list[str], values: Values) -> None:
        """Give the words without a flag to the fields that take them, in order."""
        for flag in flags_of(self.config):
            if flag.argument.is_positional and loose:
                words = [loose.pop(0) for _ in range(int(min(most_values(flag.kind), len(loose))))]
                values.of_field[flag.field.name] = self.value(flag, flag.name, words)
        values.mistakes += [ConfigError(surplus(word)) for word in loose]

    def _unknown(self, given: Given) -> ConfigError:
        if not given.flag:  # words before the first flag
            return ConfigError(*map(surplus, given.values))
        if " " in given.flag:
            return ConfigError(f"{given.flag!r} is one word with a blank: write two words, or take the quotes away.")
        return self.unknown(given)

    def _switch(self, given: Given, words: Sequence[str], is_positive: bool) -> bool:
        """Whether a switch is on; ``--bf16 true`` and the like have a remedy of their own."""
        if not words:
            return is_positive
        switched = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        wanted = switched.get(words[0].lower())
        if wanted is None or len(words) > 1:
            raise ConfigError(surplus(words[0]))
        flag = given.flag if is_positive else f"--{given.flag.removeprefix('--no-')}"
        spelling = flag if wanted is is_positive else f"--no-{flag[2:]}"
        raise ConfigError(f"{given.flag} {words[0]} has a value, which a switch does not take: write {spelling}.")

    def build(self, values: Values, default: C | None = None) -> C:
        """Build the dataclass from ``values``; a field without a value keeps that of ``default``.

        Raises :class:`ConfigError` with all mistakes, and all flags that are missing.
        """
        missing = []
        for flag in flags_of(self.config):
            if default is None and flag.is_required and flag.field.name not in {*values.of_field, *values.wrong}:
                value = "a value" if example(flag.kind) == "one" else example(flag.kind)
                remedy = "add it" if flag.argument.is_positional else f"add it with {value}"
                missing.append(ConfigError(f"{flag.name} is missing: {remedy}."))
        if values.mistakes or missing:
            raise ConfigError.of([*values.mistakes, *missing])
        return build(self.config, values.of_field, default)


def values_by_field(config: Any) -> dict[str, Any]:
    """Value by field of a dataclass of flags, including its groups."""
    values: dict[str, Any] = {}
    for one in fields(config):
        value = getattr(config, one.name)
        values |= values_by_field(value) if is_dataclass(value) else {one.name: value}
    return values


def changed_values(config: Any, default: Any) -> dict[str, Any]:
    """The values by field in which a dataclass of flags differs from ``default``."""
    theirs = values_by_field(default)
    return {name: value for name, value in values_by_field(config).items() if value != theirs[name]}


def build(config: type[C], values: Mapping[str, Any], default: C | None) -> C:
    """The dataclass with ``values`` by field, in its groups, too; otherwise the values of ``default``."""
    groups, found = groups_of(config), dict[str, Any]()
    for one in fields(config):  # type: ignore[arg-type]
        known = None if default is None else getattr(default, one.name)
        if one.name in groups:
            found[one.name] = build(groups[one.name], values, known)
        elif one.name in values:
            found[one.name] = values[one.name]
        elif default is not None:
            found[one.name] = known
    return config(**found)


def parse(
    config: type[C],
    description: str | None,
    arguments: Sequence[str] | None = None,
    default: C | None = None,
    *,
    program: str | None = None,
    print_messages: bool = True,
) -> C:
    """Parse the flags of ``program`` from ``arguments`` (default: ``sys.argv[1:]``).

    On ``--help`` prints the help, if ``print_messages`` (true on one rank), and raises :class:`SystemExit`. Raises
    :class:`ConfigError` with all mistakes.
    """
    parser = Parser(config, program or _program())
    given = _split(parser, description, arguments, print_messages)
    return parser.build(parser.read(given), default)


def parse_known(
    config: type[C], description: str | None, arguments: Sequence[str] | None = None, *, print_messages: bool = True
) -> tuple[C, list[Given]]:
    """:func:`parse`, and the flags that are not those of ``config``."""
    parser = Parser(config, _program())
    given = _split(parser, description, arguments, print_messages)
    rest = [one for one in given if parser.find(one.flag) is None]
    return parser.build(parser.read(one for one in given if one not in rest)), rest


def parse_command(commands: Mapping[str, type[Any]], description: str, arguments: Sequence[str] | None = None) -> Any:
    """The flags of the command that is the first word: a dataclass of ``commands``, by name."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    names, word = one_of(list(commands)), words[0] if words else ""
    if word in _HELP:
        summaries = {name: (kind.__doc__ or "").partition("\n\n")[0] for name, kind in commands.items()}
        print(commands_help(summaries, description, _program()), flush=True)
        raise SystemExit(0)
    if word not in commands:
        nearest = difflib.get_close_matches(word, commands, 1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"begin with {names}."
        raise ConfigError(f"{word or 'The first word'} is {'no command' if word else 'missing'}: {remedy}")
    return parse(commands[word], inspect.getdoc(commands[word]), words[1:], program=f"{_program()} {word}")


_HELP = ("--help", "-h")


def _split(
    parser: Parser[Any], description: str | None, arguments: Sequence[str] | None, print_messages: bool
) -> list[Given]:
    given = split_words(sys.argv[1:] if arguments is None else arguments)
    if any(one.flag in _HELP for one in given):
        if print_messages:
            print(tool_help(parser.config, description or "", parser.program), flush=True)
        raise SystemExit(0)
    return given


def _program() -> str:
    """The name that stands in messages."""
    return Path(sys.argv[0]).name
