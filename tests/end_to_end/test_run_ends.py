"""How a run of several ranks ends: none waits for a loader that does not deliver, or for messages that will never
come."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from megatron.commands import pretrain_llama
from megatron.data import loader
from tests.end_to_end.run_process import (
    Corpus,
    Flags,
    FlagValue,
    call_training,
    flags_of,
    fork_training,
    iterations,
    latest_iteration,
    wait_until,
)

SLOW = pytest.mark.slow(reason="waits for time limits of several processes")


def command(corpus: Corpus, run: Path, **changes: FlagValue) -> list[str]:
    """A run that goes on until it is stopped."""
    common: Flags = {
        "train_iters": 2000,
        "lr_decay_iters": 2000,
        "num_workers": 1,
        "save": run / "save",
        "metrics_jsonl": run / "metrics.jsonl",
    }
    return flags_of(corpus, **common | changes)


class Clock:
    """The clock by which a loader is waited for; it runs a hundred times as fast from :meth:`hurry` on, so that a long
    limit, which no slow machine reaches by itself, is over soon."""

    def __init__(self) -> None:
        self._fast_since: float | None = None

    def hurry(self) -> None:
        self._fast_since = time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        return now if self._fast_since is None else now + 100 * (now - self._fast_since)


def stop_loader(clock: Clock) -> None:
    """Let no read of a loader thread of this process return."""
    vars(loader)["read_sample"] = lambda *arguments: threading.Event().wait()
    clock.hurry()


def then_signal(metrics: Path, number: signal.Signals | None, clock: Clock) -> None:
    """Stop the loader after some iterations, and send this process a signal."""
    wait_until(lambda: len(iterations(metrics)) >= 3, 90)
    stop_loader(clock)
    if number is not None:
        os.kill(os.getpid(), number)


def main(flags: Sequence[str], metrics: Path, rank: int, number: signal.Signals | None) -> int:
    """The entry point; the loader of one rank stops."""
    clock = Clock()
    if int(os.environ["RANK"]) == rank:
        threading.Thread(target=then_signal, args=(metrics, number, clock), daemon=True).start()
    with mock.patch.object(loader, "Wait", partial(loader.Wait, clock=clock)):
        return pretrain_llama.main(flags)


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_loader_ends_the_run_with_the_last_iteration_saved(corpus: Corpus, tmp_path: Path, rank: int) -> None:
    # One microbatch an iteration, so the wait is always between two iterations, where all ranks can agree.
    flags = command(corpus, tmp_path, global_batch_size=4, dataloader_timeout=80)
    metrics = tmp_path / "metrics.jsonl"
    outcome = fork_training(flags, 2, partial(main, metrics=metrics, rank=rank, number=None))
    words = (f"rank {rank}: The loader has delivered no microbatch for", "(--dataloader-timeout 80)")
    outcome.refusal(*words)
    assert latest_iteration(tmp_path / "save") == len(iterations(metrics))


@SLOW
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_is_obeyed_while_the_loader_is_waited_for(corpus: Corpus, tmp_path: Path, processes: int) -> None:
    # A single process may give up in the middle of an iteration, too.
    size: Flags = {"global_batch_size": 4 if processes == 2 else 8}
    metrics = tmp_path / "metrics.jsonl"
    flags = command(corpus, tmp_path, dataloader_timeout=0, **size)
    last_rank = partial(main, metrics=metrics, rank=processes - 1, number=signal.SIGTERM)
    outcome = fork_training(flags, processes, last_rank)
    assert "> stopped: signal" in outcome.succeeded().stdout
    assert latest_iteration(tmp_path / "save") == len(iterations(metrics))
    # What was saved is the state after a whole iteration.
    last = latest_iteration(tmp_path / "save")
    more: Flags = {"train_iters": last + 2, "load": tmp_path / "save", "num_workers": 0, **size}
    call_training(command(corpus, tmp_path, **more)).succeeded()
    assert latest_iteration(tmp_path / "save") == last + 2


# --- stages of a pipeline ------------------------------------------------------------------------------------


def test_loss_that_is_not_finite_stops_the_stage_that_does_not_see_it(corpus: Corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = flags_of(corpus, lr=1e38, pipeline_model_parallel_size=2, save_interval=1, save=tmp_path)
    outcome = fork_training([*flags, "--metrics-jsonl", str(metrics)], 2)
    has_loss = f"Iteration {latest_iteration(tmp_path) + 1} has loss"
    outcome.refusal(has_loss, "nan", "--no-check-for-nan-in-loss-and-grad")
    assert "Traceback" not in outcome.stderr
    assert all(record["lm_loss"] is not None for record in iterations(metrics))
