"""The steps of the Dockerfile, in an environment that has only torch, as an image has."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.package.lock import closure

REPOSITORY = Path(__file__).parents[2]


def instructions(text: str) -> list[tuple[str, str]]:
    """The name and the words of every instruction."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(name, words.strip()) for name, _, words in (line.partition(" ") for line in lines)]


def is_sent(name: str) -> bool:
    """Whether .dockerignore lets a file or folder of the repository into the build."""
    patterns = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split()
    assert patterns[0] == "**"
    return f"!{name}" in patterns


class Build:
    """Executes instructions below ``root``, with ``python`` of a virtual environment."""

    def __init__(self, root: Path, environment: Path) -> None:
        self.root, self.place = root, root
        self.arguments: dict[str, str] = {}
        self.variables = {
            "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
            "HOME": str(root),
            # Where this machine finds packages.
            **{name: value for name, value in os.environ.items() if re.match(r"(?i)pip_|.*_proxy$|ssl_", name)},
        }

    def execute(self, name: str, words: str) -> None:
        expanded = re.sub(r"\$\{(\w+)\}", lambda match: self.arguments.get(match[1], match[0]), words)
        if name == "ARG":
            argument, _, default = words.partition("=")
            self.arguments[argument] = default
        elif name == "ENV":
            self.variables |= dict(pair.split("=", 1) for pair in shlex.split(expanded))
        elif name == "WORKDIR":
            self.place = self.root / expanded.lstrip("/")
            self.place.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = expanded.split()
            for source in sources:
                self.copy(source, target)
        elif name == "RUN":
            subprocess.run(["sh", "-c", expanded], cwd=self.place, env=self.variables, check=True, timeout=1500)
        else:
            assert name == "FROM", f"this test does not know {name}"

    def copy(self, source: str, target: str) -> None:
        assert is_sent(source), f"{source} is not in .dockerignore"
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, self.place / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / source, self.place / target)


def environment_with_torch(base: Path) -> None:
    """A virtual environment with pip, and of all packages only torch and what it needs."""
    venv.create(base, with_pip=True, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(base)}))
    for name in closure([Requirement("torch")]):
        for file in distribution(name).files or ():
            top = file.parts[0]
            found = Path(str(distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(found)


def test_every_copied_path_is_sent_and_there() -> None:
    """And nothing names the host of a registry."""
    found = instructions((REPOSITORY / "Dockerfile").read_text(encoding="utf-8"))
    names = [word for name, words in found if name == "COPY" for word in words.split()[:-1]]
    assert "megatron" in names and all(is_sent(name) and (REPOSITORY / name).exists() for name in names)
    assert found[0] == ("ARG", "BASE=pytorch/pytorch:latest") and found[1] == ("FROM", "${BASE}")


@pytest.mark.timeout(1800)
@pytest.mark.processes
def test_the_steps_of_the_container_file_work_in_a_bare_environment(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    environment_with_torch(environment)
    build = Build(tmp_path / "root", environment)
    build.root.mkdir()
    for name, words in instructions((REPOSITORY / "Dockerfile").read_text(encoding="utf-8")):
        build.execute(name, words)
    flags = "train --model tiny --mock-data --vocab-size 100 --seq-length 16 --micro-batch-size 1 --global-batch-size 1"
    done = subprocess.run(
        [
            "megatron-llama",
            *flags.split(),
            "--train-iters",
            "1",
            "--lr",
            "1e-3",
            "--num-workers",
            "0",
            "--device",
            "cpu",
        ],
        cwd=build.place,
        env={**build.variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped: the run is complete" in done.stdout
    torch = subprocess.run(
        [str(environment / "bin/python"), "-m", "pip", "freeze"], env=build.variables, capture_output=True, text=True
    )
    assert f"torch=={distribution('torch').version}" in torch.stdout, "the torch of the image was replaced"
    assert sys.prefix not in torch.stdout
