"""Building a run: :func:`build_trainer` calls every step in order; the list of listeners is the literal one of
:func:`build_listeners`."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from megatron.core.control import run_on_all_ranks, run_on_rank0
from megatron.core.device import device_name
from megatron.core.hyperparameters import build_weight_decay_schedule
from megatron.core.kernels.selection import Kernels, build_kernels, check_kernels_agree, share_buffers
from megatron.core.models.parallelize import OwnLayers, ParallelModel, parallelize
from megatron.core.models.transformer import TransformerModel
from megatron.data.data_module import BuildLoader
from megatron.features.faults.flags import LOAD
from megatron.features.faults.listener import FaultInjection, reach
from megatron.features.known_product.listener import KnownAnswer, build_known_answer
from megatron.features.layer_metrics.listener import build_layer_metrics
from megatron.features.record_tensors.listener import build_tensor_recorder
from megatron.features.replay.listener import ReplayCheck, build_replay_check
from megatron.features.replicas.listener import build_state_check
from megatron.features.spikes.flags import UpdateGuard
from megatron.features.spikes.listener import Return, Spikes
from megatron.features.stragglers.listener import build_stragglers
from megatron.metrics.jsonl import ValidationHistory
from megatron.metrics.writer import MetricsWriter, ReportedRun, build_writers
from megatron.operation.heartbeat import Section
from megatron.operation.lease import Lease
from megatron.operation.waits import Sections
from megatron.training.build.data import OwnData, build_data, find_own_data
from megatron.training.build.description import describe_run
from megatron.training.build.plan import RunPlan, build_learning_rate, plan_run
from megatron.training.build.vocabulary import Vocabulary, load_vocabulary
from megatron.training.checkpoints.saved_run import (
    Progress,
    check_nothing_is_abandoned,
    find_start,
    with_train_epochs,
)
from megatron.training.checkpoints.saver import Saver, keep_tokenizer
from megatron.training.checkpoints.state import RunState, resume, seed_random
from megatron.training.context import RunContext, TrainModule
from megatron.training.flops import resolve_peak
from megatron.training.loop.data import Data
from megatron.training.loop.listeners import (
    Checkpoints,
    Conclusion,
    DataComparison,
    Evaluation,
    GarbageCollection,
    MemoryRelease,
    MemoryReport,
    Metrics,
)
from megatron.training.loop.step import StopConditions
from megatron.training.loop.trainer import Listener, Trainer
from megatron.training.profiles import (
    MemoryHistory,
    PipelineProfile,
    build_profile,
    check_trace_path,
    start_memory_history,
)
from megatron.training.run_files import effective_time_meter


def build_trainer(
    context: RunContext,
    locks: Sequence[Lease],
    at_end: ExitStack,
    started: float,
    returned: Return | None = None,
    parts: "RunParts | None" = None,
) -> Trainer:
    """Build this rank's part of the run; ``at_end`` frees resources that must outlive the trainer.

    ``started`` is the reading of the monotonic clock when the run began. ``returned`` is the checkpoint to continue
    from after a rollback. Raises :class:`~megatron.errors.UserError` on every rank alike.
    """
    parts = parts or RunParts()
    if returned is not None:
        context = after_rollback(context, returned)
    config, topology, control = context.config, context.topology, context.control
    # What ends a run before it costs anything.
    run_on_rank0(control, lambda: config.logging.check_environment(os.environ))
    run_on_rank0(control, lambda: check_trace_path(config.logging.profile_pipeline))
    # Where the run starts, and what it reads from there.
    seed_random(config.training.seed)
    vocabulary = run_on_all_ranks(control, lambda: load_vocabulary(config))
    with context.heartbeat.section(Section.LOAD):
        start = find_start(config.checkpoint, control) if returned is None else returned.start
    if parts.progress is not None:
        start = dataclasses.replace(start, beginning=parts.progress)
    if not config.validation.skip_train and returned is None:
        run_on_rank0(control, lambda: check_nothing_is_abandoned(config.checkpoint, start))
    own = run_on_all_ranks(control, lambda: find_own_data(config.data, parts.build_loader))
    plan = plan_run(context, vocabulary, start)
    # The model in the layout of this rank; its weights have no values before initialize().
    memory_history = start_memory_history(config.logging, topology)
    kernels = run_on_all_ranks(control, lambda: build_kernels(config, topology, vocabulary.size))
    check_kernels_agree(kernels.choices, control)
    share_buffers(config, topology, kernels.engine, at_end)
    parallel = parallelize(config, topology, vocabulary.size, kernels, parts.layers)
    parallel.data_parallel.initialize(config.training.seed)
    model = parallel.model
    # Optimizer and schedules, and what the checkpoint says of them.
    state = build_state(context, parallel, kernels, plan)
    with context.heartbeat.section(Section.LOAD):
        reach(context.faults, LOAD)
        resume(state, start, context)
    if plan.begins_stage:
        state.begin_stage()
    if returned is not None:
        state.rollbacks = returned.rollbacks
    for notice in plan.stages.notices:
        context.log_rank0(notice)
    # Data, the checks that all ranks must pass before the first iteration, and the log.
    if own is not None and not plan.begins_stage:
        own = dataclasses.replace(own, saved=state.saved_loader)
    data = parts.build_data(context, vocabulary, plan, own)
    state.loader_state = data.train.loader_state
    state.data_stages, warnings = with_train_epochs(plan.stages.stages, data.train_epochs)
    for warning in warnings:
        context.log_rank0(warning)
    known_answer = build_known_answer(context, state.module)
    replay = build_replay_check(context, state.module, known_answer)
    writers = parts.open_writers(context, plan)
    describe_run(context, model, kernels, state, plan)
    if not config.validation.skip_train and returned is None:
        run_on_rank0(control, lambda: keep_tokenizer(context))
    return Trainer(
        context,
        state,
        plan.batches,
        data,
        StopConditions(
            plan.train_iters,
            config.training,
            context.signals,
            topology.world,
            topology.device,
            started,
            first_iteration=plan.progress.iteration,
            alarms=(known_answer, data.check),
        ),
        Sections(
            context.heartbeat,
            config.logging.timing_log_level,
            torch.cuda.synchronize if topology.device.type != "cpu" else None,
        ),
        build_listeners(
            context,
            plan,
            model,
            kernels,
            vocabulary,
            data,
            locks,
            known_answer,
            replay,
            memory_history,
            parts.listeners,
        ),
        writers,
        is_after_rollback=returned is not None,
    )


def build_state(context: RunContext, parallel: ParallelModel, kernels: Kernels, plan: RunPlan) -> RunState:
    """Optimizer, loss scale, schedules and progress, before anything is loaded."""
    config = context.config
    return RunState(
        context,
        architecture=parallel.model.config,
        module=TrainModule.of(config, context.topology, parallel, kernels),
        lr_schedule=build_learning_rate(config, plan),
        weight_decay=build_weight_decay_schedule(
            config.optimizer, config.training.train_samples or plan.planned_samples
        ),
        progress=dataclasses.replace(plan.progress),
        data_stages=plan.stages.stages,
        guard=UpdateGuard(config.operation, config.training.check_for_nan_in_loss_and_grad),
    )


def build_listeners(
    context: RunContext,
    plan: RunPlan,
    model: TransformerModel,
    kernels: Kernels,
    vocabulary: Vocabulary,
    data: Data,
    locks: Sequence[Lease],
    known_answer: KnownAnswer,
    replay: ReplayCheck | None,
    memory_history: MemoryHistory | None,
    added: Sequence[Listener],
) -> list[Listener]:
    """The listeners of a run, features and those ``added`` among them, in the order in which they receive an event."""
    config, is_on_gpu = context.config, context.topology.device.type != "cpu"
    logging, validation, training = config.logging, config.validation, config.training
    saves, release_level = config.checkpoint.save_schedule, training.empty_unused_memory_level
    device = device_name(context.topology.device)
    peak, source_of_peak = resolve_peak(device, config.precision.product_name, logging.peak_tflops)
    context.log_rank0(source_of_peak)
    effective_time = effective_time_meter(context)
    listeners = (
        # First: no other listener sees an iteration after which the run stops or rolls back.
        Spikes(),
        # Before whatever reads the state, and before a save begins.
        FaultInjection(context.faults, config.checkpoint) if context.faults.faults else None,
        # Before evaluation, which also uses the pipeline: the profiles record only the iteration.
        PipelineProfile(logging.profile_pipeline, logging.profile_pipeline_iteration, context.log_rank0)
        if logging.profile_pipeline is not None
        else None,
        build_profile(config, context.topology.rank, context.topology.device, context.log_rank0),
        memory_history,
        MemoryReport() if is_on_gpu else None,
        MemoryRelease(release_level) if is_on_gpu and release_level else None,
        # Before the metrics, to which they add some.
        build_stragglers(context),
        *build_layer_metrics(logging, model),
        build_tensor_recorder(logging, model, kernels.choices, plan.progress.iteration + 1),
        *added,
        Metrics(logging, plan.train_iters, model.config.flops_per_token(config.seq_length), peak, effective_time),
        Evaluation(validation.eval_interval, data.evaluated, vocabulary.token_bytes),
        DataComparison(data.check),
        # Replicas before the replay, which cannot tell wrong weights from wrong products.
        known_answer,
        build_state_check(context, known_answer),
        replay,
        # After evaluation, which may take long, so that no save is under way when a signal arrives in it.
        Checkpoints(Saver(context, locks), saves) if config.checkpoint.save is not None else None,
        GarbageCollection(training.manual_gc_interval, validation.eval_interval, saves) if training.manual_gc else None,
        # Last, because it names the last checkpoint.
        Conclusion(config, effective_time),
    )
    return [listener for listener in listeners if listener is not None]


def after_rollback(context: RunContext, returned: Return) -> RunContext:
    """The context of a run that continues after a rollback.

    Flags that concern only the first start of a run do not apply again.
    """
    config = context.config
    checkpoint = dataclasses.replace(config.checkpoint, load_optim=True, load_rng=True)
    logging, traced = config.logging, config.logging.profile_pipeline_iteration
    if logging.profile_pipeline is not None and traced <= returned.saved.iteration:
        logging = dataclasses.replace(logging, profile_pipeline=None)
    return dataclasses.replace(context, config=dataclasses.replace(config, checkpoint=checkpoint, logging=logging))


def open_writers(context: RunContext, plan: RunPlan) -> list[MetricsWriter]:
    """The metrics writers on rank 0; none on other ranks."""
    config = context.config
    run = ReportedRun(
        stream=sys.stdout,
        train_iters=plan.train_iters,
        resume_iteration=plan.progress.iteration,
        plot_interval=config.logging.tensorboard_log_interval,
        save_directory=config.checkpoint.save,
        flags=dataclasses.asdict(config),
        environment=os.environ,
    )
    is_writer = context.topology.rank == 0
    writers = run_on_all_ranks(context.control, lambda: build_writers(config.logging, run) if is_writer else [])
    return [*writers, ValidationHistory(config.logging.metrics_jsonl)] if is_writer else []


@dataclasses.dataclass(frozen=True)
class RunParts:
    """Parts of a run that another program replaces, and listeners that it adds."""

    build_loader: BuildLoader | None = None
    """Returns the loader of training and validation samples, as the function of ``--data-module`` does."""
    build_data: Callable[[RunContext, Vocabulary, RunPlan, OwnData | None], Data] = build_data
    open_writers: Callable[[RunContext, RunPlan], list[MetricsWriter]] = open_writers
    layers: OwnLayers | None = None
    progress: Progress | None = None
    """The progress at which a run without a checkpoint begins, in schedules and samples; None: the first iteration."""
    listeners: Sequence[Listener] = ()
