"""``megatron-llama``: every command has a verb, which is imported only when it is started."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from megatron_llama.__main__ import main
from megatron_llama.commands import VERBS, Verb, help_text, run, start, unknown

REPOSITORY = Path(__file__).parents[2]
WITHOUT_VERB = {"flag_reference"}
"""Commands that write into a clone."""


def functions(source: Path) -> set[str]:
    """Functions of a module, and names such as ``main = partial(...)``."""
    body = ast.parse(source.read_text(encoding="utf-8")).body
    assigned = {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return assigned | {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_command_has_a_verb() -> None:
    """A new command needs a line in VERBS of megatron_llama/commands.py."""
    commands = {path.stem for path in (REPOSITORY / "megatron/commands").glob("*.py") if "main" in functions(path)}
    assert {f"megatron.commands.{name}" for name in commands - WITHOUT_VERB} == {
        verb.module for verb in VERBS if verb.module.startswith("megatron.commands.")
    }


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_function_of_a_verb_exists(verb: Verb) -> None:
    spec = find_spec(verb.module)
    assert spec is not None and spec.origin is not None
    assert verb.function in functions(Path(spec.origin))


@pytest.mark.parametrize("takes_arguments", [False, True])
def test_a_verb_gets_the_words_after_it(takes_arguments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(*arguments: list[str]) -> int:
        seen.extend([sys.argv, *arguments])
        return 75

    module = ModuleType("a_command")
    vars(module)["begin"] = main
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setattr(sys, "argv", ["megatron-llama", "act", "--lr", "1"])
    assert run(Verb("act", "a_command", "acts", "begin", takes_arguments), ["--lr", "1"]) == 75
    assert seen == [["megatron-llama act", "--lr", "1"], ["--lr", "1"]][: 1 + takes_arguments]


def test_help_has_a_line_for_each_verb_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['megatron-llama', '--help']\n"
        "from megatron_llama.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'tyro', 'rich'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == help_text()
    for verb in VERBS:
        assert f"  {verb.name} " in done.stdout and verb.summary in done.stdout


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean train?"),
        ("xyz", "megatron-llama --help lists the verbs."),
        ("--lr", "a verb comes first, for example megatron-llama train --lr …"),
    ],
)
def test_a_word_that_is_no_verb(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert unknown(word) == f"{word} is not a verb of megatron-llama: {hint}"
    assert start([word]) == 2
    assert capsys.readouterr().err.startswith("ERROR: ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == "megatron-llama 0.1.0\n"
