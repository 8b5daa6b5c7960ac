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

from megatron.config.errors import ConfigError, UserError
from megatron.config.megatron_flags import NOT_SUPPORTED
from megatron.config.run import RunConfig

REPOSITORY = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- Begin: written by tools/flag_reference.py -->", "<!-- End: written by tools/flag_reference.py -->"

_HEAD = f"""{BEGIN}
# Flags

All flags of `pretrain_llama.py`, in the groups of `--help`. A flag of which the values are *on, off* takes none: it is
turned on by its name, and off by its name with `no-` in front (`--save-optim`, `--no-save-optim`). Underscores may
stand for hyphens. What Megatron-LM has, and what differs: [coming from Megatron-LM](coming_from_megatron.md).

This page is written by `python tools/flag_reference.py` from the dataclasses in `megatron/config`.
"""


@dataclass(frozen=True)
class ReferenceConfig:
    """What to do with the pages."""

    check: bool = False
    """Write nothing; fail where a page is not what the code says."""
    docs: Path = REPOSITORY / "docs"
    """Directory of the pages."""


class Flag(NamedTuple):
    """One flag of ``pretrain_llama.py``."""

    name: str
    values: str
    default: str
    """Empty where nothing is given unless the user does."""
    help: str

    @property
    def default_in_words(self) -> str:
        """The default, or what its help says of it where nothing is given."""
        described = re.search(r"\(default[^:()]*: ([^()]*)\)|(\w+) \(default\)", self.help)
        return self.default or (described[1] or described[2] if described else "none")

    @property
    def states_what_is_so(self) -> bool:
        """Whether it can only say what is so anyway."""
        return self.help.startswith("States what") or "accepted for megatron-lm recipes" in self.help.lower()


class MegatronFlag(NamedTuple):
    """One flag of Megatron-LM."""

    group: str
    flag: str
    default: str
    """That of the feature, for a flag that begins with ``--no-``."""
    choices: str
    """The values it may have, where they are few, with blanks between."""


def docstrings(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, in one line."""
    definition = ast.parse(dedent(inspect.getsource(config))).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def flags_of(config: type) -> Iterator[Flag]:
    """The flags of a group, in order."""
    kinds, help_texts = get_type_hints(config), docstrings(config)
    for field in fields(config):
        name = "--" + field.name.replace("_", "-")
        yield Flag(name, describe_values(kinds[field.name]), describe_default(field.default), help_texts[field.name])


def describe_values(kind: Any) -> str:
    """What a flag of this type takes."""
    names = {bool: "on, off", int: "integer", float: "number", str: "text"}
    if kind in names:
        return names[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(map(str, arguments))
    if get_origin(kind) in (UnionType, Union):
        # One that is neither on nor off unless it is given takes its value as a word.
        parts = [part for part in arguments if part is not NoneType]
        return "True, False" if bool in parts else " or ".join(map(describe_values, parts))
    assert get_origin(kind) is tuple, kind
    if arguments[-1] is Ellipsis:
        return f"one or more: {describe_values(arguments[0])}"
    return " ".join(map(describe_values, arguments))


def describe_default(value: Any) -> str:
    """A default as a person would type it; empty for none."""
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
    """Every flag by its name."""
    return {flag.name: flag for group in get_type_hints(RunConfig).values() for flag in flags_of(group)}


def megatron_flags() -> list[MegatronFlag]:
    """The flags that Megatron-LM has, as far as a Llama recipe may use them."""
    with open(REPOSITORY / "tools/megatron_lm_flags.csv", encoding="utf-8", newline="") as file:
        return [MegatronFlag(**row) for row in csv.DictReader(file)]


def ours(flag: str) -> str:
    """The name of the field whose negative form a ``--no-`` flag is; any other flag itself."""
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


def answer(asked: MegatronFlag, accepted: dict[str, Flag]) -> str:
    """What becomes of a flag of Megatron-LM here."""
    if asked.flag in NOT_SUPPORTED:
        return f"refused: {in_cell(NOT_SUPPORTED[asked.flag])}"
    flag = accepted.get(asked.flag) or accepted.get(ours(asked.flag))
    if flag is None:
        raise ConfigError(
            f"{asked.flag} of Megatron-LM is neither a flag here nor refused: give it a remedy in "
            "megatron/config/megatron_flags.py."
        )
    if "for now" in flag.help:
        return f"in part: {in_cell(flag.help)}"
    kind = "states what is so" if flag.states_what_is_so else "supported"
    missing = set(asked.choices.split()) - set(re.split(r"[,:]? ", flag.values))
    unlike = [choice for choice in asked.choices.split() if choice in missing]
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
    parts.append(f"### Only here\n\nMegatron-LM does not have {own}.\n")
    return f"{BEGIN}\n" + "\n".join(parts) + f"\n{END}"


def pages(docs: Path) -> dict[Path, str]:
    """What each page should hold."""
    guide = docs / "coming_from_megatron.md"
    before, _, rest = guide.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ConfigError(f"{guide} has lost the marks between which the table stands: put {BEGIN} and {END} back.")
    return {docs / "flags.md": flag_page(), guide: before + megatron_table() + after}


def write(config: ReferenceConfig) -> None:
    """Write the pages that differ from the code, or raise :class:`ConfigError` for one that does."""
    for path, content in pages(config.docs).items():
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        if config.check:
            raise ConfigError(f"{path} is not what the code says: run python tools/flag_reference.py.")
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
