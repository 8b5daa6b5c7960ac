"""The bounds for users, the exact versions for tests, and the lock file agree."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from sentencepiece import sentencepiece_model_pb2

from tests.package.lock import COMMAND, CUDA_LOCK, IS_CUDA_BUILD, LOCK, closure, cuda_build, locked, requirements_in

REPOSITORY = Path(__file__).parents[2]
OF_QUICKSTART = ("data", "wandb", "tensorboard", "plots")
"""Extras whose packages requirements.txt has."""


def project() -> dict[str, Any]:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


def bounds(extra: str | None = None) -> dict[str, Requirement]:
    words = project()["dependencies"] if extra is None else project()["optional-dependencies"][extra]
    requirements = map(Requirement, words)
    return {canonicalize_name(one.name): one for one in requirements if one.name != "megatron-llama"}


def pins(name: str) -> dict[str, str]:
    """Exact versions by name."""
    found: dict[str, str] = {}
    for requirement in requirements_in(name):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is not exact"
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


def test_requirements_have_what_users_install() -> None:
    wanted = bounds()
    for extra in OF_QUICKSTART:
        wanted |= bounds(extra)
    assert pins("requirements.txt").keys() == wanted.keys()


@pytest.mark.parametrize(
    ("extra", "file"),
    [
        (None, "requirements.txt"),
        *((extra, "requirements.txt") for extra in OF_QUICKSTART),
        ("fp8", "requirements-cuda.txt"),
    ],
)
def test_pins_are_within_the_bounds(extra: str | None, file: str) -> None:
    versions = pins(file)
    for name, requirement in bounds(extra).items():
        assert [one.operator for one in requirement.specifier] == [">="], f"{requirement} is no lower bound"
        assert requirement.specifier.contains(versions[name]), (
            f"{name}=={versions[name]} of {file} against {requirement}"
        )


def test_the_extra_for_developers_is_within_the_requirements_of_the_tests() -> None:
    versions = {one.name: one.specifier for one in requirements_in("requirements-dev.txt")}
    for name, requirement in bounds("dev").items():
        (specifier,) = versions[name]
        assert requirement.specifier.contains(specifier.version)
    (others,) = [
        one for one in map(Requirement, project()["optional-dependencies"]["dev"]) if one.name == "megatron-llama"
    ]
    assert others.extras == {*OF_QUICKSTART, "lm-eval"}


def test_training_needs_no_extra() -> None:
    assert not bounds().keys() & {
        "datasets", "wandb", "tensorboard", "matplotlib", "resvg-py", "pyarrow", "transformer-engine",
    }  # fmt: skip
    assert str(bounds()["torch"].specifier) == ">=2.11"  # README and requirements.txt name it


def test_the_package_that_reads_sentencepiece_models_is_required() -> None:
    """sentencepiece does not name it, and needs the version with which its reader was generated, or a later one."""
    source = Path(sentencepiece_model_pb2.__file__).read_text(encoding="utf-8")
    (generated,) = re.findall(r"Protobuf Python Version: ([\d.]+)", source)
    (least,) = bounds()["protobuf"].specifier
    assert Version(least.version) >= Version(generated)


def test_the_lock_satisfies_all_requirements() -> None:
    versions = locked(LOCK)
    for requirement in requirements_in("requirements-dev.txt"):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name} is not in requirements.lock: {COMMAND}"
        assert requirement.specifier.contains(versions[name]), f"{requirement} against {versions[name]}: {COMMAND}"


def test_both_locks_have_what_the_packages_need_with_the_cuda_build() -> None:
    """With its recorded metadata, where the CPU build is installed."""
    build = cuda_build()
    found = closure(requirements_in("requirements-dev.txt"), build)
    more = locked(CUDA_LOCK)
    assert locked(LOCK).keys().isdisjoint(more)
    # The CPU build, if it is installed, needs nothing of the other lock.
    installed = closure(requirements_in("requirements-dev.txt")).keys()
    assert IS_CUDA_BUILD or installed <= locked(LOCK).keys(), f"add what is new: {COMMAND}"
    assert found.keys() <= locked(LOCK).keys() | more.keys(), f"add what is new: {COMMAND}"
    assert {name: build[name].version for name in more} == more
    assert build.keys() == {"torch", *more}
    versions = locked(LOCK) | more
    for name, one in build.items():
        for requirement in map(Requirement, one.requires):
            version = versions[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{name} needs {requirement}, and the locks have {version}"
    assert versions["torch"] == build["torch"].version


@pytest.mark.skipif(not IS_CUDA_BUILD, reason="the CPU build of torch is installed")
def test_the_recorded_metadata_is_that_of_the_cuda_build() -> None:
    found = closure(requirements_in("requirements-dev.txt"))
    assert cuda_build().keys() == found.keys() - (locked(LOCK).keys() - {"torch"}), f"record it again: {COMMAND}"
    assert {name: sorted(found[name].requires) for name in cuda_build()} == {
        name: sorted(one.requires) for name, one in cuda_build().items()
    }
