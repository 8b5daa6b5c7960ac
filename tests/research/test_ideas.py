"""A layer, a loss, a metric and data of one's own, with windows: in every layout the same run as in one process."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.run_process import run_python
from tests.research.ideas import train
from tests.research.layouts_of_ideas import LAYOUTS


@pytest.mark.processes
def test_ideas_train_in_every_layout_as_in_one_process(tmp_path: Path) -> None:
    expected = train()
    assert [len(step) for step in expected] == [7, 3, 7]  # the gates have gradient norms in every other iteration
    launch = ["-m", "megatron.operation.launch", "--standalone", "--nproc-per-node", "2", "-m"]
    done = run_python(*launch, "tests.research.layouts_of_ideas", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found.keys() == LAYOUTS.keys()
    for layout, steps in found.items():
        for step, wanted in zip(steps, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-9), layout
