"""What a script in ``tools/`` starts: a function of ``megatron/commands``; and the flags of any script."""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from megatron.command_line.parser import Parser

REPOSITORY = Path(__file__).parents[1]


class Entry(NamedTuple):
    """A function, or a name such as ``main = partial(...)``, of a module."""

    module: str
    function: str


def entry_of(script: Path) -> Entry:
    """What ``script`` imports from ``megatron.commands``, or from ``megatron_llama``."""
    body = ast.parse(script.read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron")]
    assert len(imports) == 1 and len(imports[0].names) == 1, script
    return Entry(str(imports[0].module), imports[0].names[0].name)


ENTRIES = {script.stem: entry_of(script) for script in sorted((REPOSITORY / "tools").glob("*.py"))}


def command_lines(script: Path, commands: Sequence[str] = ()) -> list[Any]:
    """The dataclasses of the command lines of a script, which is started for each of its ``commands``, if it has
    some."""
    seen: list[Any] = []

    def note(_: object, config: Any, *__: object) -> None:
        seen.append(config)
        sys.exit()

    source = script.read_text(encoding="utf-8")
    starts = ("parse(", "run_tool,", "run_tool(", "run_benchmark(", "run_benchmark,")
    if "__main__" in source and (script.stem in ENTRIES or any(word in source for word in starts)):
        for words in [[name] for name in commands] or [[]]:
            begin = mock.patch.object(sys, "argv", [script.name, *words])
            with begin, mock.patch.object(Parser, "__init__", note), pytest.raises(SystemExit):
                runpy.run_path(str(script), run_name="__main__")
        assert seen or script.stem == "estimate", script  # which needs a command
    return seen
