#!/usr/bin/env python3
"""Write docs/flags.md, and the table of Megatron-LM's flags in docs/coming_from_megatron.md, from the code.

The dataclasses under megatron/config say which flags there are, megatron/config/megatron_lm.py which flags of
Megatron-LM are refused, and docs/megatron_lm_flags.csv which flags of Megatron-LM a Llama recipe may use.
"""

import csv
import re
import sys
from collections.abc import Container
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command_line.flag import Flag, docstrings, flags_of
from megatron.commands.tool import run_tool
from megatron.config.compatibility import REFUSALS
from megatron.config.megatron_lm import NO_EFFECT, REFUSED, remedy_of
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.urls import refuse_urls

REPOSITORY = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- Begin: written by docs/flag_pages.py -->", "<!-- End: written by docs/flag_pages.py -->"

_HEAD = f"""{BEGIN}
# Flags

All flags of `pretrain_llama.py`, in the groups of `--help`. A flag with the values *on, off* has no value on the
command line: `--save-optim` turns it on, `--no-save-optim` off. Hyphens may be written as underscores. [Coming from
Megatron-LM](coming_from_megatron.md) compares the flags with Megatron-LM's.

`python docs/flag_pages.py` writes this page from the dataclasses in `megatron/config`.
"""


@dataclass(frozen=True)
class ReferenceConfig:
    """Whether to write or to compare the pages."""

    check: bool = False
    """Write nothing; fail if a page differs from the code."""
    docs: Path = REPOSITORY / "docs"
    """Directory of the pages."""


class MegatronFlag(NamedTuple):
    """One flag of Megatron-LM."""

    group: str
    flag: str
    default: str  # of a flag that begins with --no-: the default of its positive form
    choices: str  # the possible values, if they are few, separated by spaces


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
    return {flag.name: flag for group in get_type_hints(RunConfig).values() for flag in flags_of(group)}


def megatron_flags() -> list[MegatronFlag]:
    """The flags of Megatron-LM that a Llama recipe may use."""
    with open(REPOSITORY / "docs/megatron_lm_flags.csv", encoding="utf-8", newline="") as file:
        return [MegatronFlag(**row) for row in csv.DictReader(file)]


def ours(flag: str) -> str:
    """The flag without ``no-``."""
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


def answer(asked: MegatronFlag, accepted: dict[str, Flag]) -> str:
    """The cell about a flag of Megatron-LM: refused, without effect, or supported, and what differs."""
    if asked.flag in NO_EFFECT:
        return f"no effect: {in_cell(NO_EFFECT[asked.flag].reason)}"
    flag = accepted.get(asked.flag) or accepted.get(ours(asked.flag))
    remedy = remedy_of(asked.flag)
    if flag is None and remedy is not None:
        return f"refused: {in_cell(remedy)}"
    if flag is None:
        raise ConfigError(
            f"{asked.flag} of Megatron-LM is neither accepted nor refused: add a reason or a remedy to "
            "megatron/config/megatron_lm.py."
        )
    if flag.help.startswith("Refused"):
        return f"refused: {in_cell(flag.help.removeprefix('Refused: '))}"
    reason = REFUSALS.get(flag.field.name)
    if asked.flag.startswith("--no-") and reason and flag.default == "on":
        return f"refused, because {in_cell(reason)}"
    if "for now" in flag.help:
        return f"in part: {in_cell(flag.help)}"
    kind = "no effect" if flag.has_no_effect else "supported"
    choices, taken = asked.choices.split(), set(re.split(r"[,:]? ", flag.values))
    unlike = [choice for choice in choices if choice not in taken or f"{choice} is refused" in flag.help]
    # For None the default that the help describes.
    described = re.search(r"\(default[^:()]*: ([^()]*)\)|(\w+) \(default\)", flag.help)
    default = flag.default or (described[1] or described[2] if described else "none")
    differs = [] if default == asked.default else [f"default {in_cell(default)}"]
    return "; ".join([kind, *differs, *([f"not {', '.join(unlike)}"] if unlike else [])])


def megatron_table() -> str:
    """The generated part of docs/coming_from_megatron.md."""
    accepted, there = accepted_flags(), megatron_flags()
    parts = []
    for group, members in groupby(there, key=lambda flag: flag.group):
        rows = "\n".join(f"| `{m.flag}` | {in_cell(m.default)} | {answer(m, accepted)} |" for m in members)
        parts.append(f"### {group}\n\n| flag | default there | here |\n| --- | --- | --- |\n{rows}\n")
    parts.append(_other_flags({flag.flag for flag in there}))
    known = {flag.flag for flag in there} | {ours(flag.flag) for flag in there}
    own = ", ".join(f"`{name}`" for name in accepted if name not in known)
    parts.append(f"### Not in Megatron-LM\n\n{own}.\n")
    return f"{BEGIN}\n" + "\n".join(parts) + f"\n{END}"


def _other_flags(listed: Container[str]) -> str:
    """The table of all further flags of Megatron-LM, by what becomes of them."""
    idle: dict[str, list[str]] = {}
    for flag, found in NO_EFFECT.items():
        if flag not in listed:
            idle.setdefault(found.reason, []).append(flag)
    rows = [(flags, f"no effect: {in_cell(reason)}") for reason, flags in idle.items()]
    for remedy, patterns in REFUSED.items():
        rows.append(([one for one in patterns.split() if one not in listed], f"refused: {in_cell(remedy)}"))
    lines = [f"| {', '.join(f'`{flag}`' for flag in flags)} | {answer} |" for flags, answer in rows if flags]
    return "\n".join(["### Other models, other purposes, machinery\n", "| flags | here |", "| --- | --- |", *lines, ""])


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
            raise ConfigError(f"{path} differs from the code: run python docs/flag_pages.py.")
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path}")


main = partial(run_tool, ReferenceConfig, write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
