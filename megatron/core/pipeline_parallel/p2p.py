"""Point-to-point communication of a stage: activations and their gradients, overlapping with computation."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.communication import Communicator, Work
from megatron.schedules.schedule import Kind, Placement, Result, Step

Channels = Callable[[Kind, int, int], Communicator]
"""(kind, source stage, target stage) to the communicator that carries such messages."""


class P2PCommunicator:
    """Sends and receives of one stage during one pass over a schedule; a result for the stage itself is kept.

    Sends are asynchronous, and each keeps its tensor until it is complete. Every message is received in a new tensor
    from ``empty``.
    """

    def __init__(self, channels: Channels, empty: Callable[[], Tensor]) -> None:
        self._channels, self._empty = channels, empty
        self._local: dict[Result, Tensor] = {}
        self._sends: list[Work[Tensor]] = []
        self._receives: dict[Result, Work[Tensor]] = {}

    def start_receive(self, step: Step) -> None:
        """Start to receive the input of ``step``, if it is a message; call it in the order of the steps."""
        if step.incoming is not None and step.incoming.result not in self._receives:
            communicator = self._channels(*step.incoming.channel)
            self._receives[step.incoming.result] = communicator.start_receive(self._empty(), step.incoming.source)

    def free_sent(self) -> None:
        """Free the tensors whose send is complete; raises the error of a send that failed."""
        complete = [work for work in self._sends if work.is_complete]
        self._sends = [work for work in self._sends if work not in complete]
        for work in complete:
            work.wait()

    def receive(self, step: Step) -> Tensor | None:
        """The input of ``step``, received or from this stage itself; None without input."""
        if step.incoming is not None:
            return self._receives.pop(step.incoming.result).wait()
        return None if step.source is None else self._local.pop(step.source)

    def send(self, step: Step, tensor: Tensor) -> None:
        """Send the result of ``step`` to another stage or keep it for this one; it must not be modified afterwards."""
        if step.outgoing is None:
            self._local[step.result] = tensor
        else:
            communicator = self._channels(*step.outgoing.channel)
            self._sends.append(communicator.start_send(tensor.contiguous(), step.outgoing.target))

    def close(self) -> None:
        """Wait until everything is sent."""
        assert not self._local and not self._receives
        for work in self._sends:
            work.wait()
        self._sends.clear()


def open_channels(placement: Placement, stage: int, channels: Channels, device: torch.device) -> None:
    """Connect the stages; all of them call it.

    The first message between two ranks makes their connection, for which NCCL blocks both until both are there. So
    every channel carries one message, in one order on all ranks, before messages that overlap.
    """
    for virtual_stage in range(placement.num_virtual_stages - 1):
        here, _ = placement.location(virtual_stage)
        there, _ = placement.location(virtual_stage + 1)
        if here != there:
            _warm_up(channels("F", here, there), stage, here, there, device)
            _warm_up(channels("B", there, here), stage, there, here, device)


def _warm_up(communicator: Communicator, stage: int, source: int, target: int, device: torch.device) -> None:
    # Opened on all stages, also on those without this channel: torch counts process groups.
    communicator.open()
    message = torch.zeros(1, device=device)
    if stage == source:
        communicator.start_send(message, target).wait()
    elif stage == target:
        communicator.start_receive(message, source).wait()
