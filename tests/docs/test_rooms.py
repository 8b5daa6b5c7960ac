"""Imports point downwards only, in no circle, and the rooms below ``core`` do not need torch (docs/architecture.md)."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = (
    ("benchmarks",),
    ("megatron_llama",),
    ("commands",),
    ("explorer",),
    ("planner", "inference", "comparison"),
    ("training.pretrain",),
    ("training.build",),
    ("features",),
    ("training",),
    ("checkpoint",),
    ("data",),
    ("operation",),
    ("core",),
    ("config",),
    ("architectures", "schedules", "metrics", "update_rules", "features.flags"),
    ("command_line", "reports"),
    ("console", "flags", "torch_compat", "urls"),
    ("errors",),
)
"""From the top to the ground. Features listen to the loop of ``training``, and what builds a run stands above them. The
``flags.py`` of a feature stands below ``config``, whose groups inherit the flags."""
FLOORS = {room: -floor for floor, rooms in enumerate(ROOMS) for room in rooms}
ABOVE_EXPERTS, EXPERTS = {"models", "pipeline_parallel", "optimizer"}, "moe"
"""Rooms of ``core``: nothing below the layers of experts imports them, and they import nothing above."""


@cache
def imports() -> dict[str, set[str]]:
    """What every module imports of others here: also inside functions, and for types only."""
    files = {}
    for package in ("megatron", "megatron_llama", "benchmarks"):
        for path in (REPOSITORY / package).rglob("*.py"):
            files[".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")] = path
    edges: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inside if inside <= files.keys() else {*inside & files.keys(), str(node.module)}
        edges[module] = names & files.keys() - {module}
    return edges


def between(folder: str) -> dict[str, set[str]]:
    """The imports between the files and folders in a package, by their names."""
    edges: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports().items():
        for other in imported:
            if module.startswith(f"{folder}.") and other.startswith(f"{folder}."):
                here, there = (
                    room_of(name) if folder == "megatron" else name.removeprefix(f"{folder}.").split(".")[0]
                    for name in (module, other)
                )
                edges[here] |= {there} - {here}
    return edges


def room_of(module: str) -> str:
    names = module.split(".")
    if names[0] != "megatron" or len(names) == 1:
        return names[0]
    if names[1] == "features" and names[3:] == ["flags"]:
        return "features.flags"
    return ".".join(names[1:3]) if ".".join(names[1:3]) in FLOORS else names[1]


def upwards(edges: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """The imports of a room from one that does not stand below it."""
    pairs = [(module, other) for module, imported in edges.items() for other in imported]
    return [
        (module, other)
        for module, other in pairs
        if room_of(module) != room_of(other) and FLOORS[room_of(other)] >= FLOORS[room_of(module)]
    ]


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in imports()} - {"megatron"} == FLOORS.keys()


def test_imports_point_downwards() -> None:
    edges = {module: imported - {"megatron"} for module, imported in imports().items()}
    assert sum(map(len, edges.values())) > 1000
    assert not upwards(edges)


@pytest.mark.parametrize(
    ("module", "other"),
    [
        ("features.spikes.flags", "features.spikes.listener"),
        ("metrics.writer", "features.spikes.flags"),
        ("config.operation", "features.spikes.listener"),
        ("training.loop.trainer", "features.spikes.listener"),
        ("training.context", "training.build.run"),
        ("features.preflight.run", "training.build.vocabulary"),
    ],
)
def test_an_import_from_a_higher_floor_is_found(module: str, other: str) -> None:
    planted = {f"megatron.{module}": {f"megatron.{other}", "megatron.errors"}}
    assert upwards(planted) == [(f"megatron.{module}", f"megatron.{other}")]


def test_a_feature_imports_nothing_with_its_package() -> None:
    """Otherwise its flags, which ``config`` imports, would import it."""
    packages = [path.parent.name for path in (REPOSITORY / "megatron" / "features").glob("*/__init__.py")]
    assert len(packages) > 5
    assert not {name for package in packages for name in imports()[f"megatron.features.{package}"]}


def test_no_imports_form_a_circle() -> None:
    """Neither between files, nor between the folders of a package."""
    TopologicalSorter(imports()).prepare()
    for folder in {module.rpartition(".")[0] for module in imports()} - {""}:
        TopologicalSorter(between(folder)).prepare()


def test_experts_are_between_models_and_tensor_parallel_layers() -> None:
    edges = between("megatron.core")
    assert {room for room, imported in edges.items() if EXPERTS in imported} <= ABOVE_EXPERTS
    assert not edges[EXPERTS] & ABOVE_EXPERTS


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
assert "megatron.config.command_line" in sys.modules and "megatron.schedules.simulator" in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=120)


def test_no_test_imports_another_test() -> None:
    """What tests share is a module of its own."""
    tests = REPOSITORY / "tests"
    importing = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*test_", re.MULTILINE)
    assert [path for path in tests.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))] == []
