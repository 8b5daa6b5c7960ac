"""The messages of one stage, derived from the schedule."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedule import Action, Message, Result, Schedule


@dataclass(frozen=True)
class MessagePlan:
    """What a stage takes from others and gives to others during one pass over a schedule."""

    incoming: Mapping[Action, Message]
    """By the action that needs it, in the order of the actions."""
    outgoing: Mapping[Action, Message]
    """By the action that yields it."""
    acknowledged: Mapping[Result, tuple[Result, ...]]
    """By a message taken: those given earlier that its sender had taken when it sent this one. They have arrived, and
    nothing of them need be kept."""


def plan_messages(schedule: Schedule, stage: int) -> MessagePlan:
    """The messages of ``stage``."""
    actions = schedule.actions[stage]
    incoming = {action: message for action in actions if (message := schedule.incoming(stage, action)) is not None}
    outgoing = {action: message for action in actions if (message := schedule.outgoing(stage, action)) is not None}
    acknowledged: dict[Result, tuple[Result, ...]] = defaultdict(tuple)
    for other in {message.target for message in outgoing.values()}:
        acknowledged |= _acknowledged_by(schedule, stage, other)
    return MessagePlan(incoming, outgoing, acknowledged)


def _acknowledged_by(schedule: Schedule, stage: int, other: int) -> dict[Result, tuple[Result, ...]]:
    """The messages of ``other`` to ``stage``, and which messages of ``stage`` each acknowledges."""
    acknowledged = {}
    taken: tuple[Result, ...] = ()
    for action in schedule.actions[other]:
        message, reply = schedule.incoming(other, action), schedule.outgoing(other, action)
        if message is not None and message.source == stage:
            taken += (message.result,)
        if reply is not None and reply.target == stage:
            acknowledged[reply.result], taken = taken, ()
    return acknowledged
