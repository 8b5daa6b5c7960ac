"""An old Python, or a missing package: one sentence from every file that a user starts. Training needs no extra. Every
command is a verb of ``megatron-llama``, which is imported only when it is started."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from megatron import MODULES
from megatron_llama.__main__ import main
from megatron_llama.commands import VERBS, Verb, help_text, run, start, unknown
from tests.end_to_end.run_process import REPOSITORY, run_python
from tests.tool_entries import ENTRIES

ENTRY_FILES = sorted(
    str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "pretrain_llama.py", *REPOSITORY.glob("tools/*.py"))
)
MODULES_TO_START = ("megatron.operation.launch", "megatron.commands.pretrain_llama", "megatron_llama")
OLD = (
    "import runpy, sys; sys.version_info = (3, 10, 13, 'final', 0); name = sys.argv.pop(1)\n"
    "(runpy.run_path if name.endswith('.py') else runpy.run_module)(name, run_name='__main__')"
)
"""Starts a file or a module as Python 3.10 would."""
SENTENCE = re.compile(r"(?:.*\()?ImportError: (.*[.])\)?\n")


def sentence_of(*command: str) -> str:
    """The only line that ``command`` prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=60)
    found = SENTENCE.fullmatch(done.stderr)
    assert done.returncode == 1 and done.stdout == "" and found, done.stderr
    return found[1]


@pytest.mark.parametrize("entry", [*ENTRY_FILES, *MODULES_TO_START])
def test_the_packages_that_are_missing_are_named(entry: str) -> None:
    words = ["-m", entry] if entry in MODULES_TO_START else [entry]
    assert f"{sys.executable} has no torch, numpy, rich, " in sentence_of(sys.executable, "-S", *words)


@pytest.mark.parametrize("entry", [*ENTRY_FILES, *MODULES_TO_START])
def test_an_old_python_is_named(entry: str) -> None:
    assert f"needs Python 3.11 or later, and {sys.executable} is 3.10" in sentence_of(sys.executable, "-c", OLD, entry)


def test_one_missing_package_is_named_alone() -> None:
    code = (
        "from importlib import util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'yaml' else found(name)\n"
        "import megatron"
    )
    assert sentence_of(sys.executable, "-c", code).startswith(f"{sys.executable} has no yaml: activate")


def test_every_dependency_is_looked_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = [Requirement(one).name for one in project["dependencies"]]
    modules = {"pyyaml": "yaml", "protobuf": "google.protobuf"}
    assert sorted(MODULES) == sorted(modules.get(name, name) for name in packages)


# --- extras --------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_training_without_the_packages_of_the_extras(tmp_path: Path) -> None:
    flags = (
        "--model tiny --num-layers 1 --mock-data --vocab-size 100 --seq-length 16 --micro-batch-size 1 "
        "--global-batch-size 1 --train-iters 2 --log-interval 1 --lr 1e-3 --num-workers 0 --device cpu"
    )
    done = run_python("-m", "tests.package.without_extras", str(tmp_path), *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(re.findall(r"^(\w+): (.*)$", done.stdout, re.MULTILINE))
    assert said["plain"] == "0" and done.stdout.count("] iteration ") == 2
    assert said["wandb"] == said["tensorboard"] == "2" and said["plot"] != "0"
    errors = re.findall(r"^ERROR: (.*)$", done.stderr, re.MULTILINE)
    assert errors == [
        "--wandb-project needs wandb: pip install wandb.",
        "--tensorboard-dir needs TensorBoard: pip install tensorboard.",
        "--output needs matplotlib: pip install matplotlib.",
    ]
    assert said["schedule"] == "--png needs resvg_py and matplotlib: pip install resvg_py matplotlib."
    assert said["histogram"] == "--plot needs matplotlib: pip install matplotlib."
    assert said["zst"] == "corpus.jsonl.zst needs the package pyarrow: pip install pyarrow."
    assert said["parquet"] == "corpus.parquet needs the package pyarrow: pip install pyarrow."
    assert said["datasets"] == "--input dataset:... needs the package datasets: pip install datasets."


# --- verbs ---------------------------------------------------------------------------------------------------


def test_every_tool_has_a_verb() -> None:
    """A new tool needs a line in VERBS of megatron_llama/commands.py."""
    started = {(entry.module, entry.function) for entry in ENTRIES.values()}
    started |= {("megatron.commands.pretrain_llama", "run"), ("megatron.operation.launch", "run")}
    assert started == {(verb.module, verb.function) for verb in VERBS}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_function_of_a_verb_exists(verb: Verb) -> None:
    assert callable(getattr(import_module(verb.module), verb.function))


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
        "assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()"
    )
    done = run_python("-c", code)
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


@pytest.mark.parametrize("words", ["estimate failures --gpus 16384 --days 54", "estimate compute --help"])
def test_a_reader_that_has_read_enough_is_no_error(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command = [sys.executable, "-m", "megatron_llama", *words.split()]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")
