"""Tables of runs that strangers write: any cell gives a time or a reason, and no exception."""

import csv
import io
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.published.table import TABLE
from megatron.commands.predict_runs import predict_rows, report
from megatron.errors import ConfigError
from megatron.planner.step_time.published import PublishedRun, read_published
from tests.end_to_end.run_process import REPOSITORY

with TABLE.open(newline="", encoding="utf-8") as _file:
    ROWS = list(csv.DictReader(_file))
COLUMNS = list(ROWS[0])
LLAMA = next(row for row in ROWS if row["model"] == "Llama3-8B" and row["source"] == "dgxc-benchmarking")
NUMBERS = ["0", "-1", "1", "3", "7.5", "1e3", "1e400", "nan", "inf", "-inf", " 8 ", "8 GPUs", "n/a", "None", "٣"]
NAMES = ["", "H100", "DGX-H100", "GB200", "GB300", "H100 PCIe", "a100", "MI300X"]
NAMES += ["fp8", "FP8-MX", "fp32", "full", "partial"]
EXPERTS = "the columns do not describe experts"
CELL = st.one_of(st.sampled_from(NUMBERS + NAMES), st.text(max_size=12), st.integers(-5, 10**7).map(str))
CHANGE = st.dictionaries(st.sampled_from(COLUMNS), CELL, max_size=6)
ROW = st.tuples(st.sampled_from(ROWS), CHANGE).map(lambda pair: pair[0] | pair[1])


def read(rows: Sequence[dict[str, str]], columns: Sequence[str] = COLUMNS) -> list[PublishedRun]:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return read_text(text.getvalue())


def read_text(text: str) -> list[PublishedRun]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "runs.csv"
        path.write_text(text, encoding="utf-8", newline="")
        return read_published(path)


def one(**cells: str) -> dict[str, float | str]:
    """The entry of a run of Llama 3 8B with these cells."""
    (entry,) = predict_rows(read([LLAMA | cells]))
    return entry


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=5))
@example(rows=[LLAMA | {"gpus": "1e15", "dp": "1e15"}])
@example(rows=[LLAMA | {"layers": "1e14", "hidden": "1e14", "seq": "1e14", "ffn": "1e14"}])
def test_every_row_has_a_time_or_a_reason_in_order(rows: list[dict[str, str]]) -> None:
    runs = read(rows)
    entries = predict_rows(runs)
    assert len(entries) == len(runs) == len(rows)
    for entry in entries:
        assert set(entry) in ({"step_time_s"}, {"reason"})
        if "reason" in entry:
            assert entry["reason"] and isinstance(entry["reason"], str)
        else:
            assert 0 < float(entry["step_time_s"]) < math.inf
    assert json.loads(json.dumps(entries, allow_nan=False)) == entries
    assert f"of {len(rows)} runs are predicted" in report(runs, entries)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=5))
def test_a_row_has_the_same_entry_alone_and_among_others(rows: list[dict[str, str]]) -> None:
    together = predict_rows(read(rows))
    alone = [predict_rows(read([row]))[0] for row in rows]
    for first, second in zip(together, alone):
        assert first == (second if "reason" in second else pytest.approx(second, rel=1e-9))


def test_measured_columns_and_the_text_of_the_row_do_not_change_a_prediction() -> None:
    usual = one()
    measured = dict.fromkeys(("step_time_s", "tokens_per_s_per_gpu", "mfu", "tflops_per_gpu", "memory_gb"), "")
    assert one(**measured) == one(step_time_s="fast", tokens_per_s_per_gpu="-3", confidence="?") == usual


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpus": "0"}, "gpus 0 is not a positive number"),
        ({"gpus": "nan"}, "gpus is not stated"),
        ({"layers": ""}, "layers is not stated"),
        ({"mbs": "many"}, "mbs many is not a positive number"),
        ({"gbs": "inf"}, "gbs inf is not a positive number"),
        ({"heads": "7.5"}, "heads 7.5 is not a whole number"),
        ({"tp": "3", "dp": ""}, "tp x pp x cp x dp is 6, but gpus is 8"),
        ({"gbs": "3"}, "gbs 3 is less than mbs x dp"),
        ({"gpu": "GB300"}, "there are no measurements of GPU GB300"),
        ({"gpu": "H100 PCIe"}, "there are no measurements of GPU H100 PCIe"),
        ({"precision": "nvfp4"}, "there are no measurements of precision nvfp4"),
        ({"gpu": "A100-80GB", "precision": "fp8"}, "A100-80GB has no FP8"),
        ({"gpu": "GB200", "precision": ""}, "the precision is not stated, and runs on GB200 use FP8 as often as bf16"),
        ({"gpu": "B200", "precision": ""}, "the precision is not stated, and runs on B200 use FP8 as often as bf16"),
        ({"where": "arXiv 2405.15362; ZB (half memory), 32 microbatches"}, "there are no measurements of schedule ZB"),
        ({"where": "Table 3; ZB-V"}, "there are no measurements of schedule ZB-V"),
        ({"where": "Table 3; V-Half"}, "there are no measurements of schedule V-Half"),
        (
            {"source": "megatron-sc21", "where": "arXiv 2104.04473 Tables 1-2; Table 2, ZeRO-3"},
            "there are no measurements of ZeRO-3 with Megatron-LM of 2021",
        ),
        ({"where": "DualPipeV"}, "there are no measurements of schedule DualPipeV"),
        ({"recompute": "every other layer"}, "recompute every other layer is not known: none, selective or full"),
        ({"model": "DeepSeek-V3"}, EXPERTS),
        ({"model": "Qwen3-30B-A3B"}, f"{EXPERTS}, and the shape is not that of the model of this name"),
        ({"ep": "4"}, EXPERTS),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_priced_says_why(cells: dict[str, str], reason: str) -> None:
    assert one(**cells) == {"reason": reason}


@pytest.mark.parametrize("label", ["ZB (handcrafted)", "ZB (auto)", "ZB (handcrafted/auto), 24 microbatches"])
def test_zero_bubble_schedules_without_a_limit_have_the_time_of_zb_2p(label: str) -> None:
    pipeline = {"source": "zero-bubble", "pp": "8", "cp": "1", "dp": "1"}
    rows = [one(**pipeline, where=f"arXiv 2401.10241; {name}") for name in (label, "ZB-2p", "ZB-1p", "1F1B")]
    times = [float(row["step_time_s"]) for row in rows]
    assert times[0] == times[1] < times[2] < times[3]


FP8 = ("FP8", "fp8-cs", "FP8-MX", "float8")
SPELLINGS = (("gpu", "H100"), ("gpu", "DGX-H100 80GB"), ("gpu", " h100-80gb "), ("precision", "BF16"), ("vp", "n/a"))


@pytest.mark.parametrize(("name", "value"), [*SPELLINGS, ("precision", ""), *(("precision", recipe) for recipe in FP8)])
def test_other_spellings_have_the_same_time(name: str, value: str) -> None:
    usual, in_fp8 = one(), one(precision="fp8")
    assert one(**{name: value}) == (in_fp8 if value in FP8 else usual)
    assert usual != in_fp8


def test_zero_3_of_torchtitan_is_fsdp_and_the_title_of_a_document_is_no_label() -> None:
    of_titan = {"source": "torchtitan", "where": "benchmarks/*.md; FSDP + compile"}
    assert one(**of_titan | {"where": f"{of_titan['where']}, ZeRO-3 style FSDP"}) == one(**of_titan)
    of_megatron = {"source": "megatron-sc21", "where": "PTD-P and ZeRO-3; Table 2, PTD parallelism"}
    assert one(**of_megatron) == one(source="megatron-sc21", where="Table 2, PTD parallelism")


def test_experts_of_a_known_model_are_priced() -> None:
    mixtral = {
        "model": "Mixtral 8x7B", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336",
        "gpus": "64", "cp": "1", "dp": "64", "ep": "8", "gbs": "256",
    }  # fmt: skip
    dense = float(one(**mixtral | {"model": "Llama", "ep": "1"})["step_time_s"])
    # Two experts of a token: about twice the products of the MLP, and the dispatch.
    assert 1.3 * dense < float(one(**mixtral)["step_time_s"]) < 4 * dense
    assert one(**mixtral | {"ep": "3"}) == {"reason": "ep 3 does not divide 64 ranks and 8 experts"}


def test_short_rows_and_missing_columns_are_rows_without_a_statement() -> None:
    text = "source,model,layers,hidden,gpu,gpus\nme,GPT,24\nme,GPT,24,1024,H100,8,too,many\n"
    short, long = (run.reason for run in read_text(text))
    assert short == "hidden, heads, seq, gpu, gpus, gbs is not stated"
    assert long == "heads, seq, gbs is not stated"
    assert predict_rows(read([])) == []


def test_the_tool_predicts_rows_without_measurements_and_says_why_not(tmp_path: Path) -> None:
    chosen = [dict(ROWS[number]) for number in (0, 130, 400)]
    for row in chosen:
        row |= dict.fromkeys(("step_time_s", "tokens_per_s_per_gpu", "mfu", "tflops_per_gpu", "memory_gb"), "")
    unknown = chosen[0] | {"gpu": "MI300X"}
    table, out = tmp_path / "runs.csv", tmp_path / "out.json"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([*chosen, unknown, chosen[1] | {"source": "somebody", "where": "NeMo"}])
    command = [sys.executable, "tools/predict_runs.py", "--csv", str(table), "--json", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(out.read_text())["rows"]
    assert "4 of 5 runs are predicted" in done.stdout
    for number, row in zip((0, 130, 400), found):
        assert row["step_time_s"] == pytest.approx(float(ROWS[number]["step_time_s"]), rel=0.15)
    assert found[3]["reason"] == "there are no measurements of GPU MI300X"
    assert found[4] == found[1]


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="has no column gpu, gpus, hidden"):
        read_published(table)
    with pytest.raises(ConfigError, match="cannot be read as a CSV file"):
        read_published(tmp_path / "missing.csv")
