"""Pretraining."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

import torch

from megatron.config.checks import check_resolved_architecture
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.core.control import run_on_rank0
from megatron.errors import ConfigError, ExitCode
from megatron.features.faults.flags import START
from megatron.features.faults.listener import build_fault_injector, reach
from megatron.features.preflight.run import check_nodes
from megatron.features.spikes.listener import RollbackRequested, go_back
from megatron.metrics.writer import print_above_bar
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.operation.lease import Lease
from megatron.operation.processes import LAUNCHER, HardwareQueues
from megatron.operation.signals import StopRequested, watch_signals
from megatron.torch_compat import ranks_store
from megatron.training.build.run import RunParts, build_trainer
from megatron.training.build.vocabulary import load_vocabulary
from megatron.training.checkpoints.comparison import check_architecture, given_architecture
from megatron.training.checkpoints.save_directories import save_directories_locked
from megatron.training.checkpoints.saved_run import check_may_begin, look_up_saved_run
from megatron.training.context import RunContext
from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu
from megatron.training.run_files import StartedCommand, attempt_recorded, run_files_written

FlagsOver = Callable[[ModelConfig], RunConfig]
"""Parses the command line again with other defaults of the model's flags."""


def pretrain(
    config: RunConfig,
    process: Process,
    flags_over: FlagsOver,
    queues: HardwareQueues,
    command: StartedCommand,
    heartbeat: Heartbeat,
    parts: RunParts | None = None,
) -> ExitCode:
    """Run this rank's part of the training; returns COMPLETE or STOPPED.

    ``flags_over`` parses the same flags over other defaults of the model (``--use-checkpoint-args``). ``queues`` are
    set in the environment already. ``command`` is what started this process. Raises
    :class:`~megatron.errors.UserError`.
    """

    def log_rank0(text: str) -> None:
        if process.rank == 0:
            print_above_bar(sys.stdout, f"> {text}")

    # The order of these steps decides what a failure costs: the locks come before any record in the directories, and
    # the nodes are checked before the model is built.
    faults = build_fault_injector(config, process.rank)
    reach(faults, START)
    device = choose_device(config.training.device, process)
    if device.type == "cpu":
        prepare_cpu(process)
    elif config.optimizer.optimizer_cpu_offload and torch.get_num_threads() == 1:
        # torchrun sets OMP_NUM_THREADS=1, for ranks that only launch kernels.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // process.local_world_size))
    try:
        with (
            deterministic_algorithms(config.training.deterministic_mode),
            watch_signals(config.training) as signals,
            init_distributed(config.parallel, process, device, heartbeat) as topology,
        ):
            context = RunContext(config, topology, signals, log_rank0, heartbeat, faults)
            is_ours = LAUNCHER in os.environ or heartbeat.is_watched
            if config.operation.on_hang == "report" and not is_ours:
                # Under another launcher than ours a process of the node reports hangs.
                from megatron.operation.side_watch import join

                place = process.rank, process.local_rank, process.local_world_size, process.world_size
                join(heartbeat, *place, ranks_store(), command.words)
            if device.type != "cpu":
                (context.warn_rank0 if queues.is_mistake else log_rank0)(queues.describe())
            with (
                save_directories_locked(context) as locks,
                attempt_recorded(context) as end,
                run_files_written(context, command) as write_files,
            ):
                context = replace(context, config=resolve_architecture(context, flags_over))
                check_nodes(context, lambda: load_vocabulary(context.config).size)
                end.exit_code = train(context, locks, parts, write_files)
                return end.exit_code
    except StopRequested as stop:
        log_rank0(f"stopped: {stop}")
        return stop.exit_code


def resolve_architecture(context: RunContext, flags_over: FlagsOver) -> RunConfig:
    """The flags with a checked architecture; a collective.

    With ``--use-checkpoint-args`` the model's flags that are not given take the values of the checkpoint. Raises
    :class:`~megatron.errors.UserError` if a given one differs.
    """
    if not context.config.checkpoint.use_checkpoint_args:
        return context.config
    # Rank 0 reads one checkpoint for all ranks. If it turns out to be damaged, another one is loaded later: loading
    # compares the architecture again.
    return run_on_rank0(context.control, lambda: _resolve(context, flags_over))


def _resolve(context: RunContext, flags_over: FlagsOver) -> RunConfig:
    config, world_size, log_rank0 = context.config, context.control.size, context.log_rank0
    saved = look_up_saved_run(config.checkpoint)
    if saved is None:
        check_may_begin(config.checkpoint)
        try:
            check_resolved_architecture(config, world_size)
        except ConfigError as error:
            raise ConfigError(
                f"--load {config.checkpoint.load} has no checkpoint yet for --use-checkpoint-args, and {error}"
            ) from None
        log_rank0("architecture: from the command line, since there is no checkpoint yet")
        return config
    architecture = asdict(saved.state.architecture)
    defaults = ModelConfig.of(saved.state.architecture)
    if architecture["max_position_embeddings"] < config.seq_length:
        defaults = replace(defaults, max_position_embeddings=None)  # no weight depends on it
    config = flags_over(defaults)
    surplus = "what differs" if config.model.model is None else f"--model {config.model.model} and what differs"
    given, where = given_architecture(config.model), f"The checkpoint under {saved.root}"
    check_architecture(given, architecture, where, remedy=f"leave out {surplus}")
    check_resolved_architecture(config, world_size)
    log_rank0(f"architecture: from the checkpoint of iteration {saved.iteration} in {saved.root}")
    return config


def train(
    context: RunContext,
    locks: Sequence[Lease],
    parts: RunParts | None = None,
    on_built: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Build the run and train; after each rollback, build it again from an earlier checkpoint."""
    started, returned = time.monotonic(), None
    while True:
        try:
            with ExitStack() as at_end:
                trainer = build_trainer(context, locks, at_end, started, returned, parts)
                on_built()
                try:
                    if context.config.validation.skip_train:
                        for listener in trainer.listeners:
                            listener.on_skip_train(trainer)
                    else:
                        context.log_rank0(f"stopped: {trainer.run()}")
                    context.heartbeat.enter(Section.END)
                    is_complete = trainer.stop.is_complete(trainer.state.progress.iteration)
                    has_ended = context.config.validation.skip_train or is_complete
                    return ExitCode.COMPLETE if has_ended else ExitCode.STOPPED
                except RollbackRequested:
                    context.heartbeat.enter(Section.LOAD)
                    raise
                finally:
                    # After another error the rank is still in the section where it failed.
                    trainer.close()
                    del trainer  # before the process groups are destroyed
        except RollbackRequested as requested:
            request = requested.with_traceback(None)  # whose frames hold the trainer
        # Before the next trainer allocates memory. Hooks and closures make cycles of a trainer's modules.
        gc.collect()
        with context.heartbeat.section(Section.LOAD):
            returned = go_back(context, request)


@contextmanager
def deterministic_algorithms(are_wanted: bool) -> Iterator[None]:
    """Restrict torch to deterministic algorithms (``--deterministic-mode``)."""
    if torch.are_deterministic_algorithms_enabled() or not are_wanted:
        yield  # torch would import its compiler, for most of a second, to change nothing
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses products on GPUs
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
