"""Building a run: each step in one function, and all of them in order in :func:`build_trainer`."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint.lock import RunLock
from megatron.config.activations import ActivationConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import CheckpointError, ConfigError, RankError
from megatron.config.model import LlamaConfig
from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.core.context_parallel.attention import ContextParallel
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.data_parallel.wrap import shards_weights, wrap_data_parallel
from megatron.core.fp8 import Fp8Layers, Fp8Scaling
from megatron.core.kernels.choice import Choice, table
from megatron.core.kernels.selection import Kernels, Setting, choose_kernels
from megatron.core.model.layer import BuildContext, LocalParts
from megatron.core.model.llama import LlamaModel
from megatron.core.model.pipeline import build_executor, stage_chunks
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.documents import Documents
from megatron.core.ops.fp8 import supports_fp8
from megatron.core.optimizer.learning_rate import LearningRateSchedule, build_learning_rate_schedule
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.weight_decay import build_weight_decay_schedule
from megatron.core.pipeline_parallel.executor import PipelineExecutor, ReadDocuments
from megatron.core.pipeline_parallel.schedule import Schedule
from megatron.core.pipeline_parallel.schedules import build_schedule, placement_of
from megatron.core.pipeline_parallel.simulator import Durations, simulate
from megatron.core.precision import number_formats
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.overlap import choose_overlap
from megatron.core.topology import Topology
from megatron.core.transformer_engine.fp8 import TransformerEngineFp8, why_unsupported
from megatron.core.transformer_engine.layers import TransformerEngineParts
from megatron.core.transformer_engine.overlap import shared_buffers
from megatron.core.transformer_engine.package import TransformerEngine, UnavailableError
from megatron.training.batch_schedule import BatchSchedule, build_batch_schedule
from megatron.training.data import Data, Vocabulary, build_data, load_vocabulary
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
from megatron.training.pipeline_profile import PipelineProfile, check_trace_path
from megatron.training.profile import build_profile
from megatron.training.saver import Saver
from megatron.training.state import Progress, RunState, SavedRun, find_saved_run, seed_random
from megatron.training.stop import SignalWatch, StopConditions
from megatron.training.timers import Timers
from megatron.training.trainer import Listener, Trainer
from megatron.training.wandb_writer import check_wandb_credentials
from megatron.training.writers import build_writers

Say = Callable[[str], None]


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
    describe_run(config, topology, model, state, batches, train_iters, say)
    describe_kernels(kernels, say)
    memory = data_parallel.memory() | state.optimizer.memory()
    say(f"memory on this rank: {', '.join(f'{kind} {size / 2**20:,.1f} MiB' for kind, size in memory.items() if size)}")
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


def build_kernels(config: RunConfig, topology: Topology, vocabulary: Vocabulary) -> Kernels:
    """What computes each operation on this rank."""
    size = topology.tensor_parallel.size
    model = config.model.resolve(vocabulary.size, size, config.seq_length)
    formats = number_formats(config.precision, config.optimizer)
    setting = Setting(
        topology.device,
        formats.weight,
        formats.gradient,
        AttentionShape(model.num_attention_heads // size, model.num_query_groups // size, model.kv_channels),
        needs_log_sum_exp=needs_log_sum_exp(config, topology),
        attention_backend=config.model.attention_backend,
        engine=find_transformer_engine(config, topology),
    )
    return choose_kernels(config.kernels, setting)


def check_kernels_agree(choices: Sequence[Choice], world: Communicator) -> None:
    """Refuse ranks that differ, by packages, compilers or GPUs: what tensor-parallel ranks each compute, and must
    compute alike, would drift apart."""
    for rank, others in enumerate(world.all_gather_object(choices)):
        for mine, other in zip(choices, others, strict=True):
            if mine.implementation != other.implementation:
                raise ConfigError(
                    f"The {mine.operation} kernel differs among ranks: on rank {world.rank} {mine.implementation} "
                    f"({mine.reason}), on rank {rank} {other.implementation} ({other.reason}): install the same on all "
                    f"hosts, or choose one by --kernel {mine.operation}={mine.implementation}."
                )


def needs_log_sum_exp(config: RunConfig, topology: Topology) -> bool:
    """Whether attention must tell it: where partial results are merged; and where activations go to the host, since the
    one kernel that does not tell keeps a graph of its own, which cannot."""
    return topology.context_parallel.size > 1 or config.activations.cpu_offloading_num_layers > 0


def build_parallel_model(config: RunConfig, topology: Topology, vocabulary: Vocabulary, kernels: Kernels) -> LlamaModel:
    """This rank's part of the model, without initial weights."""
    parallel = build_tensor_parallel(config, topology)
    overlaps = parallel.overlap is not None
    architecture = config.model.resolve(vocabulary.size, parallel.size, config.seq_length)
    dtype = number_formats(config.precision, config.optimizer).weight
    context_parallel = ContextParallel(topology.context_parallel, config.parallel.cp_comm_type)
    # Left to FSDP2, so that whole weights never lie in memory; it cannot do that with tensors that have none at all.
    leaves_memory = topology.has_memory and shards_weights(config.parallel, topology)
    weights_device = torch.device("meta") if leaves_memory else None
    context = BuildContext(
        parallel,
        dtype,
        topology.device,
        kernels.attention,
        kernels=kernels.layers,
        weight_gradient=kernels.weight_gradient,
        context_parallel=context_parallel,
        weights_device=weights_device,
        activations=config.activations,
        parts=LocalParts() if kernels.engine is None else TransformerEngineParts(kernels.engine, overlaps=overlaps),
        fp8=build_fp8(config, topology, kernels.engine),
    )
    layers, stages = architecture.num_layers, topology.grid.pp
    virtual_stages = config.pipeline.virtual_stages(layers, stages)
    schedule, chunks = config.pipeline.schedule(layers, stages), config.pipeline.num_chunks(layers, stages)
    placement = placement_of(schedule, stages, chunks)
    mine = stage_chunks(virtual_stages, placement, topology.pipeline_parallel.rank)
    return LlamaModel(architecture, context, mine)


def build_tensor_parallel(config: RunConfig, topology: Topology) -> TensorParallel:
    """How layers are shared; one rank alone splits and overlaps nothing."""
    ranks = topology.tensor_parallel
    if ranks.size == 1 or not config.parallel.sequence_parallel:
        return TensorParallel(ranks)
    overlap = choose_overlap(ranks, topology.device) if config.parallel.tp_comm_overlap else None
    return TensorParallel(ranks, sequence_parallel=True, overlap=overlap)


def share_buffers(config: RunConfig, topology: Topology, engine: TransformerEngine | None, at_end: ExitStack) -> None:
    """What layers of Transformer Engine overlap with, if they shall, until ``at_end``; by all ranks together."""
    ranks = topology.tensor_parallel
    if engine is None or ranks.size == 1 or not config.parallel.tp_comm_overlap:
        return
    rows = config.micro_batch_size * config.seq_length // topology.grid.cp
    hidden_size = config.model.resolve(1, ranks.size, config.seq_length).hidden_size
    try:
        at_end.enter_context(shared_buffers(engine, config.precision, ranks, rows, hidden_size))
    except UnavailableError as error:
        raise RankError(
            f"--tp-comm-overlap with --transformer-impl transformer_engine needs that package, which on rank "
            f"{topology.rank} {error}: change that, use --transformer-impl local, or remove --tp-comm-overlap."
        ) from error


def find_transformer_engine(config: RunConfig, topology: Topology) -> TransformerEngine | None:
    """Transformer Engine, if ``--transformer-impl`` asks for it."""
    if config.model.transformer_impl == "local":
        return None
    try:
        return TransformerEngine.find(topology.device)
    except UnavailableError as error:
        raise ConfigError(
            f"--transformer-impl transformer_engine needs that package, which {error}: install requirements-cuda.txt "
            "on a machine with a GPU, or use --transformer-impl local."
        ) from error


def build_fp8(config: RunConfig, topology: Topology, engine: TransformerEngine | None) -> Fp8Layers | None:
    """What FP8 linear layers share, if ``--fp8-format`` asks for them."""
    if config.precision.fp8_format is None:
        return None
    if engine is not None:
        reason = why_unsupported(engine, config.precision)
        if reason is not None:
            raise ConfigError(
                f"--fp8-recipe {config.precision.fp8_recipe} does not run on {device_name(topology.device)} "
                f"({reason}): use another recipe, or remove --fp8-format."
            )
        return TransformerEngineFp8(engine, config.precision, topology.stage_ranks)
    if not supports_fp8(topology.device):
        raise ConfigError(
            f"--fp8-format {config.precision.fp8_format} needs a GPU with FP8 units (Ada, Hopper or newer), which "
            f"{device_name(topology.device)} is not: remove it."
        )
    # Beside weights that are gathered and freed layer by layer, quantised copies of all would be kept in vain.
    keeps_weights = not shards_weights(config.parallel, topology)
    return Fp8Scaling(config.precision, topology.stage_ranks, topology.device, keeps_weights)


def build_data_parallel(config: RunConfig, topology: Topology, model: LlamaModel) -> DataParallel:
    """The model under its data-parallel strategy, with its initial weights."""
    data_parallel = wrap_model(config, topology, model)
    data_parallel.initialize(config.training.seed)
    return data_parallel


def wrap_model(config: RunConfig, topology: Topology, model: LlamaModel) -> DataParallel:
    """The model under its data-parallel strategy, its weights without values."""
    return wrap_data_parallel(model, number_formats(config.precision, config.optimizer), topology, config.parallel)


def pipeline_schedule(config: RunConfig, num_layers: int, num_stages: int) -> Callable[[int], Schedule]:
    """Makes the schedule of a number of microbatches."""
    return partial(
        build_schedule,
        config.pipeline.schedule(num_layers, num_stages),
        num_stages,
        num_chunks=config.pipeline.num_chunks(num_layers, num_stages),
        microbatch_group_size=config.pipeline.microbatch_group_size_per_virtual_pipeline_stage,
    )


def build_pipeline(config: RunConfig, topology: Topology, model: LlamaModel) -> PipelineExecutor:
    """What runs this rank's part of the model; with one stage, too."""
    return build_executor(
        model,
        topology,
        pipeline_schedule(config, model.config.num_layers, topology.grid.pp),
        config.seq_length,
        config.micro_batch_size,
        config.pipeline.overlap_p2p_communication,
        read_documents(config),
    )


def read_documents(config: RunConfig) -> ReadDocuments | None:
    """How to read where documents begin; None where that does not matter."""
    if not config.data.marks_documents:
        return None
    return partial(
        Documents, masks_attention=config.data.masks_documents, resets_positions=config.data.reset_position_ids
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


def describe_run(
    config: RunConfig,
    topology: Topology,
    model: LlamaModel,
    state: RunState,
    batches: BatchSchedule,
    train_iters: int,
    say: Say,
) -> None:
    """A few lines on what is about to run, once."""
    grid = topology.grid
    num_microbatches = batches.num_microbatches(state.progress.consumed_samples)
    strategy = config.parallel.sharding_strategy
    types = dict.fromkeys(config.parallel.cp_comm_type)
    context = f"context {grid.cp} ({', '.join(types)}) x " if grid.cp > 1 else ""
    sequence = ", sequence parallel" if model.context.parallel.sequence_parallel else ""
    say(
        f"model: {model.config.num_parameters():,} parameters, "
        f"{sum(weight.tensor.numel() for weight in state.data_parallel.stored_weights):,} on this rank"
    )
    say(
        f"layout: {grid.world_size} ranks on {device_name(topology.device) or 'CPU'} = tensor {grid.tp}{sequence} x "
        f"{context}pipeline {grid.pp} x data {grid.dp} ({strategy}), {config.precision.name}"
    )
    if model.context.fp8 is not None:
        say(f"fp8: {describe_fp8(model.context.fp8, model.config.num_layers)}")
    if topology.rank == 0:
        describe_pipeline(config, model.config.num_layers, grid.pp, num_microbatches, say)
    if config.activations != ActivationConfig():
        say(f"activations: {describe_activations(config.activations)}")
    if model.context.parallel.overlap is not None:
        theirs = "Transformer Engine's buffers; in the head " if config.model.transformer_impl != "local" else ""
        say(f"tensor-parallel overlap: {theirs}{model.context.parallel.overlap.name}")
    for flag, is_given, purpose in (
        ("--sequence-parallel", config.parallel.sequence_parallel, "split"),
        ("--tp-comm-overlap", config.parallel.tp_comm_overlap, "overlap"),
    ):
        if is_given and grid.tp == 1:
            say(f"{flag} has nothing to {purpose} with --tensor-model-parallel-size 1")
    say(
        f"run: {train_iters} iterations of {batches.final_batch_size} x {config.seq_length} tokens, "
        f"{num_microbatches} microbatches per rank"
    )


def describe_kernels(kernels: Kernels, say: Say) -> None:
    """The choice of every kernel and its reason."""
    say("\n".join(["kernels:", *table(kernels.choices)]))


def describe_activations(activations: ActivationConfig) -> str:
    """What is kept of a forward pass where that is not everything, on the device."""
    words = []
    if activations.granularity == "full":
        count = activations.recompute_num_layers
        words.append(
            f"of every {count} layers only the input is kept"
            if activations.recompute_method == "uniform"
            else f"of the first {count} layers of a chunk only inputs are kept"
        )
    elif activations.modules:
        words.append(f"{', '.join(sorted(activations.modules))} computed again")
    if activations.distribute_saved_activations:
        words.append("divided over the tensor-parallel ranks")
    if activations.cpu_offloading_num_layers:
        words.append(f"what the first {activations.cpu_offloading_num_layers} layers of a chunk keep is on the host")
    return "; ".join(words)


def describe_fp8(fp8: Fp8Layers, num_layers: int) -> str:
    """What is in FP8, and how it is scaled."""
    config = fp8.config
    layers = sum(fp8.includes(layer, num_layers) for layer in range(num_layers))
    scaling = "scales of the tensors at hand"
    if config.fp8_recipe in ("blockwise", "mxfp8"):
        scaling = f"scales of blocks ({config.fp8_recipe})"
    if fp8.is_delayed:
        history = f"amax history of {config.fp8_amax_history_len}, {config.fp8_amax_compute_algo}"
        scaling = f"delayed scaling ({history}, margin {config.fp8_margin})"
    return (
        f"{config.fp8_format} with {scaling}: linear layers of {layers} of {num_layers} transformer layers, by "
        f"{fp8.multiplier}; the rest in bf16"
    )


def describe_pipeline(config: RunConfig, num_layers: int, num_stages: int, num_microbatches: int, say: Say) -> None:
    """A line on the stages and what the schedule costs, if there are several."""
    if num_stages == 1:
        if config.pipeline.pipeline_schedule is not None:
            say("--pipeline-schedule has nothing to order with --pipeline-model-parallel-size 1")
        return
    schedule = pipeline_schedule(config, num_layers, num_stages)(num_microbatches)
    layers = [len(virtual_stage.layers) for virtual_stage in config.pipeline.virtual_stages(num_layers, num_stages)]
    times = tuple(map(float, layers))
    timeline = simulate(schedule, Durations(forward=times, backward=times, weight=times))
    say(
        f"pipeline: {schedule.name}, {num_stages} stages of {schedule.placement.num_chunks} chunks with "
        f"{'-'.join(map(str, layers))} layers; stages idle {timeline.bubble_fraction:.1%} of the time, counting layers "
        "alone with F = B = W"
    )
