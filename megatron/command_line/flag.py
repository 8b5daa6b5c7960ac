"""A flag: a field of a dataclass with its type, its default and its docstring as help; the text of ``--help``."""

import ast
import inspect
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from textwrap import dedent, fill
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron.flags import Argument, flag_of

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """A flag of a command line."""

    owner: type
    """The dataclass that has the field."""
    field: Field[Any]
    kind: Any
    argument: Argument
    """In what it is unlike a flag with the name of the field."""

    @property
    def name(self) -> str:
        """``--tensor-model-parallel-size``; of a word without a flag its name, such as ``RUN``."""
        return self.field.name.upper() if self.argument.is_positional else flag_of(self.field.name)

    @property
    def is_switch(self) -> bool:
        """Whether the flag has no value, and a ``--no-`` form."""
        return self.kind is bool

    @property
    def is_required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @property
    def help(self) -> str:
        return self.argument.help or docstrings(self.owner).get(self.field.name, "")

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        return re.split(r"(?<=\.) ", self.help)[0]

    @property
    def values(self) -> str:
        """Its values in words."""
        return describe_values(self.kind)

    @property
    def default(self) -> str:
        """The default as it is typed on the command line; empty for none."""
        return "" if self.field.default is MISSING else describe_default(self.field.default)

    @property
    def usage(self) -> str:
        """The flag with its values, as it is typed."""
        if self.is_switch or self.argument.is_positional:
            return self.name
        values = self.values.removeprefix("one or more: ")
        is_list = values != self.values
        if set(values.split()) <= {"integer", "number", "text", "path"}:
            values = values.upper()
        values = f"{values.replace(', ', '|')}{' ...' if is_list else ''}"
        return f"{self.name} [{values}]" if self.argument.alone else f"{self.name} {values}"

    @property
    def has_no_effect(self) -> bool:
        """Whether it is accepted only for compatibility."""
        return self.help.startswith("Accepted for Megatron-LM")


def cached(function: Callable[[type], T]) -> Callable[[type], T]:
    """``functools.cache``: to mypy, a ``type[C]`` is not hashable."""
    return cache(function)


@cached
def flags_of(config: type) -> tuple[Flag, ...]:
    """The flags of a dataclass in order. A field that is a dataclass is a group, whose flags stand among the others."""
    found: list[Flag] = []
    groups, hints = groups_of(config), get_type_hints(config, include_extras=True)
    kinds = get_type_hints(config)
    for field in fields(config):
        if field.name in groups:
            found += flags_of(groups[field.name])
            continue
        arguments = [one for one in getattr(hints[field.name], "__metadata__", ()) if isinstance(one, Argument)]
        found.append(Flag(config, field, kinds[field.name], *arguments or [Argument()]))
    return tuple(found)


@cached
def groups_of(config: type) -> dict[str, type]:
    """The groups among the fields of a dataclass."""
    return {
        name: kind for name, kind in get_type_hints(config).items() if isinstance(kind, type) and is_dataclass(kind)
    }


@cached
def docstrings(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of its base classes, in one line."""
    found: dict[str, str] = {}
    for kind in config.__mro__:
        if "__dataclass_fields__" not in vars(kind):
            continue
        definition = ast.parse(dedent(inspect.getsource(kind))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(following, ast.Expr):
                continue
            if isinstance(statement.target, ast.Name) and isinstance(following.value, ast.Constant):
                found.setdefault(statement.target.id, " ".join(str(following.value.value).split()))
    return found


def describe_values(kind: Any) -> str:
    """The values of a flag of this type in words."""
    names = {bool: "on, off", int: "integer", float: "number", str: "text"}
    if kind in names:
        return names[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(map(str, arguments))
    if get_origin(kind) in (UnionType, Union):
        # An optional boolean is read from a word.
        parts = [part for part in arguments if part is not NoneType]
        return "True, False" if bool in parts else " or ".join(map(describe_values, parts))
    if get_origin(kind) is not tuple:
        return "path"
    if arguments[-1] is Ellipsis:
        return f"one or more: {describe_values(arguments[0])}"
    return " ".join(map(describe_values, arguments))


def describe_default(value: Any) -> str:
    """A default as it is typed on the command line; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    # 500000.0 and 4294967296.0 are easier to read without their fraction.
    return str(int(value)) if isinstance(value, float) and value == int(value) and value >= 10 else str(value)


# --- help ----------------------------------------------------------------------------------------------------


def terminal_width() -> int:
    """Columns of the help."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def tool_help(config: type[Any], description: str, program: str) -> str:
    """The help of a program: what it does, and its flags."""
    words = [flag.name for flag in flags_of(config) if flag.argument.is_positional]
    lines = [f"usage: {' '.join([program, *words, '[FLAGS]'])}", "", description.strip(), ""]
    titles, groups = docstrings(config), groups_of(config)
    inside = {flag for kind in groups.values() for flag in flags_of(kind)}
    lines += [flag_help(flag) for flag in flags_of(config) if flag not in inside]
    for name, kind in groups.items():
        lines += ["", group_help(titles.get(name) or f"{name.replace('_', ' ').capitalize()}.", kind)]
    return "\n".join(lines)


def group_help(title: str, kind: type) -> str:
    """A title, and below it the flags of a group."""
    return "\n".join([fill(title, terminal_width()), *map(flag_help, flags_of(kind))])


def commands_help(summaries: Mapping[str, str], description: str, program: str) -> str:
    """The help of a program whose first word is a command."""
    lines = [f"usage: {program} COMMAND [FLAGS]", "", description.strip(), "", "commands:"]
    left = max(map(len, summaries)) + 2
    for name, summary in summaries.items():
        lines += two_columns(name, " ".join(summary.split()), left)
    return "\n".join([*lines, "", f"{program} COMMAND --help shows the flags of a command."])


def two_columns(name: str, text: str, left: int) -> list[str]:
    """A name, and beside it a text."""
    width, hanging = terminal_width(), " " * (left + 2)
    if len(name) > left - 2:
        return [f"  {name}", fill(text, width, initial_indent=hanging, subsequent_indent=hanging)]
    return fill(f"  {name:{left}}{text}", width, subsequent_indent=hanging, break_on_hyphens=False).split("\n")


def flag_help(flag: Flag) -> str:
    """A flag with its values, and below it what it does."""
    described = flag.help if not flag.default else f"{flag.help} (default: {flag.default})"
    if flag.is_switch and flag.default == "on":
        described = f"{flag.help} (default: on; --no-{flag.name[2:]} turns it off)"
    if flag.is_required:
        described = f"{flag.help} (required)"
    width, indent = terminal_width(), " " * 6
    text = fill(described.strip(), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {flag.usage}\n{text}"
