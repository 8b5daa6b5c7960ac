"""tools/environment.sh: which Python it takes, which build of torch, and that it installs once.

A small repository, and packages of a few bytes on local servers that have the form of a package index.
"""

import base64
import hashlib
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/environment.sh"
BACKEND = """
import os, zipfile
def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "megatron_llama-0.1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as file:
        file.writestr("megatron_llama.py", "")
        file.writestr("megatron_llama-0.1.dist-info/METADATA",
            "Metadata-Version: 2.1\\nName: megatron-llama\\nVersion: 0.1\\nProvides-Extra: plots\\n"
            "Requires-Dist: torch\\nRequires-Dist: drawing; extra == 'plots'\\n")
        file.writestr("megatron_llama-0.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr("megatron_llama-0.1.dist-info/RECORD", "")
    return name
"""
"""Builds a package without any other."""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(index: Path, name: str, version: str) -> None:
    """A package with one module in an index of packages."""
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    place = index / name
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        record = []
        for path, text in files.items():
            wheel.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(text)}\n")
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "".join(record))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A folder's listing is a page of links, as an index has it."""

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class Machine:
    """A clone on a machine whose pip has a build of torch, and PyTorch's index another."""

    def __init__(self, root: Path) -> None:
        self.clone = root / "clone"
        (self.clone / "tools").mkdir(parents=True)
        shutil.copy(SCRIPT, self.clone / "tools")
        (self.clone / "backend.py").write_text(BACKEND)
        (self.clone / "pyproject.toml").write_text(PROJECT)
        (self.clone / "requirements.txt").write_text("torch==2.13.0\ndrawing==1.0\n")
        (self.clone / "requirements-dev.txt").write_text("-r requirements.txt\n")
        packages = root / "packages"
        for name, version in (("torch", "2.13.0"), ("drawing", "1.0"), ("drawing", "2.0")):
            write_wheel(packages / "pip", name, version)
        write_wheel(packages / "cpu", "torch", "2.13.0+cpu")
        write_wheel(packages / "older", "torch", "2.12.0+cpu")
        self.programs = root / "programs"
        self.programs.mkdir()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(packages)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.variables = {
            "PATH": f"{self.programs}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(root),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index("pip"),
            "PIP_NO_CACHE_DIR": "1",
        }

    def index(self, name: str) -> str:
        """The URL of an index."""
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def source(self, what: str = "plots", **variables: str) -> "subprocess.CompletedProcess[str]":
        """Source the script for ``what``, and print the versions of what can be imported then."""
        words = f"set -euo pipefail; source tools/environment.sh {what}; cd /; python -c '{VERSIONS}'"
        return subprocess.run(
            ["bash", "-c", words],
            cwd=self.clone,
            env=self.variables | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )


VERSIONS = "import megatron_llama, torch, drawing; print(torch.__version__, drawing.__version__)"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path)
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.mark.processes
def test_the_cpu_build_comes_from_the_index_of_torch_and_once(machine: Machine) -> None:
    """And the package is installed, so that it is imported from any directory."""
    index = machine.index("cpu")
    first = machine.source(TORCH_INDEX=index)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[1:] == [
        f"torch==2.13.0 is the build of {index} (TORCH_INDEX chooses another).",
        "Installing plots (once; a few minutes) ...",
        "2.13.0+cpu 1.0",
    ]
    assert machine.source(TORCH_INDEX=index).stdout == "2.13.0+cpu 1.0\n"
    tests = machine.source("requirements-dev.txt", TORCH_INDEX="")
    assert tests.stdout.splitlines() == ["Installing requirements-dev.txt (once; a few minutes) ...", "2.13.0+cpu 1.0"]
    with (machine.clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    again = machine.source(TORCH_INDEX=index).stdout
    assert again.splitlines() == ["Installing plots (once; a few minutes) ...", "2.13.0+cpu 1.0"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "index", ["older", *(pytest.param(index, marks=pytest.mark.slow) for index in ("absent", "silent"))]
)
def test_an_index_without_this_build_leaves_the_build_to_pip(machine: Machine, index: str) -> None:
    """One that does not answer costs seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cpu" if index == "silent" else machine.index(index)
        done = machine.source(TORCH_INDEX=url)
    assert done.returncode == 0, done.stderr
    assert f"torch==2.13.0 is the build that pip finds, because {url} does not answer" in done.stdout
    assert done.stdout.endswith("\n2.13.0 1.0\n")


@pytest.mark.processes
@pytest.mark.slow(reason="makes two environments")
def test_with_a_gpu_and_where_it_is_asked_for_the_build_is_that_of_pip(machine: Machine) -> None:
    driver = machine.programs / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    done = machine.source()
    assert "torch==2.13.0 is the build that pip finds, because nvidia-smi is there (" in done.stdout
    assert done.stdout.endswith("\n2.13.0 1.0\n"), done.stderr
    driver.unlink()
    shutil.rmtree(machine.clone / ".venv")
    done = machine.source(TORCH_INDEX="")
    assert "torch==2.13.0 is the build that pip finds, because TORCH_INDEX is empty." in done.stdout
    assert done.stdout.endswith("\n2.13.0 1.0\n"), done.stderr


@pytest.mark.processes
@pytest.mark.slow(reason="makes an environment")
def test_an_old_python_is_passed_over_and_an_error_if_it_is_named(machine: Machine) -> None:
    old = machine.programs / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    (machine.programs / "python3.13").symlink_to(sys.executable)
    assert machine.source(TORCH_INDEX="").stdout.endswith("\n2.13.0 1.0\n")
    shutil.rmtree(machine.clone / ".venv")
    done = machine.source(PYTHON=str(old))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"ERROR: Python 3.11 or later is needed, and {old} is none: install it, or name it with "
        "PYTHON=/path/to/python3.\n"
    )
