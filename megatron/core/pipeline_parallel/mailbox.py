"""How results reach the actions that need them: from the stage itself, or as messages that overlap with the work."""

from collections import defaultdict, deque
from collections.abc import Callable

from torch import Tensor

from megatron.core.communication import Communicator, Pending
from megatron.core.pipeline_parallel.messages import MessagePlan
from megatron.core.pipeline_parallel.schedule import Action, Kind, Message, Result, Schedule

Channels = Callable[[Kind, int, int], Communicator]
"""(kind, source stage, target stage) to the communicator that carries such messages."""


class Mailbox:
    """What one stage gives and takes during one pass over a schedule.

    On every channel the next message is received while the stage works (``overlap``), and nobody waits for a message
    to be sent: it is let go of when a later message proves that it has arrived. Every message is received in a fresh
    tensor from ``empty``.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        plan: MessagePlan,
        channels: Channels,
        empty: Callable[[], Tensor],
        overlap: bool,
    ) -> None:
        self._schedule, self._stage, self._plan = schedule, stage, plan
        self._channels, self._empty, self._overlap = channels, empty, overlap
        self._local: dict[Result, Tensor] = {}
        self._sending: dict[Result, Pending] = {}
        self._receiving: dict[Result, Pending] = {}
        self._expected: dict[tuple[Kind, int, int], deque[Message]] = defaultdict(deque)
        for message in plan.incoming.values():
            self._expected[message.channel].append(message)
        if overlap:
            for channel in self._expected:
                self._receive_next(channel)

    def _receive_next(self, channel: tuple[Kind, int, int]) -> None:
        if self._expected[channel]:
            message = self._expected[channel].popleft()
            communicator = self._channels(*channel)
            self._receiving[message.result] = communicator.start_receive(self._empty(), message.source)

    def take(self, action: Action) -> Tensor | None:
        """The input of ``action``, received or from this stage itself; None where it needs none."""
        message = self._plan.incoming.get(action)
        if message is None:
            # At most one of the requirements is a tensor that this stage handed on to itself.
            requirements = self._schedule.requirements(self._stage, action)
            return next((self._local.pop(result) for result in requirements if result in self._local), None)
        if not self._overlap:
            self._receive_next(message.channel)
        received = self._receiving.pop(message.result).wait()
        for result in self._plan.acknowledged.get(message.result, ()):
            self._sending.pop(result).wait()
        if self._overlap:
            self._receive_next(message.channel)
        return received

    def give(self, action: Action, tensor: Tensor) -> None:
        """Hand on what ``action`` yielded, to another stage or to this one; it must not change any more."""
        message = self._plan.outgoing.get(action)
        if message is None:
            self._local[self._schedule.result(self._stage, action)] = tensor
        else:
            communicator = self._channels(*message.channel)
            self._sending[message.result] = communicator.start_send(tensor.contiguous(), message.target)

    def close(self) -> None:
        """Wait until everything is sent."""
        assert not self._local and not self._receiving and not any(self._expected.values())
        for pending in self._sending.values():
            pending.wait()
        self._sending.clear()
