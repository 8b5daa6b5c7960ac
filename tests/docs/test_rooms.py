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


def imports(package: str = "megatron") -> Iterator[tuple[str, str, str]]:
    """(file, room, room of a module that it imports) for every import between rooms of a package."""
    place = REPOSITORY / package.replace(".", "/")
    for path in sorted(place.rglob("*.py")):
        room = path.relative_to(place).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                to = module.removeprefix(f"{package}.").split(".")[0]
                if module.startswith(f"{package}.") and to != room:
                    yield str(path.relative_to(REPOSITORY)), room, to


def test_every_room_has_a_floor() -> None:
    rooms = {path.stem for path in (REPOSITORY / "megatron").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__"} == FLOORS.keys()


def test_imports_point_downwards() -> None:
    found = list(imports())
    assert len(found) > 100
    upwards = [(file, room, to) for file, room, to in found if FLOORS[to] >= FLOORS[room]]
    assert not [(file, to) for file, room, to in upwards if (room, to) not in EXCEPTIONS]


def test_experts_are_between_models_and_tensor_parallel_layers() -> None:
    edges = {(room, to) for _, room, to in imports("megatron.core")}
    assert len(edges) > 10 and {room for room, to in edges if to == EXPERTS} <= ABOVE_EXPERTS
    assert not {to for room, to in edges if room == EXPERTS} & ABOVE_EXPERTS


@pytest.mark.processes
def test_flags_and_schedules_do_not_import_torch() -> None:
    code = """
import sys
from pkgutil import walk_packages
from importlib import import_module
for name in ("architectures", "config", "metrics", "reports", "schedules"):
    package = import_module(f"megatron.{name}")
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
