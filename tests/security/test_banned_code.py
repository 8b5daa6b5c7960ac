"""No code of ours unpickles, evaluates or runs what it reads: the syntax trees of all files are searched.

``docs/security.md`` states the rule. An exception is a row of ``ALLOWED`` with its reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for place in ("megatron", "megatron_llama", "tools", "benchmarks", "pretrain_llama.py")
    for path in ([REPOSITORY / place] if place.endswith(".py") else (REPOSITORY / place).rglob("*.py"))
)

MODULES = (
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"),
    "pickletools",
)
"""Modules whose readers execute what they read, and the one that decodes pickles without executing them."""

BUILTINS = ("eval", "exec", "compile", "__import__")
"""Builtins that run text."""

ATTRIBUTES = {
    f"{module}.{name}"
    for module, names in {
        "torch": "load",
        "yaml": "load_all unsafe_load unsafe_load_all full_load full_load_all",
        "os": "system popen",
        "shutil": "unpack_archive",
        "subprocess": "getoutput getstatusoutput",
        "pandas": "read_pickle",
        "runpy": "run_path run_module",
        "torch.distributed": "all_gather_object gather_object scatter_object_list broadcast_object_list "
        "send_object_list recv_object_list",
    }.items()
    for name in names.split()
}
"""Attributes of modules, whatever they are called with."""

METHODS = ("extractall",)
"""Methods of any object: tarfile.TarFile and zipfile.ZipFile unpack outside of their directory."""

YAML_LOADERS = ("SafeLoader", "CSafeLoader", "BaseLoader", "CBaseLoader")

COMPUTED_IMPORT = "importlib.import_module of a computed name"

_FROM_RANKS = "unpickles what the ranks of the run send, not files: see docs/security.md"

ALLOWED = {
    ("megatron/core/control.py", "torch.distributed.all_gather_object"): _FROM_RANKS,
    ("megatron/core/control.py", "torch.distributed.broadcast_object_list"): _FROM_RANKS,
    ("megatron/data/data_module.py", "runpy.run_path"): "the file that the user names by --data-module",
    ("megatron/operation/warm.py", "runpy.run_path"): "the program that the launcher was given",
    ("megatron/operation/warm.py", "runpy.run_module"): "the program that the launcher was given",
    ("megatron_llama/commands.py", COMPUTED_IMPORT): "imports the modules of its own table",
    ("megatron_llama/__init__.py", COMPUTED_IMPORT): "imports the modules of its own table",
    ("megatron_llama/course/__main__.py", COMPUTED_IMPORT): "imports the modules of its own lessons",
    ("megatron/core/device.py", COMPUTED_IMPORT): "its callers name optional packages by literals",
    ("megatron/schedules/catalog/__init__.py", COMPUTED_IMPORT): "imports the modules of its own catalog",
    ("benchmarks/lib/peers/megatron_core.py", COMPUTED_IMPORT): "its callers name modules of megatron-core by literals",
    ("megatron/update_rules/rule.py", COMPUTED_IMPORT): "imports the modules of its own room",
    ("benchmarks/gpu_lines/__main__.py", COMPUTED_IMPORT): "imports what its own tables of lines name",
    ("megatron/checkpoint/megatron_lm/safe_pickle.py", "import pickletools"): (
        "reads Megatron-LM's checkpoints: decodes opcodes, imports and calls nothing"
    ),
    ("benchmarks/lib/scaling_checkpoint.py", "import pickle"): "measures lists that ranks send; it has just made them",
    ("benchmarks/lib/scaling_start.py", "import pickle"): "counts the bytes that ranks send, and reads none",
    ("benchmarks/lib/checkpoint_contenders.py", "torch.load"): "reads what it has just written, with weights_only=True",
}
"""Reason by file (relative to the repository) and finding."""


def aliases_of(tree: ast.AST) -> dict[str, str]:
    """The full name behind each name that an import binds."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.partition(".")[0]
                found[bound] = name.name if name.asname else bound
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                found[name.asname or name.name] = f"{node.module}.{name.name}"
    return found


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """``module.attribute`` as the code means it; empty for what is no such name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def banned_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [name.name for name in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
    else:
        return
    for name in names:
        for module in MODULES:
            if module in name.split("."):
                yield f"import {module}"


def banned_names(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Functions that are banned however they are called, even if they are only handed on."""
    is_builtin = isinstance(node, ast.Name) and node.id in BUILTINS and node.id not in aliases
    if is_builtin and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    if isinstance(node, ast.Name | ast.Attribute):
        owner, _, attribute = dotted(node, aliases).rpartition(".")
        if owner == "builtins" and attribute in BUILTINS:
            yield attribute
        if f"{owner}.{attribute}" in ATTRIBUTES:
            yield f"{owner}.{attribute}"
    if isinstance(node, ast.Attribute) and node.attr in METHODS:
        yield node.attr


def banned_calls(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    name, keywords = dotted(node.func, aliases), {keyword.arg: keyword.value for keyword in node.keywords}
    if name == "numpy.load" and not is_false(keywords.get("allow_pickle")):
        yield "numpy.load without allow_pickle=False"
    elif "allow_pickle" in keywords and not is_false(keywords["allow_pickle"]):
        yield "allow_pickle"
    if name == "importlib.import_module" and not (node.args and isinstance(node.args[0], ast.Constant)):
        yield COMPUTED_IMPORT
    if name == "yaml.load":
        loader = node.args[1] if len(node.args) > 1 else keywords.get("Loader")
        if loader is None or dotted(loader, aliases).rpartition(".")[2] not in YAML_LOADERS:
            yield "yaml.load without a safe loader"
    for keyword in ("shell", "trust_remote_code"):
        if keyword in keywords and not is_false(keywords[keyword]):
            yield f"{keyword}=True"


def findings(source: str) -> list[str]:
    """What a file holds that is banned, each as ``LINE: WHAT``."""
    tree = ast.parse(source)
    aliases = aliases_of(tree)
    found = [
        f"{getattr(node, 'lineno', 0)}: {what}"
        for node in ast.walk(tree)
        for what in (*banned_imports(node), *banned_names(node, aliases), *banned_calls(node, aliases))
    ]
    return sorted(set(found))


def test_there_is_something_to_search() -> None:
    assert len(SOURCES) > 100
    assert REPOSITORY / "pretrain_llama.py" in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_file_executes_what_it_reads(path: Path) -> None:
    name = str(path.relative_to(REPOSITORY))
    found = findings(path.read_text(encoding="utf-8"))
    assert not [one for one in found if (name, one.partition(": ")[2]) not in ALLOWED]


def test_every_exception_is_still_needed() -> None:
    for name, what in ALLOWED:
        found = findings((REPOSITORY / name).read_text(encoding="utf-8"))
        assert what in [one.partition(": ")[2] for one in found], (name, what)


FORMS = [line for line in Path(__file__).with_name("banned_forms.txt").read_text().splitlines() if line[0] != "#"]
FORMS += [f"import {module} -> import {module}" for module in MODULES]


@pytest.mark.parametrize("form", FORMS)
def test_each_banned_form_is_found_and_what_only_looks_like_it_passes(form: str) -> None:
    source, is_banned, what = form.partition(" -> ")
    found = findings(source.replace("\\n", "\n"))
    assert [one.partition(": ")[2] for one in found] == ([what] if is_banned else [])


def test_a_finding_names_its_line() -> None:
    assert findings("import os\n\nos.system('ls')") == ["3: os.system"]
