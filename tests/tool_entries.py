"""What a script in ``tools/`` starts: a function of ``megatron/commands``, and the classes of its flags."""

import ast
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]


class Entry(NamedTuple):
    """A function, or a name such as ``main = partial(...)``, of a module."""

    module: str
    function: str

    @property
    def source(self) -> Path:
        return REPOSITORY / f"{self.module.replace('.', '/')}.py"

    def classes(self) -> list[ast.ClassDef]:
        """The dataclasses of the module that the function names, also through other functions of the module."""
        known: dict[str, ast.stmt] = {}
        for node in ast.parse(self.source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                known[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                known[node.targets[0].id] = node
        reached, waiting = dict[str, ast.stmt](), [self.function]
        while waiting:
            name = waiting.pop()
            if name in known and name not in reached:
                reached[name] = known[name]
                waiting += [part.id for part in ast.walk(known[name]) if isinstance(part, ast.Name)]
        return [node for node in reached.values() if isinstance(node, ast.ClassDef) and node.decorator_list]


def entry_of(script: Path) -> Entry:
    """What ``script`` imports from ``megatron.commands``."""
    body = ast.parse(script.read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron.")]
    assert len(imports) == 1 and len(imports[0].names) == 1, script
    return Entry(str(imports[0].module), imports[0].names[0].name)


ENTRIES = {script.stem: entry_of(script) for script in sorted((REPOSITORY / "tools").glob("*.py"))}
