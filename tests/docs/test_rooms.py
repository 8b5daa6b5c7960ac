"""Imports point downwards only, and the rooms below ``core`` do not need torch (docs/architecture.md)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = (
    ("commands",),
    ("planner", "inference"),
    ("training",),
    ("checkpoint",),
    ("data",),
    ("operation",),
    ("core",),
    ("config",),
    ("architectures", "schedules", "metrics", "update_rules"),
    ("reports",),
    ("console", "flags", "intervals", "ranges", "torch_compat", "urls"),
    ("errors",),
)
"""From the top to the ground."""
EXCEPTIONS = {("update_rules", "core")}
"""An update rule is one file: flags, which are read without torch, and the update, which imports when it is built."""
ABOVE_EXPERTS, EXPERTS = {"models", "pipeline_parallel", "optimizer"}, "moe"
"""Rooms of ``core``: nothing below the layers of experts imports them, and they import nothing above."""
FLOORS = {room: -floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, room, room of a module that it imports) for every import of another room."""
    for path in sorted((REPOSITORY / "megatron").rglob("*.py")):
        room = path.relative_to(REPOSITORY / "megatron").with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                if module.startswith("megatron.") and module.split(".")[1] != room:
                    yield str(path.relative_to(REPOSITORY)), room, module.split(".")[1]


def test_every_room_has_a_floor() -> None:
    rooms = {path.stem for path in (REPOSITORY / "megatron").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__"} == FLOORS.keys()


def test_imports_point_downwards() -> None:
    found = list(imports())
    assert len(found) > 100
    upwards = [(file, room, to) for file, room, to in found if FLOORS[to] >= FLOORS[room]]
    assert not [(file, to) for file, room, to in upwards if (room, to) not in EXCEPTIONS]


def test_experts_are_between_models_and_tensor_parallel_layers() -> None:
    edges = set()
    for path in sorted((REPOSITORY / "megatron" / "core").rglob("*.py")):
        room = path.relative_to(REPOSITORY / "megatron" / "core").with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            edges |= {(room, module.split(".")[2]) for module in modules if module.startswith("megatron.core.")}
    assert {room for room, to in edges if to == EXPERTS} <= ABOVE_EXPERTS | {EXPERTS}
    assert not {to for room, to in edges if room == EXPERTS} & ABOVE_EXPERTS


@pytest.mark.processes
def test_flags_and_schedules_do_not_import_torch() -> None:
    code = """
import sys
from pkgutil import walk_packages
import megatron.architectures, megatron.config, megatron.metrics, megatron.reports, megatron.schedules
from importlib import import_module
for package in (
    megatron.architectures, megatron.config, megatron.metrics, megatron.reports, megatron.schedules
):
    for module in walk_packages(package.__path__, package.__name__ + "."):
        import_module(module.name)
assert "megatron.config.command_line" in sys.modules and "megatron.schedules.verifier" in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=120)


def test_no_test_imports_another_test() -> None:
    """What tests share is a module of its own."""
    tests = REPOSITORY / "tests"
    importing = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*test_", re.MULTILINE)
    assert [path for path in tests.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))] == []
