#!/usr/bin/env python3
"""Write docs/flags.md, and the table of Megatron-LM's flags in docs/coming_from_megatron.md, from the code.

The dataclasses under megatron/config say which flags there are, megatron/config/megatron_flags.py which flags of
Megatron-LM are refused, and tools/megatron_lm_flags.csv which flags Megatron-LM has.
"""

import ast
import csv
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from megatron.config.compatibility import REFUSALS
from megatron.config.megatron_flags import NOT_SUPPORTED
from megatron.config.run import RunConfig
from megatron.errors import ConfigError, UserError
from megatron.flags import flag_of
from megatron.urls import refuse_urls

REPOSITORY = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- Begin: written by tools/flag_reference.py -->", "<!-- End: written by tools/flag_reference.py -->"

_HEAD = f"""{BEGIN}
# Flags

All flags of `pretrain_llama.py`, in the groups of `--help`. A flag with the values *on, off* has no value on the
command line: `--save-optim` turns it on, `--no-save-optim` off. Hyphens may be written as underscores. [Coming from
Megatron-LM](coming_from_megatron.md) compares the flags with Megatron-LM's.

`python tools/flag_reference.py` writes this page from the dataclasses in `megatron/config`.
"""


@dataclass(frozen=True)
class ReferenceConfig:
    """Whether to write or to compare the pages."""

    check: bool = False
    """Write nothing; fail if a page differs from the code."""
    docs: Path = REPOSITORY / "docs"
    """Directory of the pages."""


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


class MegatronFlag(NamedTuple):
    """One flag of Megatron-LM."""

    group: str
    flag: str
    default: str
    """For a flag that begins with ``--no-``, the default of its positive form."""
    choices: str
    """The possible values, if they are few, separated by spaces."""


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


def in_cell(text: str) -> str:
    """Text as Markdown for one cell of a table, flags as code."""
    text = re.sub(r"([|*<\\])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9])", r"`\1`", text)


def flag_page() -> str:
    """docs/flags.md."""
    groups, titles = get_type_hints(RunConfig), docstrings(RunConfig)
    parts = [_HEAD]
    for field in fields(RunConfig):
        rows = "\n".join(
            f"| `{flag.name}` | {in_cell(flag.values)} | {in_cell(flag.default)} | {in_cell(flag.help)} |"
            for flag in flags_of(groups[field.name])
        )
        title, purpose = titles[field.name].rstrip("."), in_cell((groups[field.name].__doc__ or "").strip())
        parts.append(f"## {title}\n\n{purpose}\n\n| flag | values | default | |\n| --- | --- | --- | --- |\n{rows}\n")
    return "\n".join(parts) + f"\n{END}\n"


def accepted_flags() -> dict[str, Flag]:
    """All flags by name."""
    return {flag.name: flag for group in get_type_hints(RunConfig).values() for flag in flags_of(group)}


def megatron_flags() -> list[MegatronFlag]:
    """The flags of Megatron-LM that a Llama recipe may use."""
    with open(REPOSITORY / "tools/megatron_lm_flags.csv", encoding="utf-8", newline="") as file:
        return [MegatronFlag(**row) for row in csv.DictReader(file)]


def ours(flag: str) -> str:
    """The flag without ``no-``."""
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


def answer(asked: MegatronFlag, accepted: dict[str, Flag]) -> str:
    """How this code handles a flag of Megatron-LM."""
    if asked.flag in NOT_SUPPORTED:
        return f"refused: {in_cell(NOT_SUPPORTED[asked.flag])}"
    flag = accepted.get(asked.flag) or accepted.get(ours(asked.flag))
    if flag is None:
        raise ConfigError(
            f"{asked.flag} of Megatron-LM is neither accepted nor refused: add a remedy to "
            "megatron/config/megatron_flags.py."
        )
    if flag.is_refused:
        return f"refused: {in_cell(flag.help.removeprefix('Refused: '))}"
    reason = REFUSALS.get(flag.name[2:].replace("-", "_"))
    if asked.flag.startswith("--no-") and reason and flag.default == "on":
        return f"refused, because {in_cell(reason)}"
    if "for now" in flag.help:
        return f"in part: {in_cell(flag.help)}"
    kind = "no effect" if flag.has_no_effect else "supported"
    choices, taken = asked.choices.split(), set(re.split(r"[,:]? ", flag.values))
    unlike = [choice for choice in choices if choice not in taken or f"{choice} is refused" in flag.help]
    default = [] if flag.default_in_words == asked.default else [f"default {in_cell(flag.default_in_words)}"]
    return "; ".join([kind, *default, *([f"not {', '.join(unlike)}"] if unlike else [])])


def megatron_table() -> str:
    """The generated part of docs/coming_from_megatron.md."""
    accepted, there = accepted_flags(), megatron_flags()
    parts = []
    for group, members in groupby(there, key=lambda flag: flag.group):
        rows = "\n".join(f"| `{m.flag}` | {in_cell(m.default)} | {answer(m, accepted)} |" for m in members)
        parts.append(f"### {group}\n\n| flag | default there | here |\n| --- | --- | --- |\n{rows}\n")
    known = {flag.flag for flag in there} | {ours(flag.flag) for flag in there}
    own = ", ".join(f"`{name}`" for name in accepted if name not in known)
    parts.append(f"### Not in Megatron-LM\n\n{own}.\n")
    return f"{BEGIN}\n" + "\n".join(parts) + f"\n{END}"


def pages(docs: Path) -> dict[Path, str]:
    """The content of each page."""
    guide = docs / "coming_from_megatron.md"
    before, _, rest = guide.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ConfigError(f"{guide} lacks the marks around the table: add {BEGIN} and {END}.")
    return {docs / "flags.md": flag_page(), guide: before + megatron_table() + after}


def write(config: ReferenceConfig) -> None:
    """Write the pages that differ from the code; under ``--check`` raise :class:`ConfigError` for one that differs."""
    refuse_urls({"--docs": config.docs}, "name a directory")
    for path, content in pages(config.docs).items():
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        if config.check:
            raise ConfigError(f"{path} differs from the code: run python tools/flag_reference.py.")
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path}")


def main() -> int:
    """Run the tool; returns the exit status."""
    try:
        write(tyro.cli(ReferenceConfig, description=__doc__))
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
