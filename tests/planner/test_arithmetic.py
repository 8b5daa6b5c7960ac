"""The commands of tools/estimate.py: the page that checks published figures with them, formulas beside their values,
and wrong input."""

import json
import math
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from megatron.command_line.parser import parse
from megatron.commands import simulate_run
from megatron.commands.estimate import COMMANDS, Activations, Bubble, TensorParallel, as_text, main
from megatron.planner.arithmetic import Figure, written
from megatron.planner.launches import axis_of
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.training.initialize import rank_grid
from tests.end_to_end.run_process import REPOSITORY

PAGE = (REPOSITORY / "docs/checking_the_lessons.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if "| `python tools/" in line]
OF_ESTIMATE = [row for row in ROWS if "estimate.py" in row[3]]
GPT3 = Activations(
    num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, tensor_model_parallel_size=8
)


@cache
def figures(command: str) -> tuple[Figure, ...]:
    """The figures of a command of the page."""
    program, tool, name, *words = shlex.split(command)
    assert (program, tool) == ("python", "tools/estimate.py")
    return tuple(parse(COMMANDS[name], None, words).figures())


def by_name(found: tuple[Figure, ...]) -> dict[tuple[str, str], float]:
    return {(one.name, one.column): one.value for one in found}


# --- the page ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_command_of_the_page_prints_what_is_right(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, right, reason, command = row
    _, tool, *words = shlex.split(command.strip("`"))
    assert (main if tool == "tools/estimate.py" else simulate_run.main)(words) == 0
    printed, numbers = capsys.readouterr().out, re.findall(r"`([^`]+)`", right)
    assert numbers and reason
    for number in numbers:
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d.,])", printed), (number, printed)


def test_every_row_of_the_page_is_run_and_every_command_is_in_it() -> None:
    tables = [
        line for line in PAGE.splitlines() if line.startswith("|") and not re.match(r"\| (---|the lessons)", line)
    ]
    assert len(ROWS) == len(tables) > 30 and all(len(row) == 4 for row in ROWS)
    assert {shlex.split(row[3].strip("`"))[2] for row in OF_ESTIMATE} == set(COMMANDS)


@pytest.mark.parametrize("command", sorted({row[3].strip("`") for row in OF_ESTIMATE}))
def test_a_formula_with_its_numbers_has_the_value_beside_it(command: str) -> None:
    """An independent evaluation of what is printed, also where a function of the project has computed the value."""
    for one in figures(command):
        if one.numbers:
            text = one.numbers.replace(" x ", " * ").replace(",", "")
            assert eval(text, vars(math).copy()) == pytest.approx(one.value, rel=3e-3, abs=1e-9), one.formula


# --- against the project's own accounts ----------------------------------------------------------------------


def test_activations_are_those_of_table_2_and_of_the_page_on_memory() -> None:
    """GPT-3 with a microbatch of one (arXiv 2205.05198); Llama 3 8B has the bytes that docs/memory.md measured."""
    outer, found = 2048 * 12288, by_name(tuple(GPT3.figures()))
    for name, terms in {
        "GPT": 10 + 24 / 8 + 80 / 8,
        "GPT, sequence parallel": 34 / 8 + 80 / 8,
        "GPT, recompute of attention": 10 + 24 / 8,
        "GPT, full recompute": 2,
    }.items():
        assert found[name, "a layer"] == outer * terms
        assert found[name, "96 layers"] == outer * terms * 96
    llama = by_name(tuple(Activations(model="llama3-8b").figures()))
    rows = {"as trained": 139_400, "as trained, recompute of attention": 131_080, "as trained, full recompute": 8_192}
    assert {name: llama[name, "a layer"] / 8192 for name in rows} == pytest.approx(rows)


def test_all_reduces_are_those_that_a_rehearsed_model_launches() -> None:
    command = TensorParallel(model="llama3-8b", tensor_model_parallel_size=2)
    job = command.job()
    units = UnitsOfRun(UnitRecords(job.vocabulary.size), job.config, rank_grid(job.config.parallel, 2))
    layer, ends = units.unit(units.division.units[0][0]), (units.ends.embedding, units.ends.output)
    found = by_name(tuple(command.figures()))
    size = found["tensor of a microbatch", ""]

    def count(*records: object) -> int:
        launched = Counter(
            launch.num_bytes
            for record in records
            for launches in record.launches  # type: ignore[attr-defined]
            for launch in launches
            if launch.group is not None and launch.group.kind == "all_reduce" and axis_of(launch.group.axes) == "tp"
        )
        return launched[size]

    assert count(layer) * 32 == found["all-reduces of the layers", ""]
    assert count(layer) * 32 + count(*ends) == found["all-reduces with the ends", ""]


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(8, 32, 2), (4, 16, 3)])
def test_bubbles_in_closed_form_are_those_of_the_schedules(stages: int, microbatches: int, chunks: int) -> None:
    found = by_name(tuple(Bubble(stages=stages, microbatches=microbatches, virtual=chunks).figures()))
    for name in ("1f1b", "interleaved"):
        for column in ("idle over total", "idle over work"):
            assert found[name, column] == pytest.approx(found[f"{name}, closed form", column])
    assert found["gpipe", "idle over work"] == pytest.approx((stages - 1) / microbatches)


# --- the command line ----------------------------------------------------------------------------------------


def test_json_has_the_figures_of_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "--parameters", "405e9", "--gpus", "8", "--json"]
    assert main(words) == main([*words, str(tmp_path / "memory.json")]) == 0
    printed, written_file = capsys.readouterr().out, (tmp_path / "memory.json").read_text()
    found = json.loads(printed)
    assert found["figures"] == json.loads(written_file)["figures"] and found["flags"]["gpus"] == 8
    text = as_text(figures("python tools/estimate.py memory --parameters 405e9 --gpus 8"))
    assert all(one["formula"].split(" = ", 1)[1] in text and one["source"] in text for one in found["figures"])
    assert {one["column"] for one in found["figures"]} == {"12 bytes", "16 bytes", "18 bytes"}


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (405e9, "405e9"),
        (3.645e25, "3.645e25"),
        (3.15e23, "3.15e23"),
        (25312500, "25,312,500"),
        (0, "0"),
        (1e-5, "10e-6"),
    ],
)
def test_numbers_have_four_digits(number: float, text: str) -> None:
    assert written(number) == text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("compute --model llama9 --tokens 1", "There is no model llama9: use one of tiny, llama2-7b"),
        ("tensor-parallel --model llama3-405b", "llama3.1-405b, llama3.2-1b"),
        (
            "memory --parameters 1 --cluster h300",
            "There is no cluster h300: use the path of a TOML file, or one of a100",
        ),
        ("roofline --model llama3-8b --cluster s3://a/b.toml", "--cluster s3://a/b.toml is a URL"),
        ("bubble --stages 4 --microbatches 8 --json s3://a/b.json", "--json s3://a/b.json is a URL"),
        ("compute --parameters 0 --tokens 1", "--parameters 0.0 must be positive"),
        ("compute --parameters -1 --tokens nan", "--tokens nan must be positive"),
        ("compute --tokens 1e12", "--parameters is missing: set it, or choose a preset"),
        ("compute --parameters 1 --tokens 1 --mfu 1.5", "--mfu 1.5 must be from 0 to 1"),
        ("compute --parameters 1 --tokens 1 --mfu 0.4 --days 3", "--mfu and --days each determine the rate"),
        ("compute --parameters 1e300 --tokens 1e300", "have no result (FLOPs of training is not finite)"),
        ("memory --parameters 1e300 --memory-gb 1e-300", "have no result"),
        ("activations --model llama3-8b --tensor-model-parallel-size 3", "32 is not divisible by --tensor-model"),
        ("activations --model llama2-7b", "--max-position-embeddings 4096 is below --seq-length 8192"),
        ("activations --hidden-size 64 --num-attention-heads 4", "--num-layers is missing"),
        ("communication --size-gb 1 --ranks 0", "--ranks 0 must be positive"),
        ("bubble --stages 4 --microbatches 8 --virtual 1", "interleaved needs several chunks per stage, not 1"),
        ("hybrid --parameters 1e9 --gpus 9", "--gpus 9 is not divisible by --group 8"),
        ("failures --gpus 8 --days -1", "--days -1.0 must be positive"),
    ],
)
def test_wrong_input_is_answered_with_a_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and not printed.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    (example,) = re.findall(rf"^python tools/estimate.py ({name} .*)$", capsys.readouterr().out, re.MULTILINE)
    assert main(example.split()) == 0
