"""The page on one step shows what the script prints, and the script prints the same loss in every layout."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.run_process import run_tool

REPOSITORY = Path(__file__).parents[2]
SCRIPT = "examples/one_step.py"


def printed(*flags: str, processes: int) -> list[str]:
    return [line for line in run_tool(SCRIPT, *flags, processes=processes).splitlines() if line]


def shown() -> list[str]:
    page = (REPOSITORY / "docs/one_step.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line for language, block in blocks if not language for line in block.splitlines()]


def test_the_page_shows_the_whole_output() -> None:
    assert printed(processes=4) == shown()


@pytest.mark.parametrize(
    "flags",
    ["--no-sequence-parallel", "--tensor-model-parallel-size 1 --no-sequence-parallel --context-parallel-size 2"],
)
def test_other_flags_change_the_communication_and_not_the_loss(flags: str) -> None:
    lines = printed(*flags.split(), processes=2)
    assert lines[-1] == shown()[-1]
    assert not any("gather" in line or "scatter" in line for line in lines if "tp" in line)
