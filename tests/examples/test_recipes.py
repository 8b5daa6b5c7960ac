"""The recipes under examples/ start what they say, with flags that are accepted and fit their number of GPUs; those for
a CPU train."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.core.hyperparameters import LearningRateSchedule, build_learning_rate_schedule
from megatron.training.batch_schedule import build_batches
from tests.end_to_end.run_process import (
    call_training,
    environment,
    free_port,
    iterations,
    latest_iteration,
    losses,
    records,
    write_documents,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.glob("*.sh") if "\nlaunch " in path.read_text(encoding="utf-8"))
PLANS_LARGE_MODELS = pytest.mark.slow(reason="plans large models")

LAUNCHER_MODULE = "megatron.operation.launch"
LAUNCHER = """#!/usr/bin/env bash
printf '%s\\0' "${0##*/}" "$@" > "$RECORD"
"""


@dataclass(frozen=True)
class Command:
    """What a recipe starts."""

    program: str
    launcher_flags: tuple[str, ...]
    """Those of torchrun, which the launcher takes."""
    flags: tuple[str, ...]
    """Of pretrain_llama.py."""

    def launcher_value(self, flag: str) -> str:
        return self.launcher_flags[self.launcher_flags.index(flag) + 1]


def start(directory: Path, recipe: str, *arguments: str, **knobs: str) -> Command:
    """Run a recipe with launchers that only tell how they were called."""
    for program in ("torchrun", "python"):
        (directory / program).write_text(LAUNCHER, encoding="utf-8")
        (directory / program).chmod(0o755)
    record = directory / "record"
    environment = {"PATH": f"{directory}:/usr/bin:/bin", "RECORD": str(record), **knobs}
    subprocess.run(["bash", str(EXAMPLES / recipe), *arguments], env=environment, check=True, timeout=60)
    program, *words = record.read_text(encoding="utf-8").rstrip("\0").split("\0")
    if words[:2] == ["-m", LAUNCHER_MODULE]:
        program, words = LAUNCHER_MODULE, words[2:]
    script = words.index("pretrain_llama.py")
    return Command(program, tuple(words[:script]), tuple(words[script + 1 :]))


def checked(command: Command, world_size: int) -> RunConfig:
    """The flags, read and checked as pretrain_llama.py does before it starts, and the batches divided."""
    config = parse_command_line(command.flags)
    check_run(config, world_size)
    build_batches(config, config.parallel.data_parallel_size(world_size))
    return config


LAYOUTS = [
    # recipe, knobs, GPUs, (tensor, context, pipeline, data), tokens of the first batch, parameters
    ("llama3_8b_h100.sh", {}, 8, (2, 1, 1, 4), 512 * 8192, 8_030_261_248),
    ("llama3_8b_h100.sh", {"NODES": "16"}, 128, (2, 1, 1, 64), 512 * 8192, 8_030_261_248),
    ("llama3_70b_h100.sh", {}, 64, (4, 1, 4, 4), 512 * 8192, 70_553_706_496),
    ("llama3_70b_h100.sh", {"PRECISION": "fp8", "NODES": "64"}, 512, (4, 1, 4, 32), 512 * 8192, 70_553_706_496),
    # Table 4 of the paper.
    ("llama3_405b_h100.sh", {"NODES": "1024"}, 8192, (8, 1, 16, 64), 1024 * 8192, 405_853_388_800),
    ("llama3_405b_h100.sh", {}, 16384, (8, 1, 16, 128), 1024 * 8192, 405_853_388_800),
    ("llama3_405b_h100.sh", {"STAGE": "start"}, 16384, (8, 1, 16, 128), 1024 * 4096, 405_853_388_800),
    ("llama3_405b_h100.sh", {"STAGE": "long"}, 16384, (8, 16, 16, 8), 128 * 131072, 405_853_388_800),
    ("llama3_405b_h100.sh", {"STAGE": "anneal"}, 16384, (8, 16, 16, 8), 128 * 131072, 405_853_388_800),
    ("single_gpu.sh", {}, 1, (1, 1, 1, 1), 16 * 4096, 1_235_814_400),
    ("cpu.sh", {"VOCAB_SIZE": "128256"}, 2, (2, 1, 1, 1), 4 * 128, 33_621_120),
    ("mixtral_8x22b_h100.sh", {}, 128, (4, 1, 8, 4), 1024 * 4096, 140_630_071_296),
    ("mixtral_8x22b_h100.sh", {"NODES": "32"}, 256, (4, 1, 8, 8), 1024 * 4096, 140_630_071_296),
    ("moe_cpu.sh", {"VOCAB_SIZE": "128256"}, 2, (1, 1, 1, 2), 4 * 128, 35_394_688),
    ("llama4_scout_h100.sh", {}, 128, (2, 1, 4, 16), 1024 * 8192, 107_769_861_120),
    ("llama4_scout_h100.sh", {"STAGE": "mid"}, 128, (2, 4, 4, 4), 1024 * 8192, 107_769_861_120),
    ("llama4_scout_h100.sh", {"STAGE": "long", "NODES": "32"}, 256, (2, 16, 4, 2), 1024 * 8192, 107_769_861_120),
    ("llama4_maverick_h100.sh", {}, 512, (2, 1, 8, 32), 2048 * 8192, 400_711_848_960),
    ("llama4_maverick_h100.sh", {"STAGE": "mid"}, 512, (2, 4, 8, 8), 2048 * 8192, 400_711_848_960),
    ("llama4_maverick_h100.sh", {"STAGE": "long"}, 512, (2, 16, 8, 2), 2048 * 8192, 400_711_848_960),
]


@pytest.mark.parametrize(("recipe", "knobs", "gpus", "grid", "tokens", "parameters"), LAYOUTS)
def test_a_recipe_has_the_layout_that_it_states(
    tmp_path: Path,
    recipe: str,
    knobs: dict[str, str],
    gpus: int,
    grid: tuple[int, int, int, int],
    tokens: int,
    parameters: int,
) -> None:
    command = start(tmp_path, recipe, **knobs)
    assert command.program == LAUNCHER_MODULE
    nodes = 1 if "--standalone" in command.launcher_flags else int(command.launcher_value("--nnodes"))
    assert nodes * int(command.launcher_value("--nproc-per-node")) == gpus
    config = checked(command, gpus)
    parallel = config.parallel
    sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size
    assert (*sizes, config.parallel.data_parallel_size(gpus)) == grid
    vocab_size = config.model.preset_vocab_size or 128256
    model = config.model.resolve(vocab_size, parallel.tensor_model_parallel_size, config.seq_length)
    assert model.num_parameters() == parameters
    first = config.training.global_batch_size or int(str(config.training.step_batch_size_schedule).split()[0][2:])
    assert first * config.seq_length == tokens


def test_every_recipe_is_checked() -> None:
    assert {recipe for recipe, *_ in LAYOUTS} == set(RECIPES)


@PLANS_LARGE_MODELS
@pytest.mark.parametrize(("recipe", "knobs", "gpus"), [row[:3] for row in LAYOUTS])
def test_a_dry_run_has_the_same_flags(tmp_path: Path, recipe: str, knobs: dict[str, str], gpus: int) -> None:
    real = start(tmp_path, recipe, "--seed", "7", **knobs)
    dry = start(tmp_path, recipe, "--seed", "7", DRY_RUN="1", **knobs)
    assert (dry.program, dry.launcher_flags) == ("python", ())
    # The machines are checked before a real run alone.
    trained = [flag for flag in real.flags[:-2] if flag != "--preflight"]
    assert dry.flags == (*trained, "--dry-run", "--num-gpus", str(gpus), "--seed", "7")
    assert real.flags[-2:] == ("--seed", "7")


FULLEST = [
    # recipe, knobs, rank of the stage that needs most
    pytest.param("llama3_8b_h100.sh", {}, 0, marks=PLANS_LARGE_MODELS),
    pytest.param("llama3_70b_h100.sh", {}, 0, marks=PLANS_LARGE_MODELS),
    pytest.param("llama3_70b_h100.sh", {"PRECISION": "fp8", "NODES": "64"}, 0, marks=PLANS_LARGE_MODELS),
    pytest.param("llama3_405b_h100.sh", {"STAGE": "start"}, 8, marks=PLANS_LARGE_MODELS),
    pytest.param("llama3_405b_h100.sh", {"STAGE": "long"}, 128, marks=PLANS_LARGE_MODELS),
    ("mixtral_8x22b_h100.sh", {}, 0),
    pytest.param("llama4_scout_h100.sh", {"STAGE": "mid"}, 0, marks=PLANS_LARGE_MODELS),
    pytest.param("llama4_scout_h100.sh", {"STAGE": "long"}, 0, marks=PLANS_LARGE_MODELS),
    pytest.param("llama4_maverick_h100.sh", {"STAGE": "mid"}, 64, marks=PLANS_LARGE_MODELS),
    ("llama4_maverick_h100.sh", {"STAGE": "long"}, 64),
    pytest.param("single_gpu.sh", {}, 0, marks=PLANS_LARGE_MODELS),
    ("cpu.sh", {}, 0),
    ("moe_cpu.sh", {}, 0),
]


@pytest.mark.parametrize(("recipe", "knobs", "rank"), FULLEST)
def test_a_recipe_fits(tmp_path: Path, recipe: str, knobs: dict[str, str], rank: int) -> None:
    report = tmp_path / "report.json"
    command = start(tmp_path, recipe, DRY_RUN="1", **knobs)
    outcome = call_training([*command.flags, "--dry-run-rank", str(rank), "--dry-run-json", str(report)])
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads(report.read_text())["fits"]


@PLANS_LARGE_MODELS
@pytest.mark.parametrize(
    ("recipe", "gpus", "least_load"),
    [("mixtral_8x22b_h100.sh", 128, 2.0), ("llama4_scout_h100.sh", 128, 1.3), ("llama4_maverick_h100.sh", 512, 1.3)],
)
def test_all_stages_of_a_model_with_experts_are_planned_and_fit(
    tmp_path: Path, recipe: str, gpus: int, least_load: float
) -> None:
    """Every expert is on two ranks, the fullest of which may have ``least_load`` times the mean load."""
    report, config = tmp_path / "report.json", checked(start(tmp_path, recipe), gpus)
    outcome = call_training([*start(tmp_path, recipe, DRY_RUN="1").flags, "--dry-run-json", str(report)])
    assert outcome.exit_code == 0, outcome.stderr
    found = json.loads(report.read_text())
    assert found["fits"] and found["plan_command"] is None
    assert found["largest_fitting_expert_load"] > least_load
    layout, ep = found["layout"], config.parallel.expert_model_parallel_size
    assert [layout[axis]["size"] for axis in ("etp", "ep", "edp")] == [1, ep, 2]
    if recipe == "mixtral_8x22b_h100.sh":
        assert found["total_parameters"] == 140_630_071_296 and found["warnings"] == []
        assert [layout[axis]["in_node"] for axis in ("tp", "ep", "edp")] == [True, True, False]


@pytest.mark.parametrize(("recipe", "gpus"), [("llama4_scout_h100.sh", 128), ("llama4_maverick_h100.sh", 512)])
def test_the_stages_of_llama_4_are_one_run(tmp_path: Path, recipe: str, gpus: int) -> None:
    """Each ends with a whole batch and begins where the one before ends, with one learning-rate schedule and equal
    tokens of a batch; the temperature is tuned in the last one alone."""
    schedules, batches, samples, tuned = [], set(), [0], []
    for stage in ("main", "mid", "long"):
        config = checked(start(tmp_path, recipe, STAGE=stage), gpus)
        assert config.data.new_data_stage == stage
        size, total = config.training.global_batch_size, config.training.train_samples
        assert size is not None and total is not None
        assert (total - samples[-1]) % size == 0 and total > samples[-1]
        samples.append(total)
        batches.add(size * config.seq_length)
        tuned.append(config.model.attention_temperature_tuning)
        # A rank has as many positions in every stage.
        assert config.seq_length // config.parallel.context_parallel_size == 8192
        schedules.append(
            build_learning_rate_schedule(
                config.learning_rate, train_iters=None, train_samples=total, global_batch_size=size
            )
        )
    assert len(batches) == 1 and tuned == [False, False, True]
    assert schedules[0] == schedules[1] == schedules[2]
    assert schedules[0](samples[1]) == pytest.approx(1.2e-5, rel=1e-3)


@PLANS_LARGE_MODELS
def test_the_stages_of_405b_are_one_run(tmp_path: Path) -> None:
    """Each resumes where the one before ends, under a name of its own, with the tokens and rates of the paper."""
    consumed, tokens = 0, 0
    rates: dict[str, list[float]] = {}
    earlier: list[tuple[int, int]] = []
    saved: LearningRateSchedule | None = None
    for stage in ("start", "main", "long", "anneal"):
        config = checked(start(tmp_path, "llama3_405b_h100.sh", STAGE=stage), 16384)
        assert config.data.new_data_stage == stage
        assert config.checkpoint.load == config.checkpoint.save == "runs/llama3_405b_h100/checkpoints"
        batches = build_batches(config, config.parallel.data_parallel_size(16384), earlier_lengths=earlier)
        total = config.training.train_samples
        assert total is not None
        schedule = build_learning_rate_schedule(
            config.learning_rate, train_iters=None, train_samples=total, global_batch_size=batches.final_batch_size
        )
        assert saved in (None, schedule) or config.learning_rate.override_opt_param_scheduler
        saved = schedule
        count = batches.iterations_for_samples(total, consumed)
        end = batches.total_samples(count, consumed)
        rates[stage] = [schedule(consumed), schedule(end - batches.final_batch_size)]
        earlier.append((end - consumed, config.seq_length))
        tokens += (end - consumed) * config.seq_length
        consumed = end
        if stage == "start":
            assert tokens == 252_000_000 // (1024 * 4096) * 1024 * 4096
        if stage == "main":
            assert consumed == 1_806_640_128 and abs(tokens - 14.8e12) < 1e9
        if stage == "long":
            assert consumed == 1_812_743_552 and abs(tokens - 15.6e12) < 1e9
    assert rates["long"] == pytest.approx([4.741e-6, 4.585e-6], rel=1e-3)
    assert rates["anneal"] == pytest.approx([4.59e-6, 4.59e-6 * (1 - 256 / 305)], rel=1e-6)
    assert earlier[-1] == (3 * 128, 131072)


def test_a_cluster_is_described_by_environment_variables(tmp_path: Path) -> None:
    command = start(
        tmp_path,
        "llama3_70b_h100.sh",
        SLURM_NNODES="16",
        SLURM_NODEID="3",
        MASTER_ADDR="node7",
        DATA_PATH="0.7 a 0.3 b",
        DATA_CACHE_PATH="cache",
        TOKENIZER_MODEL="t.model",
        OUTPUT="out",
    )
    assert command.launcher_flags == (
        *("--max-restarts", "3", "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"),
        *("--nnodes", "16", "--node-rank", "3", "--master-addr", "node7", "--master-port", "29500"),
        *("--nproc-per-node", "8"),
    )
    config = checked(command, 128)
    assert config.data.data_path == ("0.7", "a", "0.3", "b")
    assert (config.data.data_cache_path, config.tokenizer.tokenizer_model) == ("cache", "t.model")
    assert config.checkpoint.save == config.checkpoint.load == "out/checkpoints"


def test_a_run_on_several_machines_checks_them_and_may_continue_on_fewer(tmp_path: Path) -> None:
    alone = start(tmp_path, "llama3_8b_h100.sh", NODES="1")
    assert not checked(alone, 8).operation.preflight
    command = start(tmp_path, "llama3_8b_h100.sh", NODES="16", MIN_NODES="14", MASTER_ADDR="node7", WARM_PROCESSES="1")
    assert checked(command, 128).operation.preflight
    assert command.launcher_flags[4:] == (
        *("--nnodes", "14:16", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:29500"),
        *("--rdzv-id", "llama3_8b_h100", "--warm-processes", "--nproc-per-node", "8"),
    )


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        start(tmp_path, "llama3_405b_h100.sh", STAGE="middle")


def test_scripts_are_sound() -> None:
    scripts = [*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch"), *(EXAMPLES.parent / "tools").glob("*.sh")]
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
    finished = subprocess.run(
        ["shellcheck", "-x", "-P", "SCRIPTDIR", *map(str, scripts)], capture_output=True, text=True, env=os.environ
    )
    assert finished.returncode == 0, finished.stdout


# --- recipes for a CPU, short --------------------------------------------------------------------------------
# They train as they say, and have nothing left to do the second time.

TRAINS = pytest.mark.slow(reason="trains tiny models in processes")


def run(recipe: str, *flags: str, **settings: object) -> str:
    """The output of a recipe, which must succeed."""
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables |= {name: str(value) for name, value in settings.items()}
    command = ["bash", str(EXAMPLES / recipe), *flags]
    process = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@TRAINS
def test_experts_train_on_two_processes(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    run("moe_cpu.sh", "--metrics-jsonl", str(metrics), OUTPUT=tmp_path / "run")
    found = [record for record in records(metrics) if "expert_load_max" in record]
    assert found[-1]["iteration"] == 20
    assert 1 <= found[-1]["expert_load_max"] < 8
    assert found[-1]["lm_loss"] < found[0]["lm_loss"]


@TRAINS
def test_llama_4_trains_writes_text_and_exports(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_documents(tmp_path / "data/corpus.jsonl", documents=60)
    metrics = tmp_path / "run/metrics.jsonl"
    settings: dict[str, object] = {"RUN": tmp_path / "run", "DATA": tmp_path / "data"}
    settings |= {"VOCABULARY": 384, "ITERATIONS": 6, "MASTER_PORT": free_port()}
    first = run("llama4_cpu.sh", "--log-interval", "1", **settings)
    found = losses(metrics)
    assert len(found) == 6 and found[-1] < found[0]
    assert [record["iteration"] for record in records(metrics) if "validation_loss" in record] == [6]
    assert latest_iteration(tmp_path / "run/checkpoints") == 6
    assert f"training loss {found[0]:.3f} to {found[-1]:.3f}, validation loss " in first
    config = json.loads((tmp_path / "run/hugging_face/config.json").read_text())
    assert (config["model_type"], config["attention_chunk_size"], config["floor_scale"]) == ("llama4_text", 64, 64)
    second = run("llama4_cpu.sh", "--log-interval", "1", **settings)
    assert "== Training" not in second and "== Export" not in second
    _, heading, text = first.partition("== Text")
    assert heading and text.partition("== Export")[0].strip() == second.partition("== Text")[2].strip()


@TRAINS
def test_decays_continue_the_stable_run_and_all_are_compared(tmp_path: Path) -> None:
    """A stable run, two decays, two averages, and a table of their losses."""
    settings: dict[str, object] = {"RUN": tmp_path, "STABLE": 24, "DECAY": 6, "EVERY": 3}
    first = run("wsd_cpu.sh", **settings)
    assert (latest_iteration(tmp_path / "decay_12"), latest_iteration(tmp_path / "decay_24")) == (18, 30)
    stable, decay = (iterations(tmp_path / f"{name}.jsonl")[-1] for name in ("stable", "decay_24"))
    assert stable["learning_rate"] == 3e-3
    assert decay["iteration"] == 30 and 0.0 <= decay["learning_rate"] < 1.5e-3
    table = first.partition("== Validation loss\n")[2]
    assert re.findall(r"^ +(\d+)  +[\d.]+  +[\d.]+  +[\d.]+$", table, re.MULTILINE) == ["12", "24"]
    second = run("wsd_cpu.sh", **settings)
    assert "== Stable run" not in second and "== Decay" not in second
    assert second.partition("== Validation loss\n")[2] == table
