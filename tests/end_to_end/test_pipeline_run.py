"""A run in stages is the run of one process: its metrics, its checkpoints, its text; and it ends as well.

Two ranks train in turn whatever can be trained one after the other, each run from the entry point on, because to
start them costs more than any run.
"""

import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from megatron.commands import generate_text
from megatron.schedules.registry import ScheduleName, build_schedule
from megatron.schedules.schedule import Schedule
from megatron.schedules.simulator import Timeline
from megatron.training.profiling.pipeline_trace import from_chrome_trace
from tests.end_to_end.run_process import (
    ENVIRONMENT,
    PROMPT,
    REPOSITORY,
    Corpus,
    FlagValue,
    Outcome,
    Record,
    RunningTraining,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    descendants,
    flags_of,
    iterations,
    latest_iteration,
    losses,
    run_tool,
    run_training,
    tiny_corpus,
)

TOLERANCE = 1e-9

Flags = Mapping[str, FlagValue | Path]

in_ranks = pytest.mark.slow(reason="many runs of two ranks; tests/parallel proves their numbers in process")

LENGTH, STOP, PROFILED = 8, 4, 5
RUN: Flags = {
    "num_layers": 4,
    "fp64": True,
    "micro_batch_size": 1,
    "rampup_batch_size": (4, 4, 12),
    "train_iters": LENGTH,
    "eval_interval": 3,
    "eval_iters": 1,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
}
"""Batches of 4 and, from iteration 4 on, of 8 microbatches; evaluations after iterations 3 and 6, and a test."""

TWO_STAGES: dict[ScheduleName, Flags] = {
    "1f1b": {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tttL"},
    "interleaved": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "zb-v": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
}
EMBEDDINGS: dict[str, Flags] = {
    "tied": {"untie_embeddings_and_output_weights": False},
    "untied": {"untie_embeddings_and_output_weights": True},
}

every_embedding = pytest.mark.parametrize("embedding", EMBEDDINGS)
every_pipeline = pytest.mark.parametrize("pipeline", TWO_STAGES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


# --- several runs of the same ranks --------------------------------------------------------------------------

END = "=== the end of one of several runs ==="
IN_TURN = """
import importlib, json, os, sys
sys.path.insert(0, {repository!r})


for module, words in json.loads(sys.argv[1]):
    is_run = module == "pretrain_llama"
    main = importlib.import_module("megatron.commands.pretrain_llama" if is_run else module).main
    sys.argv = [module, *words]
    exit_code = main(words) if is_run else main()
    if os.environ["RANK"] == "0":
        print({end!r})
    sys.stdout.flush()
    if exit_code not in (0, 75):
        os._exit(exit_code)
"""
Command = tuple[str, Sequence[str]]
"""A module with a ``main``, and its arguments."""


def run_in_turn(commands: Mapping[str, Command], directory: Path, processes: int = 2) -> dict[str, str]:
    """Run each on the same ranks; what the first rank said in each."""
    script = directory / "in_turn.py"
    script.write_text(IN_TURN.format(repository=str(REPOSITORY), end=END))
    outcome = RunningTraining([json.dumps(list(commands.values()))], processes, script).finish(timeout=280).succeeded()
    *said, rest = outcome.stdout.split(f"{END}\n")
    assert len(said) == len(commands)
    # Other ranks' words come last, and they have nothing to say.
    assert not rest
    return dict(zip(commands, said))


@dataclass(frozen=True)
class Runs:
    """Several runs: what they said, and their metrics as ``NAME.jsonl``."""

    directory: Path
    said: Mapping[str, str]

    def metrics(self, name: str) -> Path:
        """The metrics file of a run."""
        return self.directory / f"{name}.jsonl"


@pytest.fixture(scope="module")
def alone(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One process, tied and untied; and tied once more, up to a stop."""
    directory = tmp_path_factory.mktemp("alone")
    said = {}
    for name, flags in EMBEDDINGS.items():
        run = flags_of(corpus, **RUN, **flags, metrics_jsonl=directory / f"{name}.jsonl")
        said[name] = call_training(run).succeeded().stdout
    # What follows compares nothing unless the run learns, ramps up and evaluates.
    assert losses(directory / "tied.jsonl")[-1] < losses(directory / "tied.jsonl")[0] - 0.3
    found = iterations(directory / "tied.jsonl")
    assert [record["global_batch_size"] for record in found] == [4] * 3 + [8] * 5
    stopped = flags_of(corpus, **RUN, **EMBEDDINGS["tied"], exit_interval=STOP, save=directory / "stopped")
    call_training(stopped).succeeded()
    return Runs(directory, said)


@pytest.fixture(scope="module")
def in_stages(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two stages in every way, each with a profile; and one of them once more, up to a stop."""
    directory = tmp_path_factory.mktemp("in_stages")
    commands: dict[str, Command] = {}
    for pipeline, stages in TWO_STAGES.items():
        for embedding, ends in EMBEDDINGS.items():
            name = f"{pipeline} {embedding}"
            commands[name] = (
                "pretrain_llama",
                flags_of(
                    corpus,
                    **{**RUN, **stages, **ends},
                    metrics_jsonl=directory / f"{name}.jsonl",
                    save=directory / name,
                    profile_pipeline=directory / f"{name}.json",
                ),
            )
    flags = {**RUN, **TWO_STAGES["1f1b"], **EMBEDDINGS["tied"]}
    stopped = flags_of(corpus, **flags, exit_interval=STOP, save=directory / "stopped")
    commands["stopped"] = "pretrain_llama", stopped
    return Runs(directory, run_in_turn(commands, directory))


# --- the same numbers ----------------------------------------------------------------------------------------


def assert_same_records(found: Sequence[Record], wanted: Sequence[Record]) -> None:
    """The same records with the same keys, and every number within the tolerance."""
    assert [list(record) for record in found] == [list(record) for record in wanted]
    for one, other in zip(found, wanted):
        for key, value in other.items():
            assert math.isclose(one[key], value, rel_tol=TOLERANCE), f"{key}: {one} instead of {other}"


def zeros_and_norms(stdout: str) -> list[tuple[str, str]]:
    """Zeros in the gradient and the norm of the weights, from the console."""
    return re.findall(r"num zeros: +(\d+) \| params norm: +([0-9.]+) \|", stdout)


@in_ranks
@every_embedding
@every_pipeline
def test_metrics_are_those_of_one_process(in_stages: Runs, alone: Runs, pipeline: ScheduleName, embedding: str) -> None:
    """Loss, gradient norm and the losses of validation and test, at every iteration that is logged."""
    wanted = computed(alone.metrics(embedding))
    assert [key for record in wanted for key in record if "loss" in key and key != "loss_scale"] == [
        *["lm_loss"] * 3,
        "validation_loss",
        *["lm_loss"] * 3,
        "validation_loss",
        *["lm_loss"] * 2,
        "validation_loss",
        "test_loss",
    ]
    assert_same_records(computed(in_stages.metrics(f"{pipeline} {embedding}")), wanted)


@in_ranks
@every_embedding
@every_pipeline
def test_zeros_and_weight_norm_count_a_tied_weight_once(
    in_stages: Runs, alone: Runs, pipeline: ScheduleName, embedding: str
) -> None:
    wanted = zeros_and_norms(alone.said[embedding])
    assert len(wanted) == LENGTH
    # Ids that a batch does not have: zeros are there to be counted, but not where the head has the same weight.
    assert (int(wanted[0][0]) > 0) == (embedding == "untied")
    assert zeros_and_norms(in_stages.said[f"{pipeline} {embedding}"]) == wanted


# --- what ran when -------------------------------------------------------------------------------------------


def read_trace(path: Path) -> tuple[Schedule, Timeline]:
    """The schedule that ran and when, of a trace that the tool takes as well."""
    assert "measured makespan" in run_tool("tools/pipeline_schedule.py", "--measured", path)
    return from_chrome_trace(json.loads(path.read_text()))


def assert_ran_as_scheduled(path: Path, name: ScheduleName, num_microbatches: int) -> None:
    """Every pass once and in order, one at a time on a stage, and none before what it needs.

    The clocks of two stages differ by some constant, which must be the same for all messages both ways.
    """
    schedule, timeline = read_trace(path)
    assert schedule == build_schedule(name, 2, num_microbatches)
    ended = {schedule.result(span.stage, span.action): span.end for span in timeline.spans}
    assert len(ended) == len(timeline.spans)
    slack: dict[int, float] = {0: math.inf, 1: math.inf}
    for stage in range(2):
        spans = timeline.stage_spans(stage)
        assert all(after.start >= before.end - 1e-9 for before, after in pairwise(spans))
        assert all(span.end > span.start for span in spans)
        for span in spans:
            message = schedule.incoming(stage, span.action)
            if message is not None:
                slack[stage] = min(slack[stage], span.start - ended[message.result])
    assert slack[0] + slack[1] > 0.0
    assert min(slack.values()) > -1.0


@in_ranks
@every_pipeline
def test_profile_holds_every_pass_of_one_iteration(in_stages: Runs, pipeline: ScheduleName) -> None:
    assert_ran_as_scheduled(in_stages.directory / f"{pipeline} untied.json", pipeline, num_microbatches=8)
    said = in_stages.said[f"{pipeline} untied"]
    assert f"pipeline of iteration {PROFILED} written to {in_stages.directory}" in said


@in_ranks
def test_profile_leaves_out_the_evaluation_after_its_iteration(continued: Runs) -> None:
    assert_ran_as_scheduled(continued.directory / "zb-v.json", "zb-v", num_microbatches=8)


@pytest.mark.parametrize("where", ["below a file", "a directory"])
def test_profile_that_cannot_be_written_is_noticed_before_training(corpus: Corpus, tmp_path: Path, where: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    path = corpus.tokenizer / "trace.json" if where == "below a file" else tmp_path
    outcome = call_training(flags_of(corpus, profile_pipeline=path, metrics_jsonl=metrics))
    assert outcome.exit_code != 0
    (sentence,) = outcome.errors
    assert re.fullmatch(rf"ERROR: --profile-pipeline {re.escape(str(path))} cannot be written \(.+\): .+\.", sentence)
    assert not iterations(metrics)


# --- checkpoints from layout to layout -----------------------------------------------------------------------

CONTINUED_AS: dict[str, Flags] = {
    "1f1b": TWO_STAGES["1f1b"],
    "zb-v": {**TWO_STAGES["zb-v"], "profile_pipeline_iteration": 6},
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
TEXTS: dict[str, tuple[str, ...]] = {
    "likeliest": ("--temperature", "0"),
    "drawn": ("--temperature", "1.5", "--seed", "7"),
}


def generation(load: Path, *words: str) -> list[str]:
    """The arguments that continue a text."""
    return ["--load", str(load), "--prompt", "import ", "--max-new-tokens", "12", *words]


@pytest.fixture(scope="module")
def continued(corpus: Corpus, in_stages: Runs, alone: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run that stopped, continued in several layouts; that of one process in stages; and texts of two stages."""
    directory = tmp_path_factory.mktemp("continued")
    commands: dict[str, Command] = {}
    tied = {**RUN, **EMBEDDINGS["tied"]}

    def add(name: str, load: Path, flags: Flags) -> None:
        files = {"metrics_jsonl": directory / f"{name}.jsonl", "profile_pipeline": directory / f"{name}.json"}
        words = flags_of(corpus, **{**tied, **files, **flags}, load=load, save=directory / name)
        commands[name] = "pretrain_llama", words

    for name, flags in CONTINUED_AS.items():
        add(name, in_stages.directory / "stopped", flags)
    add("from one process", alone.directory / "stopped", TWO_STAGES["interleaved"])
    for name, words in TEXTS.items():
        arguments = generation(in_stages.directory / "1f1b tied", *words, "--pipeline-model-parallel-size", "2")
        commands[name] = "megatron.commands.generate_text", arguments
    runs = Runs(directory, run_in_turn(commands, directory))
    call_training(
        flags_of(corpus, **tied, load=in_stages.directory / "stopped", metrics_jsonl=runs.metrics("one process"))
    ).succeeded()
    return runs


@in_ranks
def test_same_layout_goes_on_bit_by_bit(continued: Runs, in_stages: Runs) -> None:
    """With a tied weight, which the stage of the head reads from a checkpoint that holds it once."""
    whole = computed(in_stages.metrics("1f1b tied"))
    assert computed(continued.metrics("1f1b")) == [record for record in whole if record["iteration"] > STOP]
    assert f"continuing after iteration {STOP}" in continued.said["1f1b"]
    assert_same_tensors(
        checkpoint_of(continued.directory / "1f1b", LENGTH), checkpoint_of(in_stages.directory / "1f1b tied", LENGTH)
    )


@pytest.mark.slow(reason="four ranks")
def test_shards_of_master_weights_of_a_tied_weight_go_on_bit_by_bit(corpus: Corpus, tmp_path: Path) -> None:
    """In bf16 with ZeRO-1, each of four ranks holds masters and moments of half of what its stage has."""
    flags: Flags = {
        **RUN,
        **EMBEDDINGS["tied"],
        "fp64": False,
        "bf16": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-h1",
    }
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run: Flags = {**flags, "save": halves, "load": halves, "metrics_jsonl": tmp_path / "halves.jsonl"}
    commands: dict[str, Command] = {
        "whole": ("pretrain_llama", flags_of(corpus, **flags, save=whole, metrics_jsonl=tmp_path / "whole.jsonl")),
        "first half": ("pretrain_llama", flags_of(corpus, **run, exit_interval=STOP)),
        "second half": ("pretrain_llama", flags_of(corpus, **run)),
    }
    assert "pipeline 2 x data 2 (optim), bf16" in run_in_turn(commands, tmp_path, processes=4)["whole"]
    assert computed(tmp_path / "halves.jsonl") == computed(tmp_path / "whole.jsonl")
    assert_same_tensors(checkpoint_of(halves, LENGTH), checkpoint_of(whole, LENGTH))


@in_ranks
@pytest.mark.parametrize("name", ["zb-v", "tensor parallel", "one process", "from one process"])
def test_other_layout_goes_on_with_the_same_run(continued: Runs, alone: Runs, name: str) -> None:
    whole = computed(alone.metrics("tied"))
    assert_same_records(computed(continued.metrics(name)), [record for record in whole if record["iteration"] > STOP])


@in_ranks
@every_embedding
@every_pipeline
def test_checkpoint_holds_every_weight_once(
    in_stages: Runs, alone: Runs, corpus: Corpus, pipeline: ScheduleName, embedding: str
) -> None:
    """Also one that two stages hold."""
    sizes: dict[str, int] = {}
    for shard in checkpoint_of(in_stages.directory / f"{pipeline} {embedding}", LENGTH).glob("*.safetensors"):
        for key, tensor in load_file(shard).items():
            kind = next((k for k in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/") if key.startswith(k)), "")
            sizes[kind] = sizes.get(kind, 0) + tensor.numel()
    (count,) = re.findall(r"model: ([0-9,]+) parameters", alone.said[embedding])
    wanted = int(count.replace(",", ""))
    assert [sizes[kind] for kind in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")] == [wanted] * 3


# --- text ----------------------------------------------------------------------------------------------------


def call_generation(*words: str) -> Outcome:
    """Generate in this process."""
    stdout, stderr = StringIO(), StringIO()
    with mock.patch.dict(os.environ, ENVIRONMENT), mock.patch.object(sys, "argv", ["generate_text.py", *words]):
        with redirect_stdout(stdout), redirect_stderr(stderr):
            exit_code = generate_text.main()
    return Outcome(exit_code, stdout.getvalue(), stderr.getvalue(), seconds=0.0)


@in_ranks
@pytest.mark.parametrize("name", TEXTS)
def test_two_stages_write_the_text_of_one_process(continued: Runs, in_stages: Runs, name: str) -> None:
    """From a checkpoint that two other stages have saved."""
    text = call_generation(*generation(in_stages.directory / "1f1b tied", *TEXTS[name])).succeeded().stdout
    assert text.startswith("import ") and len(text) > len("import \n")
    # A pipe of text turns the carriage return of a generated line into a newline.
    assert continued.said[name] == text.replace("\r", "\n")


@pytest.mark.parametrize(
    ("size", "words"), [(0, "must be at least 1"), (2, "does not divide 1 processes: start a multiple")]
)
def test_stages_that_generation_cannot_have_are_refused_in_one_sentence(size: int, words: str) -> None:
    outcome = call_generation(*generation(Path("nowhere"), "--pipeline-model-parallel-size", str(size)))
    assert outcome.exit_code != 0 and not outcome.stdout
    (sentence,) = outcome.stderr.splitlines()
    assert sentence.startswith("ERROR: --pipeline-model-parallel-size") and words in sentence


LATE_FIRST_RANK = """
import os, runpy, sys, time
time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow(reason="two ranks under torchrun")
def test_generation_says_its_sentence_even_if_the_first_rank_is_the_last_to_notice(tmp_path: Path) -> None:
    """torchrun ends every rank as soon as one has failed: another rank must not fail before rank 0 has spoken."""
    script = tmp_path / "late.py"
    script.write_text(LATE_FIRST_RANK.format(script=str(REPOSITORY / "tools" / "generate_text.py")))
    words = generation(tmp_path, "--pipeline-model-parallel-size", "3")
    outcome = RunningTraining(words, processes=2, script=script).finish()
    assert outcome.exit_code != 0
    assert [error for error in outcome.errors if "does not divide 2 processes" in error] == outcome.errors != []


# --- how a pipeline ends -------------------------------------------------------------------------------------


def process_of_rank(run: RunningTraining, rank: int) -> int:
    """The process of a rank."""
    return next(
        pid
        for pid in descendants(run.process.pid)
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )


@pytest.mark.slow(reason="two ranks under torchrun")
def test_signal_to_one_stage_stops_all_and_the_run_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    """Each stage is told of it between two iterations, so that none waits for another's messages."""
    metrics, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    flags: Flags = {"num_layers": 4, "fp64": True, "train_iters": 20_000, "save": tmp_path, "load": tmp_path}
    run = RunningTraining(flags_of(corpus, **flags, **TWO_STAGES["1f1b"], metrics_jsonl=metrics), processes=2)
    run.wait_for_records(metrics, 3)
    os.kill(process_of_rank(run, 1), signal.SIGTERM)
    outcome = run.finish(timeout=PROMPT).succeeded()
    assert "stopped: signal on another rank" in outcome.stdout
    assert not outcome.errors
    done = latest_iteration(tmp_path)
    assert done == iterations(metrics)[-1]["iteration"]
    call_training(flags_of(corpus, **flags, metrics_jsonl=metrics, exit_interval=done + 2)).succeeded()
    flags = {**flags, "save": None, "load": None}
    call_training(flags_of(corpus, **flags, metrics_jsonl=whole, exit_interval=done + 2)).succeeded()
    assert_close(losses(metrics), losses(whole), TOLERANCE)


OWN_CORPUS = """
import os, runpy, sys
sys.argv = [{script!r}, *(word.replace("RANK", os.environ["RANK"]) for word in sys.argv[1:])]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Every rank reads a corpus of its own."""


@pytest.mark.slow(reason="two ranks under torchrun")
@pytest.mark.parametrize("stage", [0, 1])
def test_fault_in_the_data_of_one_stage_ends_all(corpus: Corpus, tmp_path: Path, stage: int) -> None:
    """The stage that reads it says so; the other, which waits for a message, does not wait for ever."""
    script, metrics = tmp_path / "own_corpus.py", tmp_path / "metrics.jsonl"
    script.write_text(OWN_CORPUS.format(script=str(REPOSITORY / "pretrain_llama.py")))
    for rank in range(2):
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{corpus.prefix}{suffix}", tmp_path / f"corpus{rank}{suffix}")
    flags: Flags = {"data_path": tmp_path / "corpusRANK", "mmap_bin_files": False, "train_iters": 20_000}
    run = RunningTraining(
        flags_of(corpus, **flags, pipeline_model_parallel_size=2, metrics_jsonl=metrics), processes=2, script=script
    )
    run.wait_for_records(metrics, 3)
    (tmp_path / f"corpus{stage}.bin").write_bytes(b"")
    outcome = run.finish(timeout=PROMPT)
    assert outcome.exit_code != 0
    (sentence,) = outcome.errors
    assert sentence.startswith(f"ERROR: rank {stage}: ") and f"corpus{stage}.bin was truncated" in sentence
    assert f"[rank{stage}]: Traceback" not in outcome.stderr


CRASHING = """
import os, runpy, sys
sys.argv[0] = {script!r}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
from megatron.core.models import transformer

forward, passes = transformer.TransformerChunk.forward, 0


def crash(chunk, *inputs):
    global passes
    passes += 1
    if os.environ["RANK"] == "0" and passes == 20:
        raise RuntimeError("a mistake of ours")
    return forward(chunk, *inputs)


transformer.TransformerChunk.forward = crash
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""In the second iteration of zb-v, when the first stage has sent what the last will take only after what now never
comes."""


@pytest.mark.slow(reason="two ranks under torchrun")
def test_crash_of_one_stage_ends_all_although_not_all_that_it_sent_was_taken(corpus: Corpus, tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING.format(script=str(REPOSITORY / "pretrain_llama.py")))
    flags: Flags = {"num_layers": 4, "micro_batch_size": 1, **TWO_STAGES["zb-v"]}
    outcome = RunningTraining(flags_of(corpus, **flags), processes=2, script=script).finish()
    assert outcome.exit_code != 0
    assert "[rank0]: RuntimeError: a mistake of ours" in outcome.stderr


def test_loss_that_is_not_finite_stops_the_stage_that_does_not_see_it(corpus: Corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = flags_of(corpus, lr=1e38, pipeline_model_parallel_size=2, save_interval=1, save=tmp_path)
    outcome = run_training([*flags, "--metrics-jsonl", str(metrics)], processes=2)
    assert outcome.exit_code != 0
    (sentence,) = outcome.errors
    assert "nan" in sentence and "--no-check-for-nan-in-loss-and-grad" in sentence
    assert "Traceback" not in outcome.stderr
    assert f"Iteration {latest_iteration(tmp_path) + 1} has loss" in sentence
    assert all(record["lm_loss"] is not None for record in iterations(metrics))
