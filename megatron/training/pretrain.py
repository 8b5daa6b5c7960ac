"""Pretraining."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from megatron.config.run import RunConfig
from megatron.errors import ExitCode
from megatron.operation.environment import HardwareQueues
from megatron.training.attempts import attempt_counted
from megatron.training.build.architecture import FlagsOver, resolve_architecture
from megatron.training.build.run import build_trainer
from megatron.training.checkpoints.locks import save_directories_locked
from megatron.training.context import RunContext
from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu
from megatron.training.signals import StopRequested, watch_signals


def pretrain(config: RunConfig, process: Process, flags_over: FlagsOver, queues: HardwareQueues) -> ExitCode:
    """Run this rank's part of the training; returns COMPLETE or STOPPED.

    ``flags_over`` parses the same flags over other defaults of the model (``--use-checkpoint-args``). ``queues`` are
    set in the environment already. Raises :class:`~megatron.errors.UserError`.
    """

    def log_rank0(text: str) -> None:
        if process.rank == 0:
            print(f"> {text}", flush=True)

    device = choose_device(config.training.device, process)
    if device.type == "cpu":
        prepare_cpu(process)
    try:
        with (
            deterministic_algorithms(config.training.deterministic_mode),
            watch_signals(config.training) as signals,
            init_distributed(config.parallel, process, device) as topology,
        ):
            context = RunContext(config, topology, signals, log_rank0)
            if device.type != "cpu":
                (context.warn_rank0 if queues.is_mistake else log_rank0)(queues.describe())
            with save_directories_locked(context) as locks, attempt_counted(context), ExitStack() as at_end:
                context = replace(context, config=resolve_architecture(context, flags_over))
                trainer = build_trainer(context, locks, at_end)
                try:
                    if context.config.validation.skip_train:
                        trainer.evaluate_only()
                        return ExitCode.COMPLETE
                    log_rank0(f"stopped: {trainer.run()}")
                    is_complete = trainer.stop.is_complete(trainer.state.progress.iteration)
                    return ExitCode.COMPLETE if is_complete else ExitCode.STOPPED
                finally:
                    trainer.close()
                    del trainer  # before the process groups are destroyed
    except StopRequested as stop:
        log_rank0(f"stopped: {stop}")
        return stop.exit_code


@contextmanager
def deterministic_algorithms(are_wanted: bool) -> Iterator[None]:
    """Restrict torch to deterministic algorithms (``--deterministic-mode``)."""
    before = torch.are_deterministic_algorithms_enabled()
    if are_wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses products on GPUs
    torch.use_deterministic_algorithms(before or are_wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
