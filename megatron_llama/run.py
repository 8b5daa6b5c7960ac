"""A training run as an object: build it, take steps, evaluate, generate, save, export."""

import os
import shlex
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from megatron.checkpoint.checkpointing import SyncSaveBackend
from megatron.checkpoint.tokenizer_files import keep_copy
from megatron.commands.convert_checkpoint import ToHuggingFace, convert
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine
from megatron.config.run import RunConfig
from megatron.core.control import run_on_rank0
from megatron.errors import ConfigError
from megatron.flags import words_of as flag_words
from megatron.inference.loading import load_model
from megatron.metrics.writer import EvaluationRecord, MetricsWriter
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.processes import available_cores, prepare_environment
from megatron.operation.signals import SignalWatch
from megatron.training.build.run import RunParts, build_trainer
from megatron.training.checkpoints.save_directories import save_directories_locked
from megatron.training.checkpoints.state import random_tensors, restore_random
from megatron.training.context import RunContext
from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu
from megatron.training.loop.listeners import Evaluation as EvaluationListener
from megatron.training.loop.trainer import IterationResult, Listener, Trainer
from megatron.training.pretrain import deterministic_algorithms, resolve_architecture
from megatron_llama.model import continued

FlagValue = str | float | bool | os.PathLike[str] | Sequence[str | float] | None


@dataclass(frozen=True)
class Step:
    """The result of an iteration, the same on all ranks."""

    iteration: int
    """The number of iterations so far."""
    loss: float
    """Mean over all unmasked tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Unmasked tokens of the global batch."""
    seconds: float
    metrics: Mapping[str, float]
    """Further values, such as those of experts."""
    is_last: bool
    """Whether the run is complete: the next step would raise an error."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, the same on all ranks."""

    iteration: int
    split: str
    loss: float
    bits_per_byte: float | None
    """None where the bytes of the tokens are not known, as with NullTokenizer."""


class Run:
    """A run in this process, or one rank of it in each process of torchrun.

    ``flags`` are the flags of ``pretrain_llama.py`` with underscores; True sets a switch, None
    leaves a flag out. ``listeners`` receive the events of the training loop, before its metrics are recorded; ``parts``
    replaces parts of the run, such as the loader of its samples.
    No signal handlers are installed. Close a run before the next one is built: it is a context manager.

    Raises :class:`~megatron.errors.UserError` with one sentence for anything that a user can correct.
    """

    def __init__(self, *listeners: Listener, parts: RunParts | None = None, **flags: FlagValue) -> None:
        self._open(words_of(flags), listeners, parts)

    @classmethod
    def from_flags(cls, flags: str | Sequence[str], *listeners: Listener, parts: RunParts | None = None) -> Self:
        """A run with the flags of a command line, as text or as words."""
        run = cls.__new__(cls)
        run._open(shlex.split(flags) if isinstance(flags, str) else list(flags), listeners, parts)
        return run

    def _open(self, words: Sequence[str], listeners: Sequence[Listener], parts: RunParts | None) -> None:
        parts = parts or RunParts()
        parts = replace(parts, listeners=(*parts.listeners, *listeners))
        if parts.build_loader is not None:
            words = [*words, "--data-module", "RunParts:build_loader"]  # for the checks and the record of the run
        process = Process.from_environment(os.environ)
        self._recorder, self._evaluations = _StepRecorder(), _EvaluationRecorder()
        with ExitStack() as end:
            end.enter_context(random_numbers_restored())  # the parser of the flags draws numbers, too
            line = CommandLine.of(words)
            line.show_help(prints=process.rank == 0)
            config = line.parse().checked()
            # Flags without a meaning in Python are refused first.
            check_flags(config)
            check_run(config, process.world_size)
            self._trainer = self._build(config, line, process, end, parts)
            self._end = end.pop_all()
        # A run that is not closed ends before Python takes the modules down.
        weakref.finalize(self, self._end.close)
        self._reason: str | None = None
        self._has_begun = False

    def _build(
        self, config: RunConfig, line: CommandLine, process: Process, end: ExitStack, parts: RunParts
    ) -> Trainer:
        started = time.monotonic()
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        end.enter_context(environment_restored())
        prepare_environment(config, os.environ, available_cores(), local_world_size)
        device = choose_device(config.training.device, process)
        if device.type == "cpu" and process.world_size > 1:
            prepare_cpu(process)
        end.enter_context(deterministic_algorithms(config.training.deterministic_mode))
        heartbeat = Heartbeat()
        topology = end.enter_context(init_distributed(config.parallel, process, device, heartbeat))

        def log_rank0(text: str) -> None:
            if process.rank == 0:
                print(f"> {text}", flush=True)

        context = RunContext(config, topology, SignalWatch(), log_rank0, heartbeat)
        locks = end.enter_context(save_directories_locked(context))
        config = resolve_architecture(context, partial(line.over_model, "the checkpoint"))
        context = RunContext(config, topology, context.signals, log_rank0, heartbeat)
        at_end = end.enter_context(ExitStack())
        trainer = build_trainer(context, locks, at_end, started, parts=parts)
        end.callback(trainer.close)
        trainer.listeners = [*trainer.listeners, self._recorder]
        trainer.writers = [*trainer.writers, self._evaluations]
        return trainer

    @property
    def chunks(self) -> Sequence[torch.nn.Module]:
        """This rank's chunks of the model: the whole model in one, without pipeline parallelism."""
        return [chunk for chunk in self._open_trainer.module.executor.chunks if isinstance(chunk, torch.nn.Module)]

    @property
    def config(self) -> RunConfig:
        return self._open_trainer.context.config

    @property
    def iteration(self) -> int:
        """The number of iterations so far, with those of the loaded checkpoint."""
        return self._open_trainer.state.progress.iteration

    @property
    def rank(self) -> int:
        return self._open_trainer.context.topology.rank

    @property
    def _open_trainer(self) -> Trainer:
        if self._trainer is None:
            raise ConfigError("The run is closed: build another one.")
        return self._trainer

    def step(self) -> Step:
        """Train one iteration; a collective."""
        trainer = self._open_trainer
        if not self._has_begun:
            self._reason, self._has_begun = trainer.begin(), True
        if self._reason is not None:
            raise ConfigError(
                f"The run ends after iteration {self.iteration} ({self._reason}): use a larger --train-iters, "
                "which also sets the schedule of the learning rate."
            )
        # An iteration that is skipped has no result, and the next one is the step.
        self._recorder.result = None
        self._reason = trainer.advance()
        while self._recorder.result is None and self._reason is None:  # --iterations-to-skip
            self._reason = trainer.advance()
        result = self._recorder.result
        if result is None:
            raise ConfigError(f"The run ends after iteration {self.iteration}, which --iterations-to-skip leaves out.")
        outcome = result.outcome
        return Step(
            iteration=self.iteration,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=result.hyperparameters.learning_rate,
            tokens=int(outcome.num_tokens),
            seconds=result.seconds,
            metrics=dict(outcome.metrics),
            is_last=self._reason is not None,
        )

    def steps(self, count: int | None = None) -> Iterator[Step]:
        """The next ``count`` steps, or all until the run is complete."""
        done = 0
        while count is None or done < count:
            step = self.step()
            done += 1
            yield step
            if step.is_last:
                return

    def evaluate(self, split: Literal["validation", "test"] = "validation") -> Evaluation:
        """The loss over the next ``--eval-iters`` batches of a split; a collective."""
        trainer = self._open_trainer
        listener = next(one for one in trainer.listeners if isinstance(one, EvaluationListener))
        self._evaluations.record = None
        listener.evaluate(trainer, split, is_periodic=False, is_final=False)
        record = self._evaluations.record
        if record is None:
            raise ConfigError(
                f"The run has no {split} data: set --eval-interval and --eval-iters, and give "
                "the split a share (--split)."
            )
        return Evaluation(record.iteration, record.split, record.loss, record.bits_per_byte)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Save a checkpoint under ``directory``; returns its path. A collective."""
        root = Path(directory)
        context, state = self._open_trainer.context, self._open_trainer.state
        saved = state.save(SyncSaveBackend(root, state.progress.iteration), root)
        run_on_rank0(context.control, lambda: keep_copy(root, context.config.tokenizer))
        return saved

    def export(
        self, directory: str | os.PathLike[str], dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    ) -> Path:
        """Write the model for Hugging Face transformers, with the tokenizer unless texts have none (mock data,
        NullTokenizer); ``directory`` must be new or empty. A collective."""
        context = self._open_trainer.context
        has_text = context.config.tokenizer.tokenizer_type not in (None, "NullTokenizer")
        with self._saved_beside(Path(directory)) as saved:
            request = ToHuggingFace(str(saved), str(directory), dtype=dtype, tokenizer=has_text)
            run_on_rank0(context.control, lambda: convert(request))
        return Path(directory)

    def generate(self, prompt: str, **sampling: float) -> str:
        """The prompt with its continuation by the present weights, which are copied through a temporary checkpoint; the
        same on all ranks. A collective. ``sampling`` are the fields of
        :class:`~megatron.config.inference.GenerationConfig`."""
        return self.generate_batch([prompt], **sampling)[0]

    def generate_batch(self, prompts: Sequence[str], **sampling: float) -> list[str]:
        """:meth:`generate` for several prompts at once."""
        context = self._open_trainer.context
        place = Path(context.config.checkpoint.save or tempfile.gettempdir()) / "generate"
        with self._saved_beside(place) as saved:
            model = load_model(str(saved), context.topology)
        return continued(model, prompts, sampling)

    @contextmanager
    def _saved_beside(self, place: Path) -> Iterator[Path]:
        """A checkpoint in a temporary directory beside ``place``, where all ranks see it."""
        control = self._open_trainer.context.control
        with ExitStack() as end:

            def make() -> Path:
                place.parent.mkdir(parents=True, exist_ok=True)
                return Path(end.enter_context(tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent)))

            root = run_on_rank0(control, make)
            self.save(root)
            try:
                yield root
            finally:
                control.all_gather_object(None)  # all ranks have read it

    def close(self) -> None:
        """Free the model, end loaders and writers, leave the process groups; a second call has no effect."""
        self._trainer = None  # type: ignore[assignment]
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trainer = None  # type: ignore[assignment]
        self._end.__exit__(kind, error, trace)


class _StepRecorder(Listener):
    """Keeps the result of the last iteration."""

    def __init__(self) -> None:
        self.result: IterationResult | None = None

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        self.result = result


class _EvaluationRecorder(MetricsWriter):
    """Keeps the last evaluation, on every rank."""

    def __init__(self) -> None:
        self.record: EvaluationRecord | None = None

    def write_evaluation(self, record: EvaluationRecord) -> None:
        self.record = record


def words_of(flags: Mapping[str, FlagValue]) -> list[str]:
    """The words of a command line: ``{"train_iters": 5, "bf16": True}`` is ``--train-iters 5 --bf16``."""
    words: list[str] = []
    for name, value in flags.items():
        is_one = isinstance(value, str | float | int | os.PathLike)
        given = [] if value is None else flag_words(name, value if is_one else tuple(value))  # type: ignore[arg-type]
        # A value that begins with a hyphen must not be taken for a flag.
        is_like_flag = is_one and given[1:] and given[1].startswith("-")
        words += ["=".join(given)] if is_like_flag else given
    return words


def check_flags(config: RunConfig) -> None:
    """Raise :class:`ConfigError` for flags of the command that a run in Python does not carry out."""
    refused = {
        "--dry-run": config.dry_run.dry_run,
        "--plan": config.plan.plan,
        "--preflight": config.operation.preflight,
        "--inprocess-restart": config.operation.inprocess_restart,
        "--inject-fault": bool(config.operation.inject_fault),
        "--nan-policy rollback": config.operation.nan_policy == "rollback",
        "--spike-policy rollback": config.operation.spike_policy == "rollback",
    }
    for flag, is_given in refused.items():
        if is_given:
            raise ConfigError(f"{flag} has no effect in megatron_llama.Run: remove it, or start pretrain_llama.py.")


@contextmanager
def environment_restored() -> Iterator[None]:
    """Remove the variables that are set inside."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


@contextmanager
def random_numbers_restored() -> Iterator[None]:
    """Give the global generators of random numbers on the CPU, which a run seeds, their states back."""
    host = torch.device("cpu")
    states = random_tensors(0, host)
    try:
        yield
    finally:
        restore_random(states, 0, host)
