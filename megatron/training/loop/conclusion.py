"""The lines at the end of a run: what was trained, the best validation loss, the last checkpoint, the report."""

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.directory import TRACKER, iteration_directory
from megatron.checkpoint.schema import DataStage
from megatron.config.run import RunConfig
from megatron.metrics.jsonl import ValidationHistory
from megatron.operation.attempts import EffectiveTimeMeter
from megatron.operation.heartbeat import run_directory
from megatron.reports.svg import duration, percentage
from megatron.training.loop.trainer import Listener, Trainer
from megatron.urls import is_url


@dataclass
class Conclusion(Listener):
    """Logs the summary after the last iteration of this process, on rank 0; it must follow the checkpoints."""

    config: RunConfig
    effective_time: EffectiveTimeMeter | None

    def on_end(self, trainer: Trainer, reason: str) -> None:
        if trainer.context.topology.rank > 0:
            return
        history = next((writer for writer in trainer.writers if isinstance(writer, ValidationHistory)), None)
        best = None if history is None else history.best()
        for line in [self._trained(trainer), *best_validation(best), *self._checkpoint(), *self._report()]:
            trainer.context.log_rank0(line)

    def _trained(self, trainer: Trainer) -> str:
        progress = trainer.state.progress
        tokens = tokens_of(trainer.state.data_stages, progress.consumed_samples, self.config.seq_length)
        wall_s, share = time.monotonic() - trainer.started, ""
        if self.effective_time is not None:
            wall_s, step_s = self.effective_time.seconds(trainer.context.heartbeat.snapshot(), time.monotonic_ns())
            share = f", effective time {percentage(step_s / wall_s)}" if wall_s > 0 else ""
        iterations = f"iteration {progress.iteration:,} of {trainer.stop.train_iters:,}"
        return f"trained: {iterations}, {tokens:,} tokens, {duration(wall_s)}{share}"

    def _checkpoint(self) -> list[str]:
        save = self.config.checkpoint.save
        if save is None or is_url(save):
            return [] if save is None else [f"checkpoints: {save}"]
        try:
            iteration = int((Path(save) / TRACKER).read_text())
        except (OSError, ValueError):
            return []
        return [f"last checkpoint: {iteration_directory(Path(save), iteration)}"]

    def _report(self) -> list[str]:
        directory, metrics = run_directory(self.config), self.config.logging.metrics_jsonl
        if directory is None:
            return []
        words = ["python", "tools/report_run.py", str(directory)]
        words += [] if metrics is None else ["--metrics", metrics]
        return [f"report: {shlex.join([*words, '--html', 'report.html'])}"]


def best_validation(best: tuple[int, float] | None) -> list[str]:
    """The line with the best evaluation, if there is one."""
    if best is None:
        return []
    iteration, loss = best
    return [f"best validation loss: {loss:.4f} (perplexity {math.exp(min(loss, 20.0)):.4g}) at iteration {iteration:,}"]


def tokens_of(stages: Sequence[DataStage], samples: int, seq_length: int) -> int:
    """Tokens in the first ``samples`` samples of a run; ``seq_length`` is the length in the last stage."""
    lengths = [stage.seq_length for stage in stages[:-1]] + [seq_length]
    begins = [stage.first_sample for stage in stages] or [0]
    ends = [*begins[1:], samples]
    return sum(length * max(0, min(end, samples) - begin) for length, begin, end in zip(lengths, begins, ends))
