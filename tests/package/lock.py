"""Writes the lock files: the versions in this environment of all packages that ``requirements-dev.txt`` needs.

    python -m tests.package.lock

Run it in a new environment (``bash tests/run.sh`` makes one): with the CPU build of torch it writes
``requirements.lock``; with the CUDA build ``requirements-cuda.lock``, what this build needs more, and the metadata of
these packages, with which tests check that file where the CPU build is installed.
"""

import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
COMMAND = "python -m tests.package.lock"
LOCK, CUDA_LOCK = "requirements.lock", "requirements-cuda.lock"
CUDA_METADATA = Path(__file__).with_name("cuda_build.json")
IS_CUDA_BUILD = any("cuda" in one for one in distribution("torch").requires or ())


class Metadata(NamedTuple):
    """Version and requirements of a package."""

    version: str
    requires: list[str]


def installed(name: str) -> Metadata:
    """Of a package in this environment, without the name of its build."""
    found = distribution(name)
    return Metadata(found.version.partition("+")[0], found.requires or [])


def cuda_build() -> dict[str, Metadata]:
    """Of torch's CUDA build, and of the packages that only this one needs, as it was installed once."""
    return {name: Metadata(*found) for name, found in json.loads(CUDA_METADATA.read_text(encoding="utf-8")).items()}


def requirements_in(name: str) -> list[Requirement]:
    """The requirements of a file, and of the files that it includes."""
    found = []
    for line in (REPOSITORY / name).read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].strip()
        if words.startswith("-r "):
            found += requirements_in(words[3:])
        elif words:
            found.append(Requirement(words))
    return found


def closure(requirements: list[Requirement], known: Mapping[str, Metadata] | None = None) -> dict[str, Metadata]:
    """The ``requirements`` and everything that they need, with the requirements that apply here; packages are those of
    ``known``, or else are installed."""
    found: dict[str, Metadata] = {}
    waiting = [one for one in requirements if applies(one, frozenset({""}))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        one = (known or {}).get(name) or installed(name)
        needed = [text for text in one.requires if applies(Requirement(text), extras)]
        before = found[name].requires if name in found else []
        found[name] = Metadata(one.version, list(dict.fromkeys([*before, *needed])))
        waiting += map(Requirement, needed)
    return found


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Whether a package with ``extras`` (one of them empty) has this requirement here."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def locked(name: str) -> dict[str, str]:
    """Versions by name in a lock file."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([\w.!+-]+)$", text, re.MULTILINE))


def write() -> None:
    """Write the files of the build that is installed."""
    found = closure(requirements_in("requirements-dev.txt"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if IS_CUDA_BUILD:
        new = {name: one for name, one in sorted(found.items()) if name == "torch" or name not in locked(LOCK)}
        CUDA_METADATA.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
        name, head = CUDA_LOCK, f"# What the CUDA build of torch needs more (Linux). Made by: {COMMAND}\n-r {LOCK}\n"
        versions = {package: one.version for package, one in new.items() if package != "torch"}
    else:
        name, head = LOCK, f"# All packages of the tests' environment (Python {python}). Made by: {COMMAND}\n"
        versions = {package: one.version for package, one in sorted(found.items())}
    lines = "".join(f"{package}=={version}\n" for package, version in versions.items())
    (REPOSITORY / name).write_text(head + lines, encoding="utf-8")
    print(f"{name}: {len(versions)} packages")


if __name__ == "__main__":
    try:
        write()
    except PackageNotFoundError as error:
        sys.exit(f"ERROR: {error} is not installed: pip install -r requirements-dev.txt.")
