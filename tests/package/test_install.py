"""What ``pip install`` installs: every file of the packages, and a command that works in any directory."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import Distribution

from megatron_llama._imports import OURS, check_imports, foreign_package

REPOSITORY = Path(__file__).parents[2]
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
    assert {path.suffix for path in files} >= {".py", ".css", ".js", ".toml", ".json", ".csv"}
    assert packaged(tmp_path) == files


def test_no_file_of_the_packages_is_ignored_by_git() -> None:
    """A pattern such as ``build/`` also leaves out a package of that name from a commit."""
    words = [
        "git",
        "ls-files",
        "--others",
        "--ignored",
        "--exclude-standard",
        "megatron",
        "megatron_llama",
        "tests",
        "tools",
    ]
    ignored = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [name for name in ignored if "/__pycache__/" not in name]


def test_our_package_is_accepted() -> None:
    check_imports()


def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron/core").mkdir(parents=True)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({str(REPOSITORY)!r}); import megatron_llama"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    # A regular package of ours would win over a namespace package of a later place, as megatron-core's is.
    (tmp_path / "megatron/__init__.py").touch()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: import megatron finds {tmp_path / 'megatron'}, and not {OURS}: megatron-core")


def test_files_of_megatron_core_among_ours_are_named(tmp_path: Path) -> None:
    from importlib.machinery import ModuleSpec

    spec = ModuleSpec("megatron", None, origin=str(tmp_path / "__init__.py"), is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    assert foreign_package(spec, tmp_path) is None
    (tmp_path / "core").mkdir()
    (tmp_path / "core/package_info.py").touch()
    assert foreign_package(spec, tmp_path) == f"{tmp_path} holds files of megatron-core"
    assert foreign_package(None, tmp_path) == "The package megatron is missing"


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with Megatron-Llama, whose dependencies come from this environment."""
    base = tmp_path_factory.mktemp(request.param)
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
    words = ["-e", str(source)] if request.param == "editable" else [str(source)]
    command = [sys.executable, "-m", "pip", "--python", str(base / "bin/python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", *words], check=True, timeout=300)
    return base


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
def test_the_installed_command_works_elsewhere(installed: Path) -> None:
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


@pytest.mark.timeout(1800)
@pytest.mark.slow(reason="builds and installs a wheel and an editable package, and trains on two processes")
def test_the_installed_module_starts_on_several_processes(installed: Path) -> None:
    launch = ["launch", "--standalone", "--nproc-per-node", "2", "-m", "megatron.commands.pretrain_llama"]
    flags = [*TINY, "--tensor-model-parallel-size", "2"]
    assert "iteration        2/" in run_installed(installed, "megatron-llama", *launch, *flags)
    python = ["python", "-m", "megatron.operation.launch", *launch[1:]]
    assert "iteration        2/" in run_installed(installed, *python, *flags)


def test_on_windows_an_import_says_what_to_do() -> None:
    code = "import sys; sys.platform = 'win32'; import megatron"
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome.returncode == 1
    assert "ImportError: Megatron-Llama runs on Linux and macOS" in outcome.stderr and "WSL" in outcome.stderr
