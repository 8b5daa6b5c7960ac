"""A rank without the others, and tensors without numbers: everything runs, nothing is computed or sent."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication import Communicator, Message, Observer, Reduction, Transport
from megatron.core.topology import RankGrid, Topology
from megatron.planner.memory import MemoryTracker
from megatron.torch_compat import disable_dispatch_modes, local_scalar

aten = torch.ops.aten


class ShapeTracker(MemoryTracker):
    """Also answers, for tensors without numbers, what the code asks of a number.

    Losses and norms are 1, conditions hold, and of all tokens none begins a document but the first of a sample.
    """

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func``, or what is plausible."""
        if func is local_scalar:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            return torch.empty((0, args[0].dim()), dtype=torch.int64)
        return super().run(func, args, kwargs)


class _Done:
    """A piece of work that is complete."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class FakeTransport(Transport):
    """A network on which everything has arrived at once: results keep whatever their memory holds.

    ``on_buffer`` hears of the tensors that a collective fills. ``as_gloo`` makes collectives of messages, as on CPUs.
    """

    hides_completion = False

    def __init__(self, on_buffer: Callable[[Tensor], None], as_gloo: bool) -> None:
        self._on_buffer = on_buffer
        self.prefers_messages = as_gloo

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Any:
        """Nothing."""
        return _Done()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
        """Nothing."""
        self._on_buffer(output)
        return _Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Any:
        """Nothing."""
        self._on_buffer(output)
        return _Done()

    def all_to_all(self, output: Tensor, tensor: Tensor) -> Any:
        """Nothing."""
        self._on_buffer(output)
        return _Done()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Nothing."""

    def exchange(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Nothing."""
        for kind, tensor, _ in messages:
            if kind == "receive":
                self._on_buffer(tensor)
        return (_Done(),)

    def send(self, tensor: Tensor, target: int) -> Any:
        """Nothing."""
        return _Done()

    def receive(self, tensor: Tensor, source: int) -> Any:
        """Nothing."""
        return _Done()

    def all_gather_object(self, values: list[Any], value: Any) -> None:
        """The others would say the same."""
        values[:] = [value] * len(values)

    def broadcast_object(self, values: list[Any], source: int) -> None:
        """The others would say the same."""


class FakeCommunicator(Communicator):
    """A group whose other ranks do not exist."""

    def __init__(self, ranks: Sequence[int], rank: int, name: str, transport: Transport) -> None:
        super().__init__(ranks, rank, name)
        self.transport = transport

    def device_mesh(self, device_type: str, name: str) -> Any:
        """With real numbers in it, for it computes this rank's place from them."""
        with disable_dispatch_modes():
            return super().device_mesh(device_type, name)


class SimulatedTopology(Topology):
    """The place of a rank that is alone; collectives are told to the observer that ``observer`` makes for a group.

    ``device`` is that of the real run; tensors pretend to be on the CPU.
    """

    has_memory = False

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        device: torch.device,
        tracker: MemoryTracker,
        observer: Callable[[Communicator], Observer],
    ) -> None:
        super().__init__(grid, rank, torch.device("cpu"))
        self._observer = observer
        self._transport = FakeTransport(
            lambda tensor: tracker.mark_if_passing(tensor, "communication buffers"), device.type == "cpu"
        )

    def _connect(
        self, ranks: Sequence[int], name: str, twin: Communicator | None = None, exclusive: bool = False
    ) -> Communicator:
        communicator = FakeCommunicator(ranks, self.rank, name, self._transport)
        communicator.observer = self._observer(communicator)
        return communicator
