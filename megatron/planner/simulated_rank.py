"""One training step of one rank under a memory tracker, with the functions of real training.

With a :class:`SimulatedTopology`, fake tensors and simulated kernels nothing is allocated, computed or sent. With a
real topology and real tensors the same code measures a real step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.communication import Communicator, Observer, Work
from megatron.core.data_parallel.buffered import shards_weights
from megatron.core.device import Machine
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.kernels.selection import Kernels, build_kernels
from megatron.core.models.parallelize import parallelize
from megatron.core.pipeline_parallel import ActionRecorder
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.collectives import P2POverlap, RowGemm
from megatron.core.topology import RankGrid, Topology
from megatron.core.transport.torch_distributed import Message, Reduction, Transport
from megatron.metrics.timers import Timers
from megatron.planner.memory import MemoryTracker
from megatron.schedules.schedule import Action
from megatron.torch_compat import WRITING_PRODUCTS, disable_dispatch_modes, local_scalar
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.context import TrainModule
from megatron.training.loop.step import train_step

aten = torch.ops.aten
_CPU = torch.device("cpu")

_PASSES = {"F": "forward", "B": "backward", "W": "weight gradients"}


class ShapeTracker(MemoryTracker):
    """A tracker that also returns values where the code reads a fake tensor, which has none.

    Losses and norms are 1, conditions are true, and no document starts inside a sample.
    """

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is local_scalar:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            return torch.empty((0, args[0].dim()), dtype=torch.int64)
        if func in WRITING_PRODUCTS:
            return kwargs["out"]
        return super().run(func, args, kwargs)


class CompletedWork:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class FakeTransport(Transport):
    """A network on which every operation completes immediately and leaves its buffers as they are.

    ``on_buffer`` is called with the output buffers of collectives. ``as_gloo`` replaces collectives by messages, as on
    CPUs. ``start_work`` makes the work of an operation.
    """

    hides_completion = False

    def __init__(
        self,
        on_buffer: Callable[[Tensor], None],
        as_gloo: bool,
        start_work: Callable[[], CompletedWork] = CompletedWork,
    ) -> None:
        self._on_buffer, self._start_work = on_buffer, start_work
        self.prefers_messages = as_gloo

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Any:
        return self._start_work()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
        self._on_buffer(output)
        return self._start_work()

    reduce_scatter = all_to_all = all_gather

    def exchange_rows(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> Any:
        return self.all_gather(output, tensor)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def exchange(self, messages: Sequence[Message]) -> Sequence[Any]:
        for kind, tensor, _ in messages:
            if kind == "receive":
                self._on_buffer(tensor)
        return (self._start_work(),)

    def send(self, tensor: Tensor, target: int) -> Any:
        return self._start_work()

    def receive(self, tensor: Tensor, source: int) -> Any:
        return self._start_work()


class FakeCommunicator(Communicator):
    def __init__(self, ranks: Sequence[int], rank: int, name: str, transport: Transport) -> None:
        super().__init__(ranks, rank, name)
        self.transport = transport

    def device_mesh(self, device_type: str, name: str) -> Any:
        # With real tensors: the mesh computes this rank's coordinates from their values.
        with disable_dispatch_modes():
            return super().device_mesh(device_type, name)


class SimulatedSymmetricMemory(P2POverlap):
    """The overlap by PyTorch's symmetric memory, which GPUs of a node have from Hopper on: products of all rows, which
    hide the copies between the ranks. Quantised rows are exchanged and multiplied part by part, as in a run."""

    def gather_gemm(
        self, rows: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor]:
        if matrix is None:
            return super().gather_gemm(rows, gemm, matrix)
        # [rows / tp, k] of every rank arrive as [rows, k], then one product of all of them.
        whole = rows.with_rows([self._received(tensor, self._ranks.size) for tensor in rows.row_tensors])
        self._ranks.record("exchange", (self._ranks.size - 1) * rows.data.nbytes)
        return gemm(whole), whole

    def gemm_reduce(self, inputs: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None) -> Work[Tensor]:
        if matrix is None:
            return super().gemm_reduce(inputs, gemm, matrix)
        # [rows, n] of this rank's columns; its part of the sum is [rows / tp, n], and it sends the other parts.
        partial, size = gemm(inputs), self._ranks.size
        self._ranks.record("exchange", partial.nbytes * (size - 1) // size)
        output = self._received(partial.chunk(size)[0], 1)
        return Work((), lambda: output)

    def _received(self, part: Tensor, size: int) -> Tensor:
        """A communication buffer for the rows of ``size`` ranks."""
        buffer = part.new_empty((size * part.shape[0], *part.shape[1:]))
        self._ranks.transport.all_gather(buffer, part)
        return buffer


class SimulatedTopology(Topology):
    """The topology of a rank without the other ranks; ``observer`` makes the observer of each group's collectives.

    ``device`` is the device of the real run; fake tensors are on ``tensors_device``.
    """

    has_memory = False

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        device: torch.device,
        tracker: MemoryTracker,
        observer: Callable[[Communicator], Observer],
        tensors_device: torch.device = _CPU,
        start_work: Callable[[], CompletedWork] = CompletedWork,
    ) -> None:
        super().__init__(grid, rank, tensors_device)
        self.simulated_overlap = None if device.type == "cpu" else SimulatedSymmetricMemory
        self._observer, self._tracker = observer, tracker
        self._transport = FakeTransport(
            lambda tensor: tracker.mark(tensor, "communication buffers", if_temporary=True),
            device.type == "cpu",
            start_work,
        )

    def on_host(self) -> AbstractContextManager[None]:
        return self._tracker.untracked()

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        communicator = FakeCommunicator(ranks, self.rank, name, self._transport)
        communicator.observer = self._observer(communicator)
        return communicator


def with_local_layers(config: RunConfig) -> RunConfig:
    """``config`` without Transformer Engine, whose layers cannot be built without a GPU.

    Local layers save similar tensors, but lack mxfp8, and blockwise in hybrid or in sizes that are no multiples of 128:
    both recipes are planned as tensorwise.
    """
    if config.model.transformer_impl == "local":
        return config
    precision = config.precision
    if precision.fp8_recipe in ("blockwise", "mxfp8"):
        precision = replace(precision, fp8_recipe="tensorwise")
    return replace(config, model=replace(config.model, transformer_impl="local"), precision=precision)


def simulated_kernels(
    config: RunConfig, topology: Topology, device: torch.device, vocab_size: int, tracker: MemoryTracker
) -> Kernels:
    """On CPUs the kernels of the run. On GPUs (``device``) what stands for them, since the packages and compilers there
    are unknown: ``tracker`` counts each compiled function as one kernel."""
    if device.type == "cpu":
        return build_kernels(config, topology, vocab_size)
    # Candidates of kernels are chosen as on such a machine, and what they compile runs as one kernel.
    machine = Machine(device, simulated_compiler=partial(partial, tracker.fused))
    return build_kernels(config, topology, vocab_size, machine)


# --- the step ------------------------------------------------------------------------------------------------


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
    for shard in parallel.data_parallel.param_shards:
        tracker.mark(shard.gradient, "gradients")
    with tracker.allocating("moments"):
        module = TrainModule.of(config, topology, parallel, kernels)
    for state in module.optimizer.state():
        if not state.is_on_host:
            tracker.mark(state.tensor, "master weights" if state.kind == "master" else "moments")
    if shards_weights(config.parallel, topology, bool(config.model.num_experts)):
        # Only the simulated set-up allocates whole weights.
        tracker.peak = tracker.now

    def mark_activations() -> None:
        """Mark the memory that outlives a pass, which is saved for a backward pass unless it is an FP8 weight."""
        for weight in module.fp8.kept_weights() if module.fp8 is not None else ():
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
    return module


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


def simulated_future(config: RunConfig, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The future tokens of a microbatch of ``shape``, for multi-token prediction."""
    depths = config.model.mtp_num_layers
    if not depths:
        return {}
    labels = torch.zeros(shape[0], depths, shape[1], dtype=torch.int64)
    return {"future_labels": labels, "future_mask": torch.ones(labels.shape)}


def _microbatches(config: RunConfig, topology: Topology, document_starts: Tensor | None) -> Iterator[dict[str, Tensor]]:
    """Microbatches without end, of equal tokens."""
    shape = config.micro_batch_size, config.seq_length // topology.grid.cp
    while True:
        microbatch = {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.ones(shape, dtype=torch.float32),
        } | simulated_future(config, shape)
        if config.data.marks_documents:
            if document_starts is None:
                document_starts = torch.zeros(config.micro_batch_size, config.seq_length, dtype=torch.bool)
            microbatch["document_starts"] = document_starts
        yield microbatch
