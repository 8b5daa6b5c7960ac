"""Recipes of Megatron-LM's functional tests start after one edit, and their values mean the same.

``recipes/megatron_functional_tests.json`` has the flags (and nothing else) of the files
``tests/functional_tests/test_cases/gpt/*/model_config.yaml`` of NVIDIA/Megatron-LM (BSD-3-Clause and Apache-2.0).

``--explain-flags`` reads a script as bash does: its flags are those that the programs of the script receive. Every
script of ``recipes/shell_scripts.txt`` runs in bash, too, with stubs in place of ``torchrun``, ``python``, ``srun``.
"""

import os
import shutil
from pathlib import Path

import pytest

from megatron.command_line.words import split_words
from megatron.commands.explain_flags import OTHER_DEFAULTS, explain, explain_files, recorded
from megatron.commands.pretrain_llama import main
from megatron.config.bash.syntax import parse
from megatron.config.command_line import CommandLine
from megatron.config.megatron_lm import NO_EFFECT, remedy_of
from megatron.config.recipes import ABSENT_ARCHITECTURES, DATA_FLAGS, Recipe, edited, read_recipes, script_recipe
from megatron.config.run_parser import RUN_PARSER
from megatron.errors import ConfigError
from tests.config.flag_values import assert_same, value_in

RECIPES = Path(__file__).parent / "recipes/megatron_functional_tests.json"
ALL = {name: recipe.words for name, recipe in read_recipes(RECIPES, {}).by_name.items()}
DENSE = {name: words for name, words in ALL.items() if "--num-experts" not in words}


def starts(words: list[str]) -> bool:
    config = CommandLine.of(words).parse().config
    return not explain(words, config.parallel.least_world_size(bool(config.model.num_experts))).corrections


def test_95_per_cent_of_the_recipes_without_experts_start_after_one_edit() -> None:
    assert (len(ALL), len(DENSE)) == (158, 153)
    starting = [name for name, words in DENSE.items() if starts(edited(words))]
    assert len(starting) >= 0.95 * len(DENSE), sorted(set(DENSE) - set(starting))
    experts = [words for name, words in ALL.items() if name not in DENSE]
    assert all(starts(edited(words)) for words in experts)
    unedited = [name for name, words in DENSE.items() if starts(words)]
    assert 0.88 * len(DENSE) < len(unedited) < len(starting), "the others name architectures that are not there"


def test_the_edit_takes_out_architectures_and_files_alone() -> None:
    absent = {flag for flags in ABSENT_ARCHITECTURES.values() for flag in flags.split()}
    for words in ALL.values():
        before = [given for given in split_words(words) if given.flag not in absent | DATA_FLAGS | {"--tokenizer-type"}]
        after = [given for given in split_words(edited(words)) if given.flag != "--rotary-percent"]
        assert [given for given in after if given.flag in {one.flag for one in before}] == [
            given._replace(values=tuple(value.replace("${REPEAT}", "1") for value in given.values)) for given in before
        ]
        added = {given.flag for given in after} - {given.flag for given in before}
        assert added <= {"--mock-data", "--vocab-size", "--tokenizer-type"}


def test_the_values_of_every_recipe_are_in_their_fields() -> None:
    """With an independent reading of the values; a flag that is accepted and dropped would be found."""
    compared = 0
    for name, words in DENSE.items():
        line = CommandLine.of(edited(words)).parse()
        wrong = " ".join(sentence for error in line.mistakes for sentence in error.sentences)
        for given in split_words(edited(words)):
            if given.flag in NO_EFFECT:
                assert given.as_typed in line.no_effect, name
            elif given.flag in RUN_PARSER.spellings:
                assert_same(value_in(line.config, given.flag), given.values)
                compared += 1
            else:
                assert given.flag in wrong, (name, given)
    assert compared > 6000


def test_a_file_of_words_is_read() -> None:
    text = "# flags\n--lr 1e-3\n--bf16 # half\n--pipeline-model-parallel-layout Et|(tt|)*2,L\n"
    words = ["--lr", "1e-3", "--bf16", "--pipeline-model-parallel-layout", "Et|(tt|)*2,L"]
    assert script_recipe(text, {}).words == words


YAML = RECIPES.with_name("model_config.yaml").read_text()


def test_a_recipe_is_explained_flag_by_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(YAML)
    assert main(["--explain-flags", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "  --hierarchical-context-parallel-sizes 2 2\n" in shown
    assert "  --use-persistent-ckpt-worker: --async-save has one writer process per rank\n" in shown
    assert f"  --swiglu: {OTHER_DEFAULTS['--swiglu']}\n" in shown
    assert shown.endswith("model_config.yaml would start: 12 kept, 1 without effect, 0 to correct.\n")
    assert main(["--explain-flags", str(path), "--spec", "a", "b", "--micro-batch-size", "0"]) == 2
    shown = capsys.readouterr().out
    assert f"  --spec of Megatron-LM is not supported: {remedy_of('--spec')}\n" in shown
    assert "  --micro-batch-size 0 must be at least 1.\n" in shown
    assert "would not start" in shown.splitlines()[-1]


def test_recipes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of a directory without flags are skipped."""
    texts = {"one": YAML, "two": YAML + "  --spec: a\n", "three": "MODEL_ARGS:\n", "four": "[1"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_config.yaml").write_text(text)
    assert explain_files(CommandLine.of(["--explain-flags", str(tmp_path)]), {}) == 2
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == f"    1  --spec of Megatron-LM is not supported: {remedy_of('--spec')}"
    assert f"{tmp_path}/three/model_config.yaml is no recipe (its MODEL_ARGS is empty)" in "\n".join(shown)
    assert shown[-1] == "1 of 2 recipes would start (50.0 %), 2 skipped."


EXPERTS = YAML + "  --num-experts: 8\n  --expert-model-parallel-size: 8\n  --pipeline-model-parallel-size: 4\n"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("", "model_config.yaml, on 32 GPUs (the fewest for its layout; --num-gpus sets another number)"),
        ("--num-gpus 64", "model_config.yaml, on 64 GPUs (--num-gpus)"),
        ("--num-gpus 48", "  The 12 ranks of a pipeline stage are not a multiple of --expert-tensor-parallel-size"),
    ],
)
def test_a_recipe_is_checked_on_the_gpus_that_are_given_or_the_fewest(
    tmp_path: Path, flags: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(EXPERTS)
    assert main(["--explain-flags", str(path), *flags.split()]) == (2 if "48" in flags else 0)
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("missing.yaml", None, "cannot be read"),
        ("a.yaml", "[1", "is no recipe"),
        ("a.yaml", "[1, 2]", "is no recipe"),
        ("a.json", "{", "is no recipe"),
        ("a.json", "[1]", "is no recipe"),
        ("a.json", '{"flags": 1, "recipes": {"a": 1}}', "is no recipe"),
    ],
)
def test_what_is_no_recipe_is_named(
    tmp_path: Path, name: str, text: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["--explain-flags", str(tmp_path / name)]) == 2
    assert f"{tmp_path / name} {sentence}" in capsys.readouterr().err
    assert main(["--explain-flags", str(tmp_path / "nowhere")]) == 2
    assert "cannot be read" in capsys.readouterr().err


# --- shell scripts -------------------------------------------------------------------------------------------

PARTS = Path(__file__).with_name("recipes").joinpath("shell_scripts.txt").read_text().split("#### ")[1:]
SCRIPTS = dict(part.split("\n", 1) for part in PARTS)
"""By name, which stands behind #### in the file."""
ENVIRONMENT = {"PATH": os.environ["PATH"], "OUTSIDE": "7", "PWD": "/tmp"}


def as_read(text: str) -> Recipe:
    return script_recipe(text, ENVIRONMENT)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flags_that_are_read_are_those_that_bash_gives_to_the_program(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.sh"
    script.write_text(SCRIPTS[name])
    environment = {**ENVIRONMENT, "PWD": str(tmp_path)}
    read, ran = script_recipe(SCRIPTS[name], environment), recorded(script, environment).by_name["train.sh"]
    assert (read.words, read.num_ranks) == (ran.words, ran.num_ranks)
    assert read.words


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        (
            "if [ -f corpus.bin ]; then A=(--data-path corpus); else A=(--mock-data); fi\n",
            "line 1: whether [ -f corpus.bin ] holds is not known without running the script: the commands after it "
            "are left out.",
        ),
        (
            'A=(--mock-data)\nif [ -n "$PROJECT" ]; then\n  A+=(--wandb-project x)\nfi\n',
            'line 2: [ -n "$PROJECT" ] is read with $PROJECT empty: the commands after it are left out.',
        ),
        (
            "A=(--mock-data)\ncase $(hostname) in a*) A+=(--bf16) ;; esac\n",
            "line 2: the value of $(hostname) is not known: no branch of case is read.",
        ),
        ("A=(--mock-data)\nsource ./cluster.sh\n", "line 2: ./cluster.sh is not read."),
        ("A=(--mock-data $EXTRA)\n", "$EXTRA: no value is known, so the text stands in the flags."),
    ],
)
def test_what_cannot_be_decided_is_said(text: str, remark: str) -> None:
    recipe = as_read(text + "torchrun pretrain_small.py ${A[@]}\n")
    assert recipe.remarks == (remark,)
    assert recipe.words == ["--mock-data"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # A test that changes nothing is not mentioned.
        (
            '[ -d "$1" ] || mkdir "$1"\nif [ ! -f x.py ]; then echo no; exit 1; fi\ntorchrun pretrain_small.py --bf16',
            "--bf16",
        ),
        # The program is read where only one branch starts it.
        ("if [ -f a ]; then torchrun pretrain_small.py --bf16; else exit 1; fi\n", "--bf16"),
        # The text of an unknown value stays where a flag needs it.
        (
            "torchrun pretrain_small.py --lr $LR $MORE --data-path 0.5 $A $MORE --bf16 $MORE\n",
            "--lr $LR --data-path 0.5 $A $MORE --bf16",
        ),
        # A script without a program gives the flags of its variables.
        ('MODEL="--num-layers 4"\nA=(--bf16)\nNAME=x\n', "--num-layers 4 --bf16"),
    ],
)
def test_flags_are_read_where_something_is_not_known(text: str, words: str) -> None:
    recipe = as_read(text)
    assert recipe.words == words.split()
    if "torchrun" not in text:
        assert recipe.remarks == ("The script starts no Python file: the flags of all its variables are read.",)
    elif "mkdir" in text:
        assert not recipe.remarks


@pytest.mark.parametrize("text", ["if true; then\n", "A=(1\n", "echo 'a\n", "case x in\n", "echo )\n", "[[ a\n"])
def test_text_that_is_no_script_is_named_with_its_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"line [12]"):
        parse(text)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="runs a script")
def test_a_script_is_run_only_if_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"touch {tmp_path}/executed\nA=$(echo --bf16; python -c 'print(\"--seed 3\")')\ntorchrun pretrain_x.py $A\n"
    )
    assert main(["--explain-flags", str(script)]) == 2
    assert "$(echo --bf16" in capsys.readouterr().out
    assert not (tmp_path / "executed").exists()
    main(["--explain-flags", str(script), "--explain-run-script"])
    assert "--bf16\n  --seed 3\n" in capsys.readouterr().out
    assert (tmp_path / "executed").exists()


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="runs a script")
def test_a_script_that_starts_nothing_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("echo no corpus >&2\nexit 3\n")
    with pytest.raises(ConfigError, match=r"ended with 3 and started no Python file by .*\(no corpus\)"):
        recorded(script, ENVIRONMENT)
    with pytest.raises(ConfigError, match="--explain-run-script runs a shell script"):
        recorded(tmp_path, ENVIRONMENT)


def test_a_flag_with_a_blank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text('A=("--lr 1e-3")\ntorchrun pretrain_x.py --model tiny "${A[@]}"\n')
    assert main(["--explain-flags", str(script)]) == 2
    assert "'--lr 1e-3' is one word with a blank: write two words, or take the quotes" in capsys.readouterr().out
