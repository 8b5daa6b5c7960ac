"""Listeners of every run: metrics, evaluation, data comparison, checkpoints, garbage collection, memory, conclusion."""

import gc
import math
import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count
from operator import add
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.checkpoint.directory import TRACKER, iteration_directory
from megatron.checkpoint.schema import DataStage
from megatron.config.operation import LoggingConfig
from megatron.config.run import RunConfig
from megatron.core.device import device_memory, memory_outside_allocator, peak_memory
from megatron.data.evaluation_data import TokenBytes
from megatron.flags import IntervalSchedule
from megatron.metrics.jsonl import ValidationHistory
from megatron.metrics.timers import combine, format_timer_report
from megatron.metrics.writer import EvaluationRecord, IterationRecord, SetLoss
from megatron.operation.attempts import EffectiveTimeMeter
from megatron.operation.heartbeat import run_directory
from megatron.reports.svg import duration, percentage
from megatron.training.checkpoints.saver import Saver
from megatron.training.flops import achieved_tflops, mfu
from megatron.training.loop.data import DataCheck, EvaluationSet, next_microbatch
from megatron.training.loop.step import TokenLoss, evaluate
from megatron.training.loop.trainer import IterationResult, Listener, Trainer
from megatron.urls import is_url


@dataclass
class Metrics(Listener):
    """Makes one record per ``--log-interval``, for every writer.

    Of each name in the metrics of the interval's iterations it has the latest value, whichever iteration gave it.
    """

    config: LoggingConfig
    train_iters: int
    flops_per_token: float
    peak_tflops: float | None
    effective_time: EffectiveTimeMeter | None = None
    """The meter on rank 0 of a run with a run directory."""
    _pending: list[IterationResult] = field(default_factory=list)
    _num_zeros: int | None = None

    def before_update(self, trainer: Trainer, gradient_factor: float) -> None:
        # The update overwrites the gradient.
        is_reported = (trainer.state.progress.iteration + 1) % self.config.log_interval == 0
        if self.config.log_num_zeros_in_grad and is_reported:
            self._num_zeros = trainer.module.optimizer.count_zeros()

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        self._pending.append(result)
        if trainer.state.progress.iteration % self.config.log_interval == 0:
            record = self._record(trainer, self._pending)
            self._pending = []
            for writer in trainer.writers:
                writer.write_iteration(record)

    def _record(self, trainer: Trainer, results: Sequence[IterationResult]) -> IterationRecord:
        progress, last = trainer.state.progress, results[-1]
        applied = [result.outcome for result in results if not result.outcome.is_skipped]
        seconds = sum(result.seconds for result in results)
        tokens = sum(result.global_batch_size for result in results) * trainer.context.config.seq_length
        tokens_per_s = tokens / seconds / trainer.context.topology.grid.world_size
        metrics: dict[str, float | None] = {
            "lm_loss": sum(outcome.loss for outcome in applied) / len(applied) if applied else None,
            "grad_norm": None,
            "learning_rate": last.hyperparameters.learning_rate,
            "loss_scale": trainer.module.loss_scaler.scale,
            "global_batch_size": last.global_batch_size,
            "iteration_time_ms": seconds / len(results) * 1e3,
            "tokens_per_s_per_gpu": tokens_per_s,
            "tflops_per_gpu": achieved_tflops(tokens_per_s, self.flops_per_token),
            "mfu": mfu(tokens_per_s, self.flops_per_token, self.peak_tflops),
            "skipped": len(results) - len(applied),
        }
        if self.effective_time is not None:
            snapshot = trainer.context.heartbeat.snapshot()
            metrics["effective_time"] = self.effective_time.read(snapshot, time.monotonic_ns())
        if self.config.log_num_zeros_in_grad:
            metrics["num_zeros"], self._num_zeros = self._num_zeros, None
        if self.config.log_params_norm:
            metrics["params_norm"] = trainer.module.optimizer.weight_norm()
        timers: list[dict[str, float]] = []
        if self.config.timing_log_level > 0:
            timers = trainer.context.control.all_gather_object(trainer.timers.elapsed(iterations=len(results)))
        for result in results:  # the latest value of each name
            metrics |= result.outcome.metrics
        return IterationRecord(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            metrics=metrics | peak_memory(trainer.context.topology.device),
            train_iters=self.train_iters,
            skipped_samples=progress.skipped_samples,
            nan_iterations=sum(not math.isfinite(result.outcome.loss) for result in results),
            time=time.time(),
            elapsed_s=time.monotonic() - trainer.started,
            world_size=trainer.context.topology.grid.world_size,
            timers=combine(timers, self.config.timing_log_option),
            timer_report=format_timer_report(timers, self.config.timing_log_option),
            memory=device_memory(trainer.context.topology.device) if self.config.log_memory_to_tensorboard else {},
        )


@dataclass
class Evaluation(Listener):
    """Evaluates every ``--eval-interval`` iterations, and at the end of a complete run both splits."""

    interval: int | None
    sets: Sequence[EvaluationSet]
    token_bytes: TokenBytes | None = None
    """The bytes of the tokens' text, for bits per byte."""
    _validated_at: int | None = None

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if self._is_due(trainer):
            is_final = trainer.stop.is_complete(trainer.state.progress.iteration)
            self.evaluate(trainer, "validation", is_periodic=True, is_final=is_final)

    def _is_due(self, trainer: Trainer) -> bool:
        return self.interval is not None and trainer.state.progress.iteration % self.interval == 0

    def on_skipped_iteration(self, trainer: Trainer) -> None:
        # A resumed run continues after the samples of all evaluations up to its iteration, done or not.
        for one in self.sets if self._is_due(trainer) else ():
            for _ in range(one.num_microbatches if one.split == "validation" and one.continues else 0):
                next_microbatch(one.microbatches, trainer.context.topology.rank)

    def on_skip_train(self, trainer: Trainer) -> None:
        self.evaluate(trainer, "validation", is_periodic=False, is_final=True)
        self.evaluate(trainer, "test", is_periodic=False, is_final=True)

    def on_end(self, trainer: Trainer, reason: str) -> None:
        if trainer.stop.is_complete(trainer.state.progress.iteration):
            if self._validated_at != trainer.state.progress.iteration:
                self.evaluate(trainer, "validation", is_periodic=False, is_final=True)
            self.evaluate(trainer, "test", is_periodic=False, is_final=True)

    def evaluate(
        self, trainer: Trainer, split: Literal["validation", "test"], *, is_periodic: bool, is_final: bool
    ) -> None:
        """Report the losses of a split's sets, and over the tokens of all of them."""
        sets = [one for one in self.sets if one.split == split]
        if not sets:
            return
        # With --skip-train the moving average was loaded as the weights.
        is_other = trainer.context.config.validation.eval_ema and not trainer.context.config.validation.skip_train
        with trainer.module.optimizer.averaged() if is_other else nullcontext():
            losses = [(one.name, self._loss(trainer, one)) for one in sets]
        progress = trainer.state.progress
        if split == "validation":
            self._validated_at = progress.iteration
        record = EvaluationRecord(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            split=split,
            **_figures(reduce(add, (loss for _, loss in losses))),
            sets={name: SetLoss(**_figures(loss)) for name, loss in losses if name is not None},
            is_periodic=is_periodic,
            is_final=is_final,
            time=time.time(),
            elapsed_s=time.monotonic() - trainer.started,
        )
        for writer in trainer.writers:
            writer.write_evaluation(record)

    def _loss(self, trainer: Trainer, one: EvaluationSet) -> TokenLoss:
        microbatches = (next_microbatch(one.microbatches, trainer.context.topology.rank) for _ in count())
        token_bytes = self.token_bytes if one.num_bytes is None else None
        loss = evaluate(trainer.module, microbatches, one.num_microbatches, trainer.timers, token_bytes)
        return loss if one.num_bytes is None else replace(loss, num_bytes=float(one.num_bytes))


def _figures(loss: TokenLoss) -> dict[str, Any]:
    return {"loss": loss.mean, "num_tokens": round(loss.num_tokens), "num_bytes": round(loss.num_bytes) or None}


@dataclass
class DataComparison(Listener):
    """Completes the comparison of the corpus with its digests before the last checkpoint of a complete run."""

    check: DataCheck

    def on_skip_train(self, trainer: Trainer) -> None:
        self.check.finish()

    def on_end(self, trainer: Trainer, reason: str) -> None:
        if trainer.state.progress.iteration >= trainer.stop.train_iters:
            self.check.finish()


@dataclass
class Checkpoints(Listener):
    """Saves at the iterations of ``--save-interval`` and whenever the loop ends."""

    saver: Saver
    schedule: IntervalSchedule | None

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        self.saver.poll()
        if self.schedule is not None and self.schedule.is_due(trainer.state.progress.iteration):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        with trainer.timers("save-checkpoint"):
            trainer.module.data_parallel.finish_param_all_gather()
            self.saver.save(trainer.state)

    def before_rollback(self, trainer: Trainer) -> None:
        with trainer.timers("save-checkpoint"):
            self.saver.settle()

    def after_rollback(self, trainer: Trainer) -> None:
        # The loaded checkpoint once more, now with the record of the rollback: a restart must not train on the samples
        # that the rollback skips.
        self._save(trainer)

    def on_end(self, trainer: Trainer, reason: str) -> None:
        with trainer.timers("save-checkpoint"):
            trainer.module.data_parallel.finish_param_all_gather()
            self.saver.save_last(trainer.state)

    def on_nothing_to_train(self, trainer: Trainer) -> None:
        self.saver.clear_leftovers()

    def close(self) -> None:
        self.saver.close()


class GarbageCollection(Listener):
    """Collects Python's garbage at the same iterations on every rank, so that ranks do not wait for each other.

    Without an ``interval``, it collects at evaluations and checkpoints.
    """

    def __init__(self, interval: int, eval_interval: int | None, saves: IntervalSchedule | None) -> None:
        every = interval or eval_interval
        self._schedules = [IntervalSchedule(((every, 0),))] if every else []
        if saves is not None and not interval:
            self._schedules.append(saves)
        gc.disable()
        gc.collect()

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if any(schedule.is_due(trainer.state.progress.iteration) for schedule in self._schedules):
            gc.collect()

    def on_end(self, trainer: Trainer, reason: str) -> None:
        gc.enable()


@dataclass
class MemoryReport(Listener):
    """Logs once, after the first iteration, the largest GPU memory of a rank that is outside of torch's allocator.

    By then all process groups are connected. The dry run can only estimate this memory.
    """

    _is_done: bool = False

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if self._is_done:
            return
        self._is_done = True
        context = trainer.context
        by_rank = context.control.all_gather_object(memory_outside_allocator(context.topology.device))
        rank = max(range(len(by_rank)), key=by_rank.__getitem__)
        context.log_rank0(
            f"GPU memory outside of torch's allocator: {by_rank[rank] / 2**30:.2f} GiB on rank {rank}, the most of all"
        )


@dataclass
class MemoryRelease(Listener):
    """Empties torch's cache of GPU memory before every update (level 1), and after every iteration (level 2)."""

    level: int

    def before_update(self, trainer: Trainer, gradient_factor: float) -> None:
        torch.cuda.empty_cache()

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if self.level >= 2:
            torch.cuda.empty_cache()


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
        for line in [self._trained(trainer), *best_validation(best), *self._places()]:
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

    def _places(self) -> list[str]:
        """Where the last checkpoint is, and the command that makes a report."""
        save, directory, metrics = self.config.checkpoint.save, run_directory(self.config), self.config.logging
        lines = []
        if save is not None and is_url(save):
            lines = [f"checkpoints: {save}"]
        elif save is not None:
            with suppress(OSError, ValueError):  # nothing is saved
                last = iteration_directory(Path(save), int((Path(save) / TRACKER).read_text()))
                lines = [f"last checkpoint: {last}"]
        if directory is not None:
            words = ["python", "tools/report_run.py", str(directory)]
            words += [] if metrics.metrics_jsonl is None else ["--metrics", metrics.metrics_jsonl]
            lines.append(f"report: {shlex.join([*words, '--html', 'report.html'])}")
        return lines


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
