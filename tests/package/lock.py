"""Prints ``requirements.lock``: the versions in this environment of all packages that ``requirements-dev.txt`` needs.

    python -m tests.package.lock > requirements.lock

Run it in a new environment of the CPU build of torch (``bash tests/run.sh`` makes one).
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
COMMAND = "python -m tests.package.lock > requirements.lock"


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


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Versions by name of the ``requirements`` and of everything that they need."""
    versions: dict[str, str] = {}
    waiting = [(requirement, frozenset({""})) for requirement in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, of_extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in of_extras):
            continue
        name, extras = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found = distribution(name)
        versions[name] = found.version.partition("+")[0]
        waiting += [(Requirement(one), extras) for one in found.requires or ()]
    return versions


def lock_text() -> str:
    """The content of the file."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"{name}=={version}" for name, version in sorted(closure(requirements_in("requirements-dev.txt")).items())]
    head = f"# All packages of the tests' environment (CPU build of torch, Python {python}). Made by:\n#   {COMMAND}\n"
    return head + "\n".join(lines) + "\n"


def locked() -> dict[str, str]:
    """Versions by name in the file."""
    text = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([\w.!+-]+)$", text, re.MULTILINE))


if __name__ == "__main__":
    try:
        print(lock_text(), end="")
    except PackageNotFoundError as error:
        sys.exit(f"ERROR: {error} is not installed: pip install -r requirements-dev.txt.")
