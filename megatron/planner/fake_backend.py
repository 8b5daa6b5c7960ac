"""A fake network and fake values for fake tensors: the code of a rank runs, but nothing is computed or sent."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication import Communicator, Observer, Work
from megatron.core.precision import QuantizedTensor
from megatron.core.tensor_parallel.collectives import P2POverlap, RowGemm
from megatron.core.topology import RankGrid, Topology
from megatron.core.transport import Message, Reduction, Transport
from megatron.planner.memory import MemoryTracker
from megatron.torch_compat import disable_dispatch_modes, local_scalar

aten = torch.ops.aten
_CPU = torch.device("cpu")


class ShapeTracker(MemoryTracker):
    """Also returns values where the code reads a fake tensor, which has none.

    Losses and norms are 1, conditions are true, and no document starts inside a sample.
    """

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is local_scalar:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            return torch.empty((0, args[0].dim()), dtype=torch.int64)
        if func is aten.addmm.dtype_out:
            # torch 2.11 decomposes it as if the dtype were beta.
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
        whole = rows.with_rows([self._received(tensor, self._ranks.size) for tensor in rows.row_tensors])
        self._ranks.record("exchange", (self._ranks.size - 1) * rows.data.nbytes)
        return gemm(whole), whole

    def gemm_reduce(self, inputs: QuantizedTensor, gemm: RowGemm, matrix: Tensor | None) -> Work[Tensor]:
        if matrix is None:
            return super().gemm_reduce(inputs, gemm, matrix)
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
        self._observer = observer
        self._transport = FakeTransport(
            lambda tensor: tracker.mark_if_temporary(tensor, "communication buffers"), device.type == "cpu", start_work
        )

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        communicator = FakeCommunicator(ranks, self.rank, name, self._transport)
        communicator.observer = self._observer(communicator)
        return communicator
