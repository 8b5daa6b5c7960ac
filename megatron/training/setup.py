"""Building a run: each step in one function, and all of them in order in :func:`build_trainer`."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megatron.checkpoint.lock import RunLock
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import CheckpointError, ConfigError
from megatron.config.model import LlamaConfig
from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.core.optimizer.learning_rate import LearningRateSchedule, build_learning_rate_schedule
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.weight_decay import build_weight_decay_schedule
from megatron.core.topology import Topology
from megatron.training.batch_schedule import BatchSchedule, build_batch_schedule
from megatron.training.data import Data, build_data, load_vocabulary
from megatron.training.description import Say, describe_run
from megatron.training.flops import model_flops_per_token, resolve_peak
from megatron.training.launch import on_first_rank, together
from megatron.training.listeners import (
    Checkpoints,
    Evaluation,
    GarbageCollection,
    MemoryRelease,
    Metrics,
    device_name,
)
from megatron.training.metrics import MetricsWriter
from megatron.training.parallel_model import (
    build_data_parallel,
    build_kernels,
    build_parallel_model,
    build_pipeline,
    check_kernels_agree,
    share_buffers,
)
from megatron.training.pipeline_profile import PipelineProfile, check_trace_path
from megatron.training.profile import build_profile
from megatron.training.saver import Saver
from megatron.training.state import Progress, RunState, SavedRun, find_saved_run, seed_random
from megatron.training.stop import SignalWatch, StopConditions
from megatron.training.timers import Timers
from megatron.training.trainer import Listener, Trainer
from megatron.training.wandb_writer import check_wandb_credentials
from megatron.training.writers import build_writers


@contextmanager
def save_directories_locked(config: CheckpointConfig, world: Communicator) -> Iterator[Sequence[RunLock]]:
    """Keep other runs from saving where this one does; the locks are the first rank's."""
    locks: list[RunLock] = []

    def acquire() -> None:
        for flag, directory in (("--save", config.save), ("--redundant-save", config.redundant_save)):
            if directory is not None:
                check_save_directory(flag, Path(directory))
                locks.append(RunLock(Path(directory)))

    try:
        on_first_rank(world, acquire)
        yield locks
    finally:
        for lock in locks:
            lock.release()


def build_trainer(
    config: RunConfig,
    topology: Topology,
    locks: Sequence[RunLock],
    signals: SignalWatch,
    say: Say,
    at_end: ExitStack,
) -> Trainer:
    """The whole run of this rank, from flags to a trainer that is ready to go; ``locks`` are those of ``--save``, and
    ``at_end`` lets go of what must outlive the trainer.

    Raises :class:`~megatron.config.errors.UserError`, on every rank alike.
    """
    started = time.monotonic()
    on_first_rank(topology.world, lambda: check_wandb_credentials(config.logging))
    on_first_rank(topology.world, lambda: check_trace_path(config.logging.profile_pipeline))
    seed_random(config.training.seed)
    vocabulary = together(topology.world, lambda: load_vocabulary(config))
    saved, is_own = find_start(config.checkpoint, topology.world)
    progress = saved.progress if saved is not None and is_own else Progress()
    batches = build_batches(config, topology, progress)
    train_iters = run_length(config, batches, progress)
    check_profile_iteration(config, train_iters, progress)
    kernels = together(topology.world, lambda: build_kernels(config, topology, vocabulary))
    check_kernels_agree(kernels.choices, topology.world)
    share_buffers(config, topology, kernels.engine, at_end)
    model = build_parallel_model(config, topology, vocabulary, kernels)
    executor = build_pipeline(config, topology, model)
    data_parallel = build_data_parallel(config, topology, model)
    state = RunState(
        architecture=model.config,
        data_parallel=data_parallel,
        optimizer=Optimizer(config.optimizer, data_parallel, topology, kernels.optimizer),
        schedule=build_learning_rate(config, train_iters, batches),
        learning_rate=config.learning_rate,
        loss_scaler=build_loss_scaler(config.precision),
        progress=progress,
        rank=topology.rank,
        device=topology.device,
        flags=dataclasses.asdict(config),
        fp8=model.context.fp8,
        weight_decay=build_weight_decay_schedule(
            config.optimizer, config.training.train_samples or batches.total_samples(train_iters)
        ),
    )
    resume(state, saved, is_own, config, topology.world, say)
    data = build_data(config, topology, vocabulary, batches, train_iters, progress)
    writers = open_writers(config, topology, state.progress.iteration, train_iters)
    describe_run(config, topology, model, kernels, state, batches, train_iters, say)
    return Trainer(
        topology=topology,
        state=state,
        executor=executor,
        data_parallel=data_parallel,
        batches=batches,
        data=data,
        stop=StopConditions(
            train_iters,
            config.training,
            signals,
            topology.world,
            topology.device,
            started,
            first_iteration=state.progress.iteration,
        ),
        timers=Timers(config.logging.timing_log_level, synchronizer(topology.device)),
        listeners=build_listeners(config, topology, model.config, data, batches, train_iters, locks, say),
        writers=writers,
        seq_length=config.seq_length,
        check_for_nan=config.training.check_for_nan_in_loss_and_grad,
        count_zeros=config.logging.log_num_zeros_in_grad,
        iterations_to_skip=frozenset(config.training.iterations_to_skip),
        before_update=memory_release(config, topology.device, level=1),
    )


def check_save_directory(flag: str, directory: Path) -> None:
    """Find out now, not at the first save, whether the directory of ``flag`` can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {directory} cannot be written to ({error.strerror}): name another directory, or make it writable."
        ) from error


def build_batches(config: RunConfig, topology: Topology, progress: Progress) -> BatchSchedule:
    """The global batch size over the run; sizes that are behind it need not fit this number of ranks."""
    return build_batch_schedule(
        micro_batch_size=config.micro_batch_size,
        data_parallel_size=topology.grid.dp,
        global_batch_size=config.training.global_batch_size,
        rampup_batch_size=config.training.rampup_batch_size,
        step_batch_size_schedule=config.training.step_batch_size_schedule,
        seq_length=config.seq_length,
        decrease_if_needed=config.training.decrease_batch_size_if_needed,
        consumed_samples=progress.consumed_samples,
    )


def run_length(config: RunConfig, batches: BatchSchedule, progress: Progress) -> int:
    """Iterations of the whole run, those behind it included."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None
    return progress.iteration + batches.iterations_for_samples(config.training.train_samples, progress.consumed_samples)


def check_profile_iteration(config: RunConfig, train_iters: int, progress: Progress) -> None:
    """Refuse to profile an iteration that this run will not make."""
    iteration = config.logging.profile_pipeline_iteration
    if config.logging.profile_pipeline is not None and not progress.iteration < iteration <= train_iters:
        raise ConfigError(
            f"--profile-pipeline-iteration {iteration} is not among the iterations {progress.iteration + 1} to "
            f"{train_iters} of this run: choose one of them, or remove --profile-pipeline."
        )


def build_learning_rate(config: RunConfig, train_iters: int, batches: BatchSchedule) -> LearningRateSchedule:
    """The learning-rate schedule; evaluation alone needs none."""
    rates = (
        config.learning_rate
        if config.learning_rate.lr is not None
        else dataclasses.replace(config.learning_rate, lr=0.0)
    )
    return build_learning_rate_schedule(
        rates,
        train_iters=None if config.training.train_samples is not None else train_iters,
        train_samples=config.training.train_samples,
        planned_samples=batches.total_samples(train_iters),
        global_batch_size=batches.final_batch_size,
    )


def find_start(config: CheckpointConfig, world: Communicator) -> tuple[SavedRun | None, bool]:
    """The checkpoint to start from, if any, and whether it is of this run, so that more than its weights counts."""
    saved, base = find_saved_run(config, world), config.pretrained_checkpoint
    if saved is not None or base is None:
        return saved, not config.finetune
    saved = find_saved_run(dataclasses.replace(config, load=base, ckpt_step=None), world)
    if saved is None:
        raise CheckpointError(f"--pretrained-checkpoint {base} holds no checkpoint: check the path.")
    return saved, False


def resume(
    state: RunState, saved: SavedRun | None, is_own: bool, config: RunConfig, world: Communicator, say: Say
) -> None:
    """Load the checkpoint that :func:`find_start` found, if any, else the model of ``--load-hf``."""
    source = config.checkpoint.load_hf
    if saved is None:
        start = "random weights" if source is None else f"the weights of {source}"
        if config.checkpoint.load is not None:
            say(f"{config.checkpoint.load} holds no checkpoint yet: starting from {start}")
        if source is not None:
            state.load_hugging_face(Path(source), world)
            say(f"loaded the weights of {source}")
        return
    state.load(saved, config.checkpoint, weights_only=not is_own or config.validation.skip_train)
    say(f"loaded checkpoint {saved.root}, continuing after iteration {state.progress.iteration}")


def open_writers(config: RunConfig, topology: Topology, iteration: int, train_iters: int) -> list[MetricsWriter]:
    """The metrics writers, all on rank 0; the other ranks have none."""

    def open_on_first_rank() -> list[MetricsWriter]:
        if topology.rank != 0:
            return []
        return build_writers(
            config.logging,
            save_directory=config.checkpoint.save,
            run_config=dataclasses.asdict(config),
            resume_iteration=iteration,
            train_iters=train_iters,
            stream=sys.stdout,
        )

    return together(topology.world, open_on_first_rank)


def build_listeners(
    config: RunConfig,
    topology: Topology,
    architecture: LlamaConfig,
    data: Data,
    batches: BatchSchedule,
    train_iters: int,
    locks: Sequence[RunLock],
    say: Say,
) -> list[Listener]:
    """Listeners in the order in which they hear of an event: checkpoints last, since evaluation may take long."""
    peak, source = resolve_peak(device_name(topology.device), config.precision.product_name, config.logging.peak_tflops)
    say(source)
    flops = model_flops_per_token(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        kv_channels=architecture.kv_channels,
        num_query_groups=architecture.num_query_groups,
        vocab_size=architecture.vocab_size,
        seq_length=config.seq_length,
    )
    metrics = Metrics(config.logging, train_iters, flops, peak)
    evaluation = Evaluation(
        config.validation.eval_interval,
        config.validation.eval_iters,
        (config.validation.eval_global_batch_size or batches.final_batch_size) // batches.unit,
        data.validation,
        data.test,
    )
    listeners: list[Listener] = [metrics, evaluation]
    if config.checkpoint.save is not None:
        saver = Saver(config.checkpoint, topology.world, locks, say)
        listeners.append(Checkpoints(saver, config.checkpoint.save_schedule))
    if config.training.manual_gc:
        intervals = config.training.manual_gc_interval, config.validation.eval_interval
        listeners.append(GarbageCollection(*intervals, config.checkpoint.save_schedule))
    release = memory_release(config, topology.device, level=2)
    if release is not None:
        listeners.insert(0, MemoryRelease(release))
    profile = build_profile(config, topology.rank, topology.device, say)
    if profile is not None:
        # First, so that it records the iteration alone.
        listeners.insert(0, profile)
    if config.logging.profile_pipeline is not None:
        iteration = config.logging.profile_pipeline_iteration
        # First, because evaluation uses the pipeline, too.
        listeners.insert(0, PipelineProfile(config.logging.profile_pipeline, iteration, say))
    return listeners


def memory_release(config: RunConfig, device: torch.device, level: int) -> Callable[[], None] | None:
    """How to give unused memory back to the GPU, where ``--empty-unused-memory-level`` is at least ``level``."""
    return (
        torch.cuda.empty_cache if device.type != "cpu" and config.training.empty_unused_memory_level >= level else None
    )


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """How timers wait for the device; None where there is nothing to wait for."""
    return torch.cuda.synchronize if device.type != "cpu" else None
