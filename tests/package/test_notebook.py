"""The notebook runs from its first cell to its last, as it is."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def execute(directory: Path) -> dict[str, Any]:
    """The variables after all cells, executed in this process and in ``directory``."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code_cells()):
        exec(compile(source, f"cell {number} of {NOTEBOOK.name}", "exec"), variables)
    return variables


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    variables = execute(tmp_path)
    losses = variables["losses"]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    printed = capsys.readouterr().out
    assert "continues after iteration 20" in printed and "iteration 30: loss" in printed
    assert "global batch size of 7" in printed.splitlines()[-1]
    assert (tmp_path / "notebook/hugging_face/config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"notebook"}


def test_the_notebook_holds_no_output() -> None:
    """Outputs would be of another version of the code."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
