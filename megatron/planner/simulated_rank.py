"""One training step of one rank under a memory tracker, with the functions of real training.

With a :class:`~megatron.planner.simulated_rank.SimulatedTopology` and fake tensors nothing is allocated, computed or
sent. With a real topology and real tensors the same code measures a real step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.data_parallel.buffered import shards_weights
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.models.parallelize import parallelize
from megatron.core.optimizer import Optimizer
from megatron.core.pipeline_parallel import ActionRecorder
from megatron.core.precision import build_loss_scaler
from megatron.core.topology import Topology
from megatron.metrics.timers import Timers
from megatron.planner.memory import MemoryTracker
from megatron.planner.simulated_rank import simulated_kernels
from megatron.schedules.schedule import Action
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.context import TrainModule
from megatron.training.loop.step import train_step

_PASSES = {"F": "forward", "B": "backward", "W": "weight gradients"}


class _PassRecorder(ActionRecorder):
    """Sets the tracker's pass, and calls ``mark_activations`` after a forward or backward pass."""

    def __init__(self, tracker: MemoryTracker, mark_activations: Callable[[], None]) -> None:
        self._tracker, self._mark_activations = tracker, mark_activations

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        pass_name = _PASSES[action.kind]
        self._tracker.during = f"{pass_name} pass, microbatch {action.microbatch}, chunk {action.chunk}"
        yield
        if action.kind != "W":
            self._mark_activations()
        self._tracker.during = "between passes"


def build_rank(
    config: RunConfig,
    topology: Topology,
    vocabulary: Vocabulary,
    tracker: MemoryTracker,
    device: torch.device | None = None,
) -> TrainModule:
    """Build model, pipeline, data parallelism and optimizer as a run does; weights are not initialised.

    ``device`` is the device of the real run, by default the topology's.
    """
    tracker.during = "set-up"
    kernels = simulated_kernels(config, topology, device or topology.device, vocabulary.size, tracker)
    # What is allocated inside has this kind; gradients and main weights are marked afterwards.
    with tracker.allocating("weights"):
        parallel = parallelize(config, topology, vocabulary.size, kernels)
    data_parallel = parallel.data_parallel
    for shard in data_parallel.param_shards:
        tracker.mark(shard.gradient, "gradients")
    with tracker.allocating("moments"):
        optimizer = Optimizer(config.optimizer, data_parallel, topology, kernels.optimizer)
    for state in optimizer.state():
        tracker.mark(state.tensor, "master weights" if state.kind == "master" else "moments")
    if shards_weights(config.parallel, topology, bool(config.model.num_experts)):
        # Only the simulated set-up allocates whole weights.
        tracker.peak = tracker.now
    fp8 = parallel.model.context.fp8

    def mark_activations() -> None:
        """Mark the memory that outlives a pass, which is saved for a backward pass unless it is an FP8 weight."""
        for weight in fp8.kept_weights() if fp8 is not None else ():
            tracker.mark(weight, "weights")
        tracker.mark_activations()

    # Mark what outlives the forward pass of an embedding or a layer, and the output layer's output.
    for _, units in parallel.model.chunk_units:
        for unit in units:
            if unit is parallel.model.output_layer:
                unit.register_forward_hook(lambda module, inputs, output: tracker.mark(output, "logits and loss"))
            else:
                unit.register_forward_hook(lambda module, inputs, output: mark_activations())
    parallel.executor.recorder = _PassRecorder(tracker, mark_activations)
    scaler = build_loss_scaler(config.precision)
    balance = parallel.model.expert_balance
    return TrainModule(parallel.executor, data_parallel, optimizer, scaler, topology, fp8, balance)


def run_step(
    config: RunConfig,
    topology: Topology,
    module: TrainModule,
    num_microbatches: int,
    tracker: MemoryTracker,
    document_starts: Tensor | None = None,
) -> None:
    """One training step. Every microbatch has ``document_starts`` ``[b, s]``, by default one document per sample."""
    tracker.during = "start of the step"
    train_step(
        module,
        _microbatches(config, topology, document_starts),
        Hyperparameters(learning_rate=0.0),
        num_microbatches=num_microbatches,
        expected_tokens=num_microbatches * config.micro_batch_size * config.seq_length,
        timers=Timers(0),
        stop_flags=lambda: [False] * 5,
    )
    tracker.during = "after the step"


def _microbatches(config: RunConfig, topology: Topology, document_starts: Tensor | None) -> Iterator[dict[str, Tensor]]:
    """Microbatches without end, of equal tokens."""
    shape = config.micro_batch_size, config.seq_length // topology.grid.cp
    while True:
        microbatch = {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.ones(shape, dtype=torch.float32),
        }
        if config.data.marks_documents:
            if document_starts is None:
                document_starts = torch.zeros(config.micro_batch_size, config.seq_length, dtype=torch.bool)
            microbatch["document_starts"] = document_starts
        yield microbatch
