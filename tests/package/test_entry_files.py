"""An old Python, or a package that is missing: one sentence from every file that a user starts."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron import MODULES

REPOSITORY = Path(__file__).parents[2]
ENTRY_FILES = sorted(
    str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "pretrain_llama.py", *REPOSITORY.glob("tools/*.py"))
)
MODULES_TO_START = ("megatron.operation.launch", "megatron.commands.pretrain_llama", "megatron_llama")
OLD = (
    "import runpy, sys; sys.version_info = (3, 10, 13, 'final', 0); name = sys.argv.pop(1)\n"
    "(runpy.run_path if name.endswith('.py') else runpy.run_module)(name, run_name='__main__')"
)
"""Starts a file or a module as Python 3.10 would."""
SENTENCE = re.compile(r"(?:.*\()?ImportError: (.*[.])\)?\n")


def sentence_of(*command: str) -> str:
    """The only line that ``command`` prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=60)
    found = SENTENCE.fullmatch(done.stderr)
    assert done.returncode == 1 and done.stdout == "" and found, done.stderr
    return found[1]


@pytest.mark.parametrize("file", ENTRY_FILES)
def test_files_name_the_packages_that_are_missing(file: str) -> None:
    assert f"{sys.executable} has no torch, numpy, tyro, " in sentence_of(sys.executable, "-S", file)


@pytest.mark.parametrize("module", MODULES_TO_START)
def test_modules_name_the_packages_that_are_missing(module: str) -> None:
    assert "has no torch, numpy, tyro, " in sentence_of(sys.executable, "-S", "-m", module)


@pytest.mark.parametrize("entry", [*ENTRY_FILES, *MODULES_TO_START])
def test_an_old_python_is_named(entry: str) -> None:
    assert f"needs Python 3.11 or later, and {sys.executable} is 3.10" in sentence_of(sys.executable, "-c", OLD, entry)


def test_one_missing_package_is_named_alone() -> None:
    code = (
        "from importlib import util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'yaml' else found(name)\n"
        "import megatron"
    )
    assert sentence_of(sys.executable, "-c", code).startswith(f"{sys.executable} has no yaml: activate")


def test_every_dependency_is_looked_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = [Requirement(one).name for one in project["dependencies"]]
    modules = {"pyyaml": "yaml", "protobuf": "google.protobuf"}
    assert sorted(MODULES) == sorted(modules.get(name, name) for name in packages)
