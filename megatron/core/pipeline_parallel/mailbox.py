"""How results reach the actions that need them: from the stage itself, or as messages that overlap with the work."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.communication import Communicator, Pending
from megatron.schedules.schedule import Kind, Placement, Result, Step

Channels = Callable[[Kind, int, int], Communicator]
"""(kind, source stage, target stage) to the communicator that carries such messages."""


class Mailbox:
    """What one stage gives and takes during one pass over a schedule.

    Nobody waits for a message to be sent; its tensor is let go of once it is. Every message is received in a fresh
    tensor from ``empty``.
    """

    def __init__(self, channels: Channels, empty: Callable[[], Tensor]) -> None:
        self._channels, self._empty = channels, empty
        self._local: dict[Result, Tensor] = {}
        self._sending: list[Pending[Tensor]] = []
        self._receiving: dict[Result, Pending[Tensor]] = {}

    def expect(self, step: Step) -> None:
        """Start to receive what ``step`` takes, if that is a message; in the order of the steps."""
        if step.incoming is not None and step.incoming.result not in self._receiving:
            communicator = self._channels(*step.incoming.channel)
            self._receiving[step.incoming.result] = communicator.start_receive(self._empty(), step.incoming.source)

    def let_go(self) -> None:
        """Free what has been sent meanwhile."""
        self._sending = [pending for pending in self._sending if not pending.is_complete]

    def take(self, step: Step) -> Tensor | None:
        """The input of ``step``, received or from this stage itself; None where it takes none."""
        if step.incoming is not None:
            return self._receiving.pop(step.incoming.result).wait()
        return None if step.source is None else self._local.pop(step.source)

    def give(self, step: Step, tensor: Tensor) -> None:
        """Hand on what ``step`` yielded, to another stage or to this one; it must not change any more."""
        if step.outgoing is None:
            self._local[step.result] = tensor
        else:
            communicator = self._channels(*step.outgoing.channel)
            self._sending.append(communicator.start_send(tensor.contiguous(), step.outgoing.target))

    def close(self) -> None:
        """Wait until everything is sent."""
        assert not self._local and not self._receiving
        for pending in self._sending:
            pending.wait()
        self._sending.clear()


def open_channels(placement: Placement, stage: int, channels: Channels, device: torch.device) -> None:
    """Connect the stages; all of them call it.

    The first message between two ranks makes their connection, for which NCCL holds up both until both are there.
    Hence one message on every channel, hop by hop in one order on all ranks, before messages that overlap.
    """
    for virtual_stage in range(placement.num_virtual_stages - 1):
        here, _ = placement.location(virtual_stage)
        there, _ = placement.location(virtual_stage + 1)
        if here != there:
            _greet(channels("F", here, there), stage, here, there, device)
            _greet(channels("B", there, here), stage, there, here, device)


def _greet(communicator: Communicator, stage: int, source: int, target: int, device: torch.device) -> None:
    # Opened on all stages, also those whom this hop does not concern: torch counts process groups.
    communicator.open()
    greeting = torch.zeros(1, device=device)
    if stage == source:
        communicator.start_send(greeting, target).wait()
    elif stage == target:
        communicator.start_receive(greeting, source).wait()
