"""``--dry-run`` as a user calls it: what it reports, what it refuses, what it leaves alone, and its page."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.architectures.catalog import PRESETS
from megatron.commands.pages.dry_run_report import groups
from megatron.commands.planning import plan_command
from megatron.config.command_line import CommandLine, parse_command_line
from megatron.config.dry_run import ALLOWANCE
from megatron.core.topology import RankGrid
from megatron.planner.search.enumeration import require_layout
from megatron.planner.search.layout import Job
from megatron.planner.simulated_rank import with_local_layers
from megatron.planner.step_time.workload import read_cluster
from megatron.reports.svg import gib
from tests.end_to_end.megatron_recipe import recipe
from tests.end_to_end.run_process import Outcome, call_training
from tests.planner.planned_run import planned_run
from tests.reports.load_page import WIDTHS, Page, assert_loads_nothing, copied, cut_off, load, needs_browser

pytestmark = pytest.mark.processes

RUN = "--bf16 --seq-length 256 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
TINY = f"--model tiny --mock-data --vocab-size 1000 {RUN}"


def dry_run(flags: str, *more: str) -> Outcome:
    return call_training([*flags.split(), "--dry-run", *more])


def report(flags: str, directory: Path) -> dict[str, Any]:
    path = directory / "report.json"
    outcome = dry_run(flags, "--dry-run-json", str(path))
    assert outcome.exit_code == 0, outcome.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


PUBLISHED = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800}


@pytest.mark.parametrize(("model", "parameters"), PUBLISHED.items())
def test_the_largest_models_have_the_published_parameters(model: str, parameters: int, tmp_path: Path) -> None:
    """One stage of a deep pipeline is quick; the corpus and the tokenizer are not here. Mock data has the vocabulary of
    the model, unless a flag states another."""
    layers = int(str(PRESETS[model]["num_layers"])) // 2
    stages = f"{RUN} --tensor-model-parallel-size 8 --pipeline-model-parallel-size {layers} --num-gpus {8 * layers}"
    elsewhere = "--data-path nowhere --tokenizer-type TikTokenizer --tokenizer-model nowhere/tokenizer.model"
    found = report(f"--model {model} {elsewhere} {stages} --dry-run-rank {8 * layers - 1}", tmp_path)
    assert found["total_parameters"] == parameters
    assert list(found["memory_bytes"]) == [str(layers - 1)]
    found = report(f"--model {model} --mock-data {stages} --dry-run-rank 0", tmp_path)
    assert found["total_parameters"] == parameters
    smaller = report(f"--model {model} --mock-data --vocab-size 128000 {stages} --dry-run-rank 0", tmp_path)
    rows = 128256 - 128000
    assert parameters - smaller["total_parameters"] == 2 * rows * int(str(PRESETS[model]["hidden_size"]))


def test_a_report_says_what_a_run_needs(tmp_path: Path) -> None:
    found = report(f"{TINY} --num-gpus 16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", tmp_path)
    assert found["fits"]
    assert found["plan_command"] is None
    assert found["layers"] == [[2], [2]]
    assert found["num_microbatches"] == 1
    assert found["bubble_fraction"] == pytest.approx(0.5, abs=0.1)
    tp, dp = found["layout"]["tp"], found["layout"]["dp"]
    assert (tp["ranks"], tp["in_node"]) == ([0, 1], True)
    assert (dp["ranks"], dp["in_node"]) == ([0, 4, 8, 12], False)
    for stage, sizes in found["memory_bytes"].items():
        parameters = found["parameters_per_rank"][stage]
        assert sizes["total"] == sum(size for kind, size in sizes.items() if kind != "total")
        assert sizes["allowance"] == ALLOWANCE
        assert sizes["gradients"] == pytest.approx(4 * parameters, rel=0.01)
        assert sizes["moments"] == pytest.approx(8 * parameters, rel=0.01)
        assert set(found["bytes_sent"][stage]) == {"tp", "pp", "dp", "several"}
    # Half of the sequences' attention; 6 FLOPs per parameter of a product.
    assert found["model_flops_per_step"] == found["model_flops_per_token"] * found["global_batch_size"] * 256


def test_fp8_copies_of_weights_are_counted_under_weights(tmp_path: Path) -> None:
    """A byte for each weight of a layer's GEMMs, and a byte for its transpose."""
    in_fp8 = "--fp8-format hybrid --fp8-recipe tensorwise"
    plain, quantized = (
        report(f"{TINY} --global-batch-size 4 --num-gpus 1 {flags}", tmp_path)["memory_bytes"]["0"]
        for flags in ("", in_fp8)
    )
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 384
    assert quantized["weights"] - plain["weights"] == 4 * layer * 2


@pytest.mark.slow(reason="simulates two steps of 32 layers in FP8")
def test_megatron_lms_recipe_for_8b_in_fp8_fits_its_gpus(tmp_path: Path) -> None:
    found = report(f"{' '.join(recipe(tmp_path))} --num-gpus 8", tmp_path)
    sizes = found["memory_bytes"]["0"]
    assert found["fits"] and sizes["total"] < 77 * 2**30
    # Two bytes per weight: bf16, or FP8 and its transpose. Gradients are bf16.
    parameters = found["parameters_per_rank"]["0"]
    assert parameters == pytest.approx(8.03e9, rel=1e-3)
    assert sizes["weights"] == pytest.approx(2 * parameters, rel=1e-3)
    assert sizes["gradients"] == pytest.approx(2 * parameters, rel=1e-3)


SMALL = (
    "--num-layers 3 --hidden-size 2048 --num-attention-heads 16 --vocab-size 32000 --mock-data --bf16 "
    "--seq-length 1024 --train-iters 10 --lr 1e-3"
)
OF_THE_LAYOUT = (
    "--pipeline-model-parallel-size 2 --micro-batch-size 2 --pipeline-schedule=1f1b --recompute-activations "
    "--sequence-parallel --overlap-grad-reduce --account-for-loss-in-pipeline-split --num-gpus 4"
)


def test_what_does_not_fit_is_told_with_the_search_that_finds_what_fits(tmp_path: Path) -> None:
    """Its words, pasted, find layouts of the same job that fit the same memory."""
    flags = f"{SMALL} {OF_THE_LAYOUT}"
    limit = report(flags, tmp_path)["memory_bytes"]["1"]["total"] / 2**30 - 0.1
    found = report(f"{flags} --gpu-memory-gb {limit}", tmp_path)
    assert not found["fits"] and found["missing_bytes"] > 0
    words = dry_run(f"{flags} --gpu-memory-gb {limit}").stdout
    assert f"does not fit {limit:.2f} GiB: tightest on stage {found['tightest_stage']}" in words
    command = found["plan_command"]
    assert f"\nto search the layouts that fit: {command}\n" in words
    python, script, *pasted = shlex.split(command)
    assert (python, script) == ("python", "pretrain_llama.py")
    # Of them, few layouts are enough here.
    few = "--tensor-model-parallel-size 1 --context-parallel-size 1 --micro-batch-size 1"
    outcome = call_training([*pasted, *few.split(), "--plan-json", str(tmp_path / "plan.json")])
    assert outcome.exit_code == 0, outcome.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["num_gpus"], plan["seq_length"], plan["global_batch_size"]) == (4, 1024, found["global_batch_size"])
    assert plan["layouts"] and all(one["memory_gib"] <= limit for one in plan["layouts"])
    assert {one["flags"]["pipeline-model-parallel-size"] for one in plan["layouts"]} == {1}  # of three layers


@pytest.mark.parametrize(
    ("flags", "kept", "batch"),
    [
        (OF_THE_LAYOUT, "", 4),
        (f"{OF_THE_LAYOUT} --global-batch-size 16", "--global-batch-size 16", None),
        ("--num-gpus 4 --micro-batch-size 1 --step-batch-size-schedule 0:4,100K:8", "", 8),
        (
            "--num-gpus 4 --micro-batch-size 1 --context-parallel-size 4 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2 --dry-run-json report.json --dry-run-whole",
            "",
            1,
        ),
        (
            "--num-gpus 4 --micro-batch-size 1 --cp-comm-type allgather --gpu-memory-gb 4.1 --gpus-per-node 2 "
            "--no-overlap-p2p-communication --use-torch-fsdp2 --no-torch-fsdp2-reshard-after-forward "
            "--defer-grad-reduce --rank-order tp-cp-ep-dp-pp --transformer-impl=local --grad-reduce-in-bf16",
            "--cp-comm-type allgather --gpu-memory-gb 4.1 --gpus-per-node 2 --no-overlap-p2p-communication "
            "--transformer-impl local --grad-reduce-in-bf16",
            4,
        ),
    ],
)
def test_the_search_has_the_flags_of_the_run_without_those_of_its_layout(
    flags: str, kept: str, batch: int | None
) -> None:
    words = [*SMALL.split(), *flags.split(), "--dry-run"]
    of_batch = [] if batch is None else ["--global-batch-size", str(batch)]
    found = shlex.split(plan_command(planned_run(" ".join(words), 4), CommandLine.of(words)))
    assert found[2:] == [*SMALL.split(), *kept.split(), *of_batch, "--plan", "--num-gpus", "4"]
    parsed = parse_command_line(found[2:])
    parsed.plan.check()
    job = Job.of(CommandLine.of(found[2:-3]), read_cluster("h100"), 4)
    require_layout(job)
    assert job.cluster.node_size == (2 if "gpus_per_node" in job.given else 8)


def test_nothing_is_written_or_read(tmp_path: Path) -> None:
    save, load = tmp_path / "save", tmp_path / "load"
    outcome = dry_run(f"{TINY} --num-gpus 2", "--save", str(save), "--load", str(load), "--wandb-project", "none")
    assert outcome.exit_code == 0, outcome.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (f"{TINY} --num-gpus 6 --tensor-model-parallel-size 4", "6 processes are not a multiple"),
        (f"{TINY} --num-gpus 4 --global-batch-size 12", "global-batch-size"),
        (f"{TINY} --num-gpus 2", "--dry-run is one process"),
        (
            f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --data-path nowhere {RUN} --num-gpus 1 "
            "--tokenizer-type TikTokenizer --tokenizer-model nowhere",
            "--dry-run has no vocabulary size: nowhere does not exist",
        ),
        (f"{TINY} --num-gpus 1 --dry-run-json /dev/null/a.json", "--dry-run-json /dev/null/a.json cannot be written"),
        (f"{TINY} --num-gpus 1 --dry-run-html /dev/null/a.html", "--dry-run-html /dev/null/a.html cannot be written"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "one process" in sentence:
        monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = dry_run(flags)
    assert outcome.exit_code == 2
    assert sentence in outcome.stderr


# --- the page: it shows the figures of the report, and works in a browser -------------------------------------

LAYOUT = "--num-gpus 16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --global-batch-size 48"


def page_of(flags: str, directory: Path) -> tuple[str, dict[str, Any]]:
    """The page and the JSON report."""
    page = directory / "page.html"
    found = report(f"{TINY} {flags} --dry-run-html {page}", directory)
    return page.read_text(), found


def test_the_page_has_the_figures_of_the_report(tmp_path: Path) -> None:
    text, report = page_of(LAYOUT, tmp_path)
    assert_loads_nothing(text)
    page = Page(text)
    for sizes in report["memory_bytes"].values():
        for kind, size in sizes.items():
            assert gib(size) in page.text
            assert kind == "total" or not size or kind in page.text
        assert f"{gib(sizes['total'])} GiB ({sizes['total'] / report['gpu_memory_bytes']:.0%})" in page.text
    for sizes in report["bytes_sent"].values():
        assert all(gib(size) in page.text for axis, size in sizes.items() if axis != "several")
    for sizes in report["bytes_sent_by_link"].values():
        tips = page.attributes["data-tip"]
        for link, name in (("in node", "inside a node"), ("across", "across nodes")):
            assert any(f"{name}\n{gib(sizes[link])} GiB" in tip for tip in tips)
    for axis, group in report["layout"].items():
        assert f"({axis})" in page.text and " ".join(map(str, group["ranks"])) in page.text
    assert f"{report['bubble_fraction']:.1%}" in page.text
    assert f"GPU: {gib(report['gpu_memory_bytes'])} GiB" in page.text
    for stage, count in report["parameters_per_rank"].items():
        assert f"{count:,}" in page.text and f"stage {stage}" in page.text
    # The timeline has a box for every pass of both stages.
    for kind in ("forward", "backward"):
        for microbatch in range(report["num_microbatches"]):
            boxes = [tip for tip in page.attributes["data-tip"] if tip.startswith(f"{kind}, microbatch {microbatch}\n")]
            assert len(boxes) == 2


def test_the_search_for_what_fits_can_be_copied(tmp_path: Path) -> None:
    text, report = page_of(f"{LAYOUT} --gpu-memory-gb 4", tmp_path)
    assert not report["fits"] and "Does not fit" in text
    assert copied(text) == [report["plan_command"]]
    assert not copied(page_of(LAYOUT, tmp_path)[0])


@needs_browser
def test_the_page_of_a_dry_run_works_in_a_browser(tmp_path: Path) -> None:
    text, _ = page_of(f"{LAYOUT} --gpu-memory-gb 4", tmp_path)
    for width in WIDTHS:
        assert load(text, width)["tip"]
    assert cut_off(text) <= 0


@pytest.mark.parametrize(
    ("recipe_name", "planned"),
    [("blockwise", "tensorwise"), ("mxfp8", "tensorwise"), ("delayed", "delayed"), ("tensorwise", "tensorwise")],
)
def test_layers_of_transformer_engine_are_planned_as_local_ones(recipe_name: str, planned: str) -> None:
    """With the run's recipe, if local layers have it."""
    flags = f"{TINY} --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe {recipe_name}"
    config = with_local_layers(parse_command_line([*flags.split(), "--global-batch-size", "2"]))
    assert (config.model.transformer_impl, config.precision.fp8_recipe) == ("local", planned)


def test_the_layout_says_whether_all_groups_stay_in_a_node() -> None:
    """With three stages, those of the first are 0 1 6 7 12 13 18 19 …: the second EP group is on two nodes."""
    grid = RankGrid(tp=2, pp=3, dp=8, ep=4)
    assert grid.group(0, ("ep",)) == (0, 1, 6, 7)
    architecture = SimpleNamespace(num_experts=4)
    plan: Any = SimpleNamespace(
        run=SimpleNamespace(grid=grid, architecture=architecture, node_size=8), stages=[SimpleNamespace(rank=0)]
    )
    layout = groups(plan)
    assert layout["ep"] == {"size": 4, "groups": 12, "ranks": [0, 1, 6, 7], "in_node": False}
    assert layout["tp"]["in_node"] and layout["etp"]["in_node"] and not layout["edp"]["in_node"]
    architecture.num_experts = None
    assert list(groups(plan)) == ["tp", "cp", "pp", "dp"]
