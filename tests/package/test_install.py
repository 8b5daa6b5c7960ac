"""What ``pip install`` installs: every file of the packages, and a command that works in any directory; also by the
steps of the Dockerfile, in an environment that has only torch, as an image has."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import Distribution

from megatron_llama import OURS, check_imports, foreign_package
from tests.end_to_end.run_process import REPOSITORY, run_python
from tests.package.lock import closure

TINY = shlex.split(
    "--model tiny --mock-data --vocab-size 500 --seq-length 32 --micro-batch-size 2 --global-batch-size 2 "
    "--train-iters 2 --lr 1e-3 --num-workers 0 --log-interval 1 --device cpu"
)


def packaged(directory: Path) -> set[Path]:
    """The files that setuptools puts into the wheel, relative to the repository."""
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.set_undefined_options("build", ("build_lib", "build_lib"))
    build.ensure_finalized()
    return {Path(path).relative_to(build.build_lib) for path in build.get_outputs(include_bytecode=False)}


def files_of_packages() -> Iterator[Path]:
    for package in ("megatron", "megatron_llama"):
        for path in (REPOSITORY / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(REPOSITORY)


def test_every_file_of_the_packages_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A style sheet or a table that is missing is noticed only where the repository is not the working directory."""
    monkeypatch.chdir(REPOSITORY)
    files = set(files_of_packages())
    assert {path.suffix for path in files} >= {".py", ".css", ".js", ".toml", ".json"}
    assert packaged(tmp_path) == files


def test_no_file_of_the_packages_is_ignored_by_git() -> None:
    """A pattern such as ``build/`` also leaves out a package of that name from a commit."""
    words = shlex.split("git ls-files --others --ignored --exclude-standard megatron megatron_llama tests tools")
    ignored = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [name for name in ignored if "/__pycache__/" not in name]


def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron/core").mkdir(parents=True)
    places = f"sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({str(REPOSITORY)!r})"
    code = f"import sys; {places}; import megatron_llama"
    # A regular package of ours would win over a namespace package of a later place, as megatron-core's is.
    (tmp_path / "megatron/__init__.py").touch()
    done = run_python("-c", code, cwd=tmp_path, PYTHONPATH="")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: import megatron finds {tmp_path / 'megatron'}, and not {OURS}: megatron-core")


def test_files_of_megatron_core_among_ours_are_named(tmp_path: Path) -> None:
    spec = ModuleSpec("megatron", None, origin=str(tmp_path / "__init__.py"), is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    assert foreign_package(spec, tmp_path) is None
    check_imports()  # ours is accepted
    (tmp_path / "core").mkdir()
    (tmp_path / "core/package_info.py").touch()
    assert foreign_package(spec, tmp_path) == f"{tmp_path} holds files of megatron-core"
    assert foreign_package(None, tmp_path) == "The package megatron is missing"


def install(base: Path, is_editable: bool) -> None:
    """Make a virtual environment with Megatron-Llama, whose dependencies come from this environment."""
    venv.create(base, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = base / "lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    source = base / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in files.stdout.splitlines():
        if name.startswith(("megatron", "pyproject", "README", "LICENSE", "NOTICE")) and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    words = ["-e", str(source)] if is_editable else [str(source)]
    command = [sys.executable, "-m", "pip", "--python", str(base / "bin/python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", *words], check=True, timeout=300)


def run_installed(base: Path, *words: str) -> str:
    """The output of a command of the environment, in another directory and without the repository's."""
    variables = {"PATH": f"{base / 'bin'}:/usr/bin:/bin", "HOME": str(base), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(base / "bin" / words[0]), *words[1:]], cwd=base, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1800)
@pytest.mark.slow(reason="builds and installs a wheel and an editable package, and starts processes of each")
@pytest.mark.parametrize("is_editable", [False, True], ids=["wheel", "editable"])
def test_the_installed_command_works_elsewhere(tmp_path: Path, is_editable: bool) -> None:
    """Also as a module, on several processes."""
    install(installed := tmp_path / "environment", is_editable)
    assert "preprocess" in run_installed(installed, "megatron-llama", "--help")
    assert "--tensor-model-parallel-size" in run_installed(installed, "megatron-llama", "train", "--help")
    flags = [*TINY, "--save", "run"]
    assert "iteration        2/" in run_installed(installed, "megatron-llama", "train", *flags)
    # Files of the package: style sheets and scripts of a page, cluster files, the fitted constants.
    run_installed(installed, "megatron-llama", "report", "run", "--html", "run.html")
    page = (installed / "run.html").read_text(encoding="utf-8")
    assert re.search(r"<style>.*\{.*\}", page, re.DOTALL)
    flags = shlex.split("plan --model llama3-8b --seq-length 8192 --global-batch-size 64 --num-gpus 8")
    assert "tensor" in run_installed(installed, "megatron-llama", *flags)
    launch = ["launch", "--standalone", "--nproc-per-node", "2", "-m", "megatron.commands.pretrain_llama"]
    flags = [*TINY, "--tensor-model-parallel-size", "2"]
    assert "iteration        2/" in run_installed(installed, "megatron-llama", *launch, *flags)
    python = ["python", "-m", "megatron.operation.launch", *launch[1:]]
    assert "iteration        2/" in run_installed(installed, *python, *flags)


def test_on_windows_an_import_says_what_to_do() -> None:
    code = "import sys; sys.platform = 'win32'; import megatron"
    outcome = run_python("-c", code)
    assert outcome.returncode == 1
    assert "ImportError: Megatron-Llama runs on Linux and macOS" in outcome.stderr and "WSL" in outcome.stderr


# --- the container -------------------------------------------------------------------------------------------


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
@pytest.mark.slow(reason="installs every package")
def test_the_steps_of_the_container_file_work_in_a_bare_environment(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    environment_with_torch(environment)
    build = Build(tmp_path / "root", environment)
    build.root.mkdir()
    for name, words in instructions((REPOSITORY / "Dockerfile").read_text(encoding="utf-8")):
        build.execute(name, words)
    variables = {**build.variables, "OMP_NUM_THREADS": "1"}
    train = ["megatron-llama", "train", *TINY]
    done = subprocess.run(train, cwd=build.place, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stopped: the run is complete" in done.stdout
    torch = subprocess.run(
        [str(environment / "bin/python"), "-m", "pip", "freeze"], env=build.variables, capture_output=True, text=True
    )
    assert f"torch=={distribution('torch').version}" in torch.stdout, "the torch of the image was replaced"
    assert sys.prefix not in torch.stdout
