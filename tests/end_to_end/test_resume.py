"""A run that stops, by whatever means, and starts again is the run that never stopped.

The long way round is always real: a tokenized corpus, torchrun, gloo, checkpoints on disk. The comparison is of
every number in the metrics file that does not come from a clock, and of every tensor of the last checkpoint.
"""

import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    PROMPT,
    Corpus,
    Outcome,
    RunningTraining,
    assert_close,
    assert_same_tensors,
    bytes_under,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    grad_norms,
    iterations,
    latest_iteration,
    losses,
    run_training,
    tiny_corpus,
)

LENGTH = 8
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


# --- TP 2 x DP 2, bf16, batch-size ramp: four processes ------------------------------------------------------


def four_rank_flags(corpus: Corpus, directory: Path, **changes: int) -> list[str]:
    """A run of four ranks that accumulates over microbatches, ramps its batch up, evaluates and resumes."""
    return flags_of(
        corpus,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_distributed_optimizer=True,
        bf16=True,
        micro_batch_size=1,
        rampup_batch_size=(4, 4, 12),
        train_iters=LENGTH,
        eval_interval=3,
        eval_iters=1,
        save=directory,
        load=directory,
        metrics_jsonl=directory / "metrics.jsonl",
        **changes,
    )


@dataclass(frozen=True)
class Reference:
    """What a run of eight iterations left."""

    metrics: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def uninterrupted(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Eight iterations without a stop."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    run_training(four_rank_flags(corpus, directory), processes=4).succeeded()
    metrics = directory / "metrics.jsonl"
    # What follows compares nothing unless the run learns, ramps up and evaluates on both sides of the stop.
    assert losses(metrics)[-1] < losses(metrics)[0] - 0.3
    assert [record["global_batch_size"] for record in iterations(metrics)] == [4] * 3 + [8] * 5
    assert [record["iteration"] for record in computed(metrics) if "validation_loss" in record] == [3, 6, LENGTH]
    return Reference(metrics, checkpoint_of(directory, LENGTH))


@pytest.fixture(scope="module")
def resumed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Four iterations, a checkpoint, and the rest in new processes."""
    directory = tmp_path_factory.mktemp("resumed")
    run_training(four_rank_flags(corpus, directory, exit_interval=4), processes=4).succeeded()
    assert latest_iteration(directory) == 4
    outcome = run_training(four_rank_flags(corpus, directory), processes=4).succeeded()
    assert "continuing after iteration 4" in outcome.stdout
    return Reference(directory / "metrics.jsonl", checkpoint_of(directory, LENGTH))


@pytest.mark.slow(reason="four ranks")
def test_resumed_run_is_bit_identical(resumed: Reference, uninterrupted: Reference) -> None:
    assert computed(resumed.metrics) == computed(uninterrupted.metrics)
    assert_same_tensors(resumed.checkpoint, uninterrupted.checkpoint)


@pytest.mark.slow(reason="four ranks")
def test_resumed_run_has_the_random_state_of_the_uninterrupted_one(
    resumed: Reference, uninterrupted: Reference
) -> None:
    """Nothing of ours draws from the global generators, but a user's code may."""
    assert_same_tensors(resumed.checkpoint, uninterrupted.checkpoint, prefix=("random/",))


@pytest.mark.slow(reason="four ranks")
def test_killed_run_started_again_is_bit_identical(corpus: Corpus, uninterrupted: Reference, tmp_path: Path) -> None:
    """Saving so often that the kill may fall into the middle of a save, or after iterations that are not saved."""
    seed = random.randrange(2**32)
    delay = random.Random(seed).uniform(0.0, 0.8)
    print(f"seed {seed}: killed {delay:.3f} s after the first iteration")
    flags = four_rank_flags(corpus, tmp_path, save_interval=2)
    run = RunningTraining(flags, processes=4)
    run.wait_for_records(tmp_path / "metrics.jsonl", 1)
    time.sleep(delay)
    run.kill()
    run_training(flags, processes=4).succeeded()
    assert computed(tmp_path / "metrics.jsonl") == computed(uninterrupted.metrics)
    assert_same_tensors(checkpoint_of(tmp_path, LENGTH), uninterrupted.checkpoint)
    leftovers = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not leftovers


# --- one layout after the other ------------------------------------------------------------------------------


@pytest.mark.slow(reason="tests/parallel/test_resharding.py proves it in process")
def test_run_handed_from_layout_to_layout_equals_one_process(corpus: Corpus, tmp_path: Path) -> None:
    """DP 2, then TP 2 with sequence parallelism, then DP 2 with ZeRO-1, then one process; in fp64."""
    alone, relay = tmp_path / "alone.jsonl", tmp_path / "relay.jsonl"
    call_training(flags_of(corpus, fp64=True, metrics_jsonl=alone)).succeeded()
    save = tmp_path / "checkpoints"
    common = flags_of(corpus, fp64=True, metrics_jsonl=relay, save=save, load=save)
    run_training([*common, "--exit-interval", "3"], processes=2).succeeded()
    tensor_parallel = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--exit-interval", "5"]
    run_training([*common, *tensor_parallel], processes=2).succeeded()
    run_training([*common, "--use-distributed-optimizer", "--exit-interval", "7"], processes=2).succeeded()
    assert latest_iteration(save) == 7
    call_training(common).succeeded()
    assert_close(losses(relay), losses(alone), TOLERANCE)
    assert_close(grad_norms(relay), grad_norms(alone), TOLERANCE)


# --- graceful stops ------------------------------------------------------------------------------------------


def endless_flags(corpus: Corpus, directory: Path, **changes: int | float) -> list[str]:
    """One process, many more iterations than anybody waits for, and a loader process beside it."""
    return flags_of(
        corpus,
        train_iters=20_000,
        num_workers=1,
        save=directory,
        load=directory,
        metrics_jsonl=directory / "metrics.jsonl",
        **changes,
    )


def assert_stopped_after_whole_iteration(outcome: Outcome, directory: Path, reason: str) -> int:
    """Exit code 0, the reason in words, and a checkpoint of the last iteration in the metrics; its number."""
    outcome.succeeded()
    assert f"stopped: {reason}" in outcome.stdout
    assert not outcome.errors
    done = int(iterations(directory / "metrics.jsonl")[-1]["iteration"])
    assert latest_iteration(directory) == done
    assert checkpoint_of(directory, done).is_dir()
    return done


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_saves_the_finished_iteration_and_the_run_goes_on_from_it(
    corpus: Corpus, tmp_path: Path, name: str
) -> None:
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    run = RunningTraining(endless_flags(corpus, interrupted))
    run.wait_for_records(interrupted / "metrics.jsonl", 3)
    run.process.send_signal(signal.Signals[name])
    done = assert_stopped_after_whole_iteration(run.finish(timeout=PROMPT), interrupted, f"signal {name}")
    call_training(endless_flags(corpus, interrupted, exit_interval=done + 2)).succeeded()
    call_training(endless_flags(corpus, whole, exit_interval=done + 2)).succeeded()
    assert computed(interrupted / "metrics.jsonl") == computed(whole / "metrics.jsonl")
    assert_same_tensors(checkpoint_of(interrupted, done + 2), checkpoint_of(whole, done + 2))


def test_a_start_of_a_complete_run_removes_what_a_kill_left(corpus: Corpus, tmp_path: Path) -> None:
    """A kill between the last checkpoint and its tracker: the next start has nothing to train, and saves nothing."""
    flags = flags_of(corpus, train_iters=2, save=tmp_path, load=tmp_path)
    call_training(flags).succeeded()
    before = bytes_under(checkpoint_of(tmp_path, 2))
    draft = tmp_path / ".latest_checkpointed_iteration.txt.saving-c6f3ad69"
    draft.write_text("2")
    call_training(flags).succeeded()
    assert not draft.exists()
    assert bytes_under(checkpoint_of(tmp_path, 2)) == before and latest_iteration(tmp_path) == 2


def test_run_stops_gracefully_when_its_minutes_are_over(corpus: Corpus, tmp_path: Path) -> None:
    minutes = 0.1  # longer than a busy machine needs for the first iteration
    outcome = call_training(endless_flags(corpus, tmp_path, exit_duration_in_mins=minutes))
    assert_stopped_after_whole_iteration(outcome, tmp_path, f"--exit-duration-in-mins {minutes}")
    assert outcome.seconds < PROMPT
