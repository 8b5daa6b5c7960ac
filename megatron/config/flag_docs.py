"""What is known about every flag: its values and its default in words, and its help, which is its docstring."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from textwrap import dedent
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron.flags import flag_of


class Flag(NamedTuple):
    """One flag of ``pretrain_llama.py``."""

    name: str
    values: str
    default: str
    """Empty for None."""
    help: str

    @property
    def default_in_words(self) -> str:
        """The default; for None the default that the help describes."""
        described = re.search(r"\(default[^:()]*: ([^()]*)\)|(\w+) \(default\)", self.help)
        return self.default or (described[1] or described[2] if described else "none")

    @property
    def has_no_effect(self) -> bool:
        """Whether it is accepted only for compatibility."""
        return self.help.startswith("Accepted for Megatron-LM compatibility")

    @property
    def is_refused(self) -> bool:
        """Whether it exists only to be refused with a reason."""
        return self.help.startswith("Refused")


def docstrings(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of its base classes, in one line."""
    found: dict[str, str] = {}
    for kind in config.__mro__:
        if "__dataclass_fields__" not in vars(kind):
            continue
        definition = ast.parse(dedent(inspect.getsource(kind))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def help_texts_of(config: type) -> dict[str, str]:
    """The help of every flag of a group: its docstring, or computed text in ``tyro.conf.arg``."""
    hints = get_type_hints(config, include_extras=True)
    computed = {name: part.help for name, hint in hints.items() for part in getattr(hint, "__metadata__", ())}
    return docstrings(config) | computed


def flags_of(config: type) -> Iterator[Flag]:
    """The flags of a group, in order."""
    kinds, help_texts = get_type_hints(config), help_texts_of(config)
    for field in fields(config):
        values, default = describe_values(kinds[field.name]), describe_default(field.default)
        yield Flag(flag_of(field.name), values, default, help_texts[field.name])


def describe_values(kind: Any) -> str:
    """The values of a flag of this type in words."""
    names = {bool: "on, off", int: "integer", float: "number", str: "text"}
    if kind in names:
        return names[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(map(str, arguments))
    if get_origin(kind) in (UnionType, Union):
        # tyro reads an optional boolean from a word.
        parts = [part for part in arguments if part is not NoneType]
        return "True, False" if bool in parts else " or ".join(map(describe_values, parts))
    assert get_origin(kind) is tuple, kind
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
