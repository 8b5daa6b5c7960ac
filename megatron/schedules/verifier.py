"""Verification of a schedule before any process runs it."""

from collections import Counter, defaultdict

from megatron.schedules.schedule import Action, Kind, Result, Schedule, ScheduleError
from megatron.schedules.simulator import execution_order, peak_live_activations


def verify(schedule: Schedule, live_activations: tuple[int, ...] | None = None) -> None:
    """Raise :class:`ScheduleError` unless ``schedule`` is complete, ordered, free of deadlock and within its memory.

    ``live_activations`` bounds :func:`~megatron.schedules.simulator.peak_live_activations` by stage.
    """
    wanted = Counter(
        Action(kind, microbatch, chunk)
        for kind in schedule.kinds
        for microbatch in range(schedule.num_microbatches)
        for chunk in range(schedule.placement.num_chunks)
    )
    for stage in range(schedule.placement.num_stages):
        found = Counter(schedule.actions[stage])
        if found != wanted:
            missing, extra = wanted - found, found - wanted
            raise ScheduleError(
                f"{schedule.name}, stage {stage}: missing {', '.join(map(str, missing)) or 'nothing'}; "
                f"too many {', '.join(map(str, extra)) or 'nothing'}"
            )
    for _ in execution_order(schedule):
        pass  # It raises for a deadlock.
    _verify_messages(schedule)
    if live_activations is not None:
        for stage, (live, bound) in enumerate(zip(peak_live_activations(schedule), live_activations, strict=True)):
            if live > bound:
                raise ScheduleError(f"{schedule.name}, stage {stage}: holds activations of {live} passes, not {bound}")


def _verify_messages(schedule: Schedule) -> None:
    """On every channel, messages are received in the order in which they are sent."""
    sent: dict[tuple[Kind, int, int], list[Result]] = defaultdict(list)
    received: dict[tuple[Kind, int, int], list[Result]] = defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            for messages, message in (
                (sent, schedule.outgoing(stage, action)),
                (received, schedule.incoming(stage, action)),
            ):
                if message is not None:
                    messages[message.channel].append(message.result)
    for key in sent.keys() | received.keys():
        if sent[key] != received[key]:
            kind, source, target = key
            raise ScheduleError(
                f"{schedule.name}: stage {target} does not receive the {kind} messages of stage {source} in the order "
                "in which they are sent"
            )
