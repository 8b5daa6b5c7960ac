"""Pretraining from flags to the last checkpoint."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron.checkpoint.lock import RunLock
from megatron.config.run import RunConfig
from megatron.core.topology import Topology
from megatron.training.architecture import FlagsOver, settle_architecture
from megatron.training.description import Say
from megatron.training.launch import Process, choose_device, joined, prepare_cpu
from megatron.training.listeners import Evaluation
from megatron.training.setup import build_trainer, save_directories_locked
from megatron.training.stop import SignalWatch, watch_signals
from megatron.training.trainer import Trainer


def pretrain(config: RunConfig, process: Process, flags_over: FlagsOver) -> None:
    """Run this process's part of the training that ``config`` describes.

    ``flags_over`` reads the same flags once more, for an architecture that only a checkpoint tells.
    Raises :class:`~megatron.config.errors.UserError` for what the user can mend.
    """

    def say(text: str) -> None:
        if process.rank == 0:
            print(f"> {text}", flush=True)

    device = choose_device(config.training.device, process)
    if device.type == "cpu":
        prepare_cpu(process)
    with (
        deterministic_algorithms(config.training.deterministic_mode),
        watch_signals(config.training) as signals,
        joined(config.parallel, process, device) as topology,
        save_directories_locked(config.checkpoint, topology.world) as locks,
    ):
        config = settle_architecture(config, flags_over, topology.world, say)
        train(config, topology, locks, signals, say)


@contextmanager
def deterministic_algorithms(are_wanted: bool) -> Iterator[None]:
    """Let torch use none but deterministic algorithms (``--deterministic-mode``)."""
    before = torch.are_deterministic_algorithms_enabled()
    if are_wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses products on GPUs
    torch.use_deterministic_algorithms(before or are_wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def train(config: RunConfig, topology: Topology, locks: Sequence[RunLock], signals: SignalWatch, say: Say) -> None:
    """Build the trainer and run it; it must be gone when the ranks part."""
    with ExitStack() as at_end:
        trainer = build_trainer(config, topology, locks, signals, say, at_end)
        try:
            if config.validation.skip_train:
                evaluate_only(trainer)
            else:
                say(f"stopped: {trainer.run()}")
        finally:
            trainer.close()


def evaluate_only(trainer: Trainer) -> None:
    """Evaluate the loaded weights on the validation and test splits (``--skip-train``)."""
    for listener in trainer.listeners:
        if isinstance(listener, Evaluation):
            listener.evaluate(trainer, "validation")
            listener.evaluate(trainer, "test")
