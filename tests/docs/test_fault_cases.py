"""The table of fault cases in docs/operations.md names tests that exist, and has a row for every case."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8").partition("## Fault cases")[2]
CASES = [*(f"P{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 18)), *(f"D{n}" for n in range(1, 5))]
CASES += [*(f"N{n}" for n in range(1, 4)), *(f"I{n}" for n in range(1, 4))]
ROWS = {line.split("|")[1].strip(): line.split("|") for line in PAGE.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)}


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_case_has_a_row() -> None:
    assert list(ROWS) == CASES


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_row_exist(case: str) -> None:
    """``tests/x.py::name``, or ``::name`` in the file before it."""
    _, _, _, _, claim, shown, _ = ROWS[case]
    path = ""
    for word in re.findall(r"`((?:tests/|::|megatron/)[^`]*)`", shown):
        file, _, name = word.partition("::")
        path = file or path
        assert (REPOSITORY / path).is_file(), path
        assert not name or name in functions(path), word
    assert shown.strip() or "ot measured" in claim, "a claim without a test"
