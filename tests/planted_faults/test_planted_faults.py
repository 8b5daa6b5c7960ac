"""The table of chosen faults follows the code, and the tool finds out what sees a fault."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.planted_faults import runner
from tests.planted_faults.__main__ import room_of
from tests.planted_faults.chosen import CHOSEN
from tests.planted_faults.drawn import draw, mutations
from tests.planted_faults.fault import Fault, read, sources
from tests.planted_faults.runner import REPOSITORY, try_faults
from tests.planted_faults.trace import attribute, trace


def test_every_chosen_fault_is_an_edit_of_the_code_of_today() -> None:
    for fault in CHOSEN:
        path, offset = fault.find(REPOSITORY)
        text = read(path)
        planted = text[:offset] + fault.new + text[offset + len(fault.old) :]
        changes = path.suffix != ".py" or ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
        assert changes and planted != text, f"{fault.kind} changes nothing"
        assert fault.tests and all((REPOSITORY / "tests" / test).exists() for test in fault.tests), fault.tests
    assert len({fault.kind for fault in CHOSEN}) == len(CHOSEN) >= 60


def test_every_room_has_chosen_faults() -> None:
    rooms = {path.name for path in (REPOSITORY / "megatron").iterdir() if (path / "__init__.py").exists()}
    assert rooms <= {room_of(fault) for fault in CHOSEN}


SOURCE = """
def add(a, b):
    if a < 0 and not b:
        check(a)
    return a + b - 1


LIMIT = 3
"""


def test_mutations_are_small_edits_of_functions(tmp_path: Path) -> None:
    path = tmp_path / "megatron/code.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    found = mutations(path)
    assert Counter(one.what for one in found) == {
        "and becomes or": 1,
        "< becomes <=": 1,
        "0 becomes 1": 1,
        "not is left out": 1,
        "a call is left out": 1,
        "- becomes +": 1,
        "+ becomes -": 1,
        "1 becomes 2": 1,
    }
    for one in found:
        before = read(path)
        one.fault(tmp_path).plant(tmp_path)
        assert sum(a != b for a, b in zip(before.splitlines(), read(path).splitlines())) == 1
        path.write_text(before)


def test_every_mutation_of_the_code_can_be_read() -> None:
    for one in draw(REPOSITORY, 60, seed=1):
        text = read(one.path)
        ast.parse(text[: one.start] + one.new + text[one.stop :])
        one.fault(REPOSITORY).find(REPOSITORY)
    assert len(draw(REPOSITORY, 10**6, seed=0)) > 0.8 * len(sources(REPOSITORY))


def test_what_is_reached_belongs_to_the_file_that_its_worker_runs() -> None:
    tests = [
        "1.0 gw0 tests/a.py",
        "2.0 gw1 tests/b.py",
        "5.0 gw0 tests/c.py",
        "6.0 gw1 tests/d.py",
        "9.0 gw1 tests/d.py",
    ]
    reached = ["0 1.5 gw0", "0 5.5 gw0", "1 7.0 gw1", "2 0.5 gw0", "3 3.0 "]
    # The quickest file comes first; what no worker is named for may belong to every one.
    assert attribute(tests, reached) == {
        0: ["tests/c.py", "tests/a.py"],
        1: ["tests/d.py"],
        3: ["tests/a.py", "tests/b.py"],
    }


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose tests see one of two faults."""
    root = tmp_path / "repository"
    (root / "megatron").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "megatron/__init__.py").touch()
    (root / "megatron/code.py").write_text("def larger(a, b):\n    return a > b\n\n\ndef unused():\n    return 1\n")
    (root / "tests/test_code.py").write_text(
        "from megatron.code import larger\n\n\ndef test_larger():\n    assert larger(2, 1) and not larger(1, 1)\n"
    )
    monkeypatch.setattr(runner, "REPOSITORY", root)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.mark.processes
def test_a_fault_that_no_test_sees_is_told_from_one_that_is_seen(small: Path, tmp_path: Path) -> None:
    faults = [Fault("seen", "a > b", "a >= b"), Fault("not seen", "return 1", "return 2")]
    outcomes = {one.fault.kind: one for one in try_faults([(f, ("test_code.py",)) for f in faults], tmp_path, 1, 60.0)}
    assert outcomes["seen"].seen_by == "test_code.py::test_larger"
    assert outcomes["not seen"].seen_by is None and outcomes["not seen"].files == 1
    assert read(tmp_path / "0/megatron/code.py") == read(small / "megatron/code.py")


@pytest.mark.processes
def test_a_line_is_traced_to_the_tests_that_execute_it(small: Path, tmp_path: Path) -> None:
    clone = runner.make_clone(tmp_path / "clone")
    drawn = mutations(clone / "megatron/code.py")
    found = trace(clone, drawn, tmp_path / "trace", ["-n", "1"])
    assert {drawn[number].what: files for number, files in found.items()} == {"> becomes >=": ["tests/test_code.py"]}
