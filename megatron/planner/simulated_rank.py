"""One training step of one rank, by the functions that set up and run every training, under a memory tracker.

With a :class:`~megatron.planner.fake_backend.SimulatedTopology` and fake tensors nothing is allocated, computed or
sent; with a real topology and real tensors the same code measures a real step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.config.run import RunConfig
from megatron.core.data_parallel.wrap import shards_weights
from megatron.core.models.parallelize import parallelize
from megatron.core.models.transformer import TransformerModel
from megatron.core.optimizer.hyperparameters import Hyperparameters
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.pipeline_parallel.recorder import ActionRecorder
from megatron.core.topology import Topology
from megatron.metrics.timers import Timers
from megatron.planner.kernels import simulated_kernels
from megatron.planner.memory import MemoryTracker
from megatron.schedules.schedule import Action
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.loop.step import train_step
from megatron.training.train_module import TrainModule


class _PassWatch(ActionRecorder):
    """Tells the tracker where a pass begins and ends: what outlives it is kept."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        """Name what runs."""
        names = {"F": "forward", "B": "backward", "W": "weight gradients"}
        self._tracker.during = f"{names[action.kind]} pass, microbatch {action.microbatch}, chunk {action.chunk}"
        yield
        if action.kind != "W":
            self._tracker.keep()
        self._tracker.during = "between passes"


def build_rank(
    config: RunConfig,
    topology: Topology,
    vocabulary: Vocabulary,
    tracker: MemoryTracker,
    device: torch.device | None = None,
) -> TrainModule:
    """Model, pipeline, data parallelism and optimizer, in the order of a run; weights are not initialised.

    ``device`` is that of the real run, by default the one on which this runs.
    """
    tracker.during = "set-up"
    kernels = simulated_kernels(config, topology, device or topology.device, vocabulary.size, tracker)
    with tracker.making("weights"):
        parallel = parallelize(config, topology, vocabulary.size, kernels)
    data_parallel = parallel.data_parallel
    for shard in data_parallel.param_shards:
        tracker.mark(shard.gradient, "gradients")
    with tracker.making("moments"):
        optimizer = Optimizer(config.optimizer, data_parallel, topology, kernels.optimizer)
    for state in optimizer.state():
        tracker.mark(state.tensor, "master weights" if state.kind == "master" else "moments")
    if shards_weights(config.parallel, topology):
        # The real set-up never has whole weights, the simulated one does.
        tracker.peak = tracker.now
    _watch_units(parallel.model, tracker)
    parallel.executor.recorder = _PassWatch(tracker)
    scaler = build_loss_scaler(config.precision)
    fp8 = parallel.model.context.fp8
    return TrainModule(parallel.executor, data_parallel, optimizer, scaler, topology.loss_ranks, fp8)


def run_step(
    config: RunConfig, topology: Topology, module: TrainModule, num_microbatches: int, tracker: MemoryTracker
) -> None:
    """One training step of as many microbatches."""
    tracker.during = "start of the step"
    train_step(
        module,
        _microbatches(config, topology),
        Hyperparameters(learning_rate=0.0),
        num_microbatches=num_microbatches,
        expected_tokens=num_microbatches * config.micro_batch_size * config.seq_length,
        timers=Timers(0),
    )
    tracker.during = "after the step"


def _microbatches(config: RunConfig, topology: Topology) -> Iterator[dict[str, Tensor]]:
    """Endless samples of one document, all tokens the same."""
    shape = config.micro_batch_size, config.seq_length // topology.grid.cp
    while True:
        microbatch = {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.ones(shape, dtype=torch.float32),
        }
        if config.data.marks_documents:
            microbatch["document_starts"] = torch.zeros(config.micro_batch_size, config.seq_length, dtype=torch.bool)
        yield microbatch


def _watch_units(model: TransformerModel, tracker: MemoryTracker) -> None:
    """What outlives an embedding or a layer is kept, or handed on; what comes of the head is its own kind."""

    def keep(module: nn.Module, inputs: object, output: object) -> None:
        tracker.keep()

    def mark(module: nn.Module, inputs: object, output: Tensor) -> None:
        tracker.mark(output, "logits and loss")

    for _, units in model.chunk_units:
        for unit in units:
            unit.register_forward_hook(mark if unit is model.head else keep)
