"""Pretraining."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from megatron.checkpoint.lock import RunLock
from megatron.config.run import RunConfig
from megatron.errors import ExitCode
from megatron.features.faults.flags import START
from megatron.features.faults.listener import build_fault_injector
from megatron.features.preflight.run import check_nodes
from megatron.features.spikes.listener import Return, RollbackRequested, go_back
from megatron.metrics.writer import print_above_bar
from megatron.operation.environment import HardwareQueues
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.operation.processes import LAUNCHER
from megatron.operation.signals import StopRequested, watch_signals
from megatron.torch_compat import ranks_store
from megatron.training.attempts import attempt_recorded
from megatron.training.build.run import RunParts, build_trainer
from megatron.training.checkpoints.save_directories import save_directories_locked
from megatron.training.context import RunContext
from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu
from megatron.training.pretrain import FlagsOver, resolve_architecture
from megatron.training.run_files import StartedCommand, run_files_written


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
    set in the environment already. ``command`` is what started this process. ``heartbeat`` is this rank's.
    ``parts`` replaces parts of the run. Raises
    :class:`~megatron.errors.UserError`.
    """

    def log_rank0(text: str) -> None:
        if process.rank == 0:
            print_above_bar(sys.stdout, f"> {text}")

    faults = build_fault_injector(config, process.rank)
    faults.reach(START)
    device = choose_device(config.training.device, process)
    if device.type == "cpu":
        prepare_cpu(process)
    try:
        with (
            deterministic_algorithms(config.training.deterministic_mode),
            watch_signals(config.training) as signals,
            init_distributed(config.parallel, process, device, heartbeat) as topology,
        ):
            context = RunContext(config, topology, signals, log_rank0, heartbeat, faults)
            watch_for_hangs(config, process, command, heartbeat)
            if device.type != "cpu":
                (context.warn_rank0 if queues.is_mistake else log_rank0)(queues.describe())
            with (
                save_directories_locked(context) as locks,
                attempt_recorded(context) as end,
                run_files_written(context, command) as write_files,
            ):
                context = replace(context, config=resolve_architecture(context, flags_over))
                check_nodes(context)
                end.exit_code = train(context, locks, parts, write_files)
                return end.exit_code
    except StopRequested as stop:
        log_rank0(f"stopped: {stop}")
        return stop.exit_code


def watch_for_hangs(config: RunConfig, process: Process, command: StartedCommand, heartbeat: Heartbeat) -> None:
    """With ``--on-hang report`` and another launcher than ours, let a process of the node report hangs."""
    if config.operation.on_hang == "report" and LAUNCHER not in os.environ and not heartbeat.is_watched:
        from megatron.operation.side_watch import join

        place = process.rank, process.local_rank, process.local_world_size, process.world_size
        join(heartbeat, *place, ranks_store(), command.words)


def train(
    context: RunContext,
    locks: Sequence[RunLock],
    parts: RunParts | None = None,
    on_built: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Build the run and train; after each rollback, build it again from an earlier checkpoint."""
    started, returned = time.monotonic(), None
    while True:
        try:
            return train_from(context, locks, started, returned, parts, on_built)
        except RollbackRequested as requested:
            request = requested.with_traceback(None)  # whose frames hold the trainer
        # Before the next trainer allocates memory. Hooks and closures make cycles of a trainer's modules.
        gc.collect()
        with context.heartbeat.section(Section.LOAD):
            returned = go_back(context, request)


def train_from(
    context: RunContext,
    locks: Sequence[RunLock],
    started: float,
    returned: Return | None,
    parts: RunParts | None = None,
    on_built: Callable[[], None] = lambda: None,
) -> ExitCode:
    """Build the run and train until its end; raises :class:`RollbackRequested`."""
    with ExitStack() as at_end:
        trainer = build_trainer(context, locks, at_end, started, returned, parts)
        on_built()
        try:
            if context.config.validation.skip_train:
                trainer.evaluate_only()
                context.heartbeat.enter(Section.END)
                return ExitCode.COMPLETE
            context.log_rank0(f"stopped: {trainer.run()}")
            context.heartbeat.enter(Section.END)
            is_complete = trainer.stop.is_complete(trainer.state.progress.iteration)
            return ExitCode.COMPLETE if is_complete else ExitCode.STOPPED
        except RollbackRequested:
            context.heartbeat.enter(Section.LOAD)
            raise
        finally:
            # After an error the rank is still in the section where it failed.
            trainer.close()
            del trainer  # before the process groups are destroyed


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
