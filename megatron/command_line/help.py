"""The text of ``--help``."""

import re
import shutil
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from megatron.command_line.flag import Flag, docstrings, flags_of, groups_of


def terminal_width() -> int:
    """Columns of the help."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def tool_help(config: type[Any], description: str, program: str) -> str:
    """The help of a program: what it does, and its flags."""
    width = terminal_width()
    words = [flag.name for flag in flags_of(config) if flag.argument.is_positional]
    lines = [f"usage: {' '.join([program, *words, '[FLAGS]'])}", "", description.strip(), ""]
    titles, groups = docstrings(config), groups_of(config)
    inside = {flag for kind in groups.values() for flag in flags_of(kind)}
    lines += [flag_help(flag, width) for flag in flags_of(config) if flag not in inside]
    for name, kind in groups.items():
        title = titles.get(name) or f"{name.replace('_', ' ').capitalize()}."
        lines += ["", fill(title, width), *(flag_help(flag, width) for flag in flags_of(kind))]
    return "\n".join(lines)


def commands_help(summaries: Mapping[str, str], description: str, program: str) -> str:
    """The help of a program whose first word is a command."""
    lines = [f"usage: {program} COMMAND [FLAGS]", "", description.strip(), "", "commands:"]
    left = max(map(len, summaries)) + 2
    for name, summary in summaries.items():
        lines += two_columns(name, " ".join(summary.split()), left, terminal_width())
    return "\n".join([*lines, "", f"{program} COMMAND --help shows the flags of a command."])


def two_columns(name: str, text: str, left: int, width: int) -> list[str]:
    """A name, and beside it a text."""
    hanging = " " * (left + 2)
    if len(name) > left - 2:
        return [f"  {name}", fill(text, width, initial_indent=hanging, subsequent_indent=hanging)]
    return fill(f"  {name:{left}}{text}", width, subsequent_indent=hanging, break_on_hyphens=False).split("\n")


def first_sentence(text: str) -> str:
    """The text up to the first full stop."""
    return re.split(r"(?<=\.) ", text)[0]


def flag_help(flag: Flag, width: int) -> str:
    """A flag with its values, and below it what it does."""
    described = flag.help if not flag.default else f"{flag.help} (default: {flag.default})"
    if flag.is_switch and flag.default == "on":
        described = f"{flag.help} (default: on; --no-{flag.name[2:]} turns it off)"
    if flag.is_required:
        described = f"{flag.help} (required)"
    indent = " " * 6
    text = fill(described.strip(), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {flag.usage}\n{text}"
