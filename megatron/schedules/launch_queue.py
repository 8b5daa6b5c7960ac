"""When the kernels of several GPUs run, by the order in which their hosts launch them.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` all streams of a GPU share one hardware queue: a kernel whose stream or event is
not ready blocks every kernel launched after it, also in other streams. So the order of launches decides
whether communication overlaps with computation, and whether two ranks wait for each other.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.schedules.schedule import Kind, Schedule, ScheduleError


@dataclass(frozen=True)
class Launch:
    """A kernel, as a host launches it."""

    name: Hashable
    """Distinct among the launches of a rank."""
    stream: Hashable
    """Kernels of one stream run one after another."""
    duration: float
    after: tuple[Hashable, ...] = ()
    """Names of earlier launches of the rank whose events the stream waits for."""
    exchange: Hashable | None = None
    """Communication: launches of several ranks with equal values run together, once all of them are dispatched."""


@dataclass
class _Rank:
    """The launches of one GPU."""

    queues: dict[Hashable, list[Launch]]
    """Launches that are not dispatched yet, the first one last."""
    dispatched: dict[Hashable, float] = field(default_factory=dict)
    """Time of the latest dispatch, by queue."""
    latest: dict[Hashable, Hashable] = field(default_factory=dict)
    """Name of the latest launch, by stream."""
    ended: dict[Hashable, float] = field(default_factory=dict)
    """End of each launch, by name."""


def run_launches(programs: Sequence[Sequence[Launch]], one_queue: bool) -> list[Mapping[Hashable, float]]:
    """The end of every launch, by rank and name; the launches of a rank are in the order of its host.

    A queue dispatches its first launch when the kernel before it in the stream and the launches whose events it awaits
    have ended. Raises :class:`ScheduleError` if ranks wait for each other.
    """
    exchanges = (launch.exchange for program in programs for launch in program)
    members: Mapping[Hashable, int] = Counter(one for one in exchanges if one is not None)
    ranks = []
    for program in programs:
        queues: dict[Hashable, list[Launch]] = {}
        for launch in reversed(program):
            queues.setdefault(None if one_queue else launch.stream, []).append(launch)
        ranks.append(_Rank(queues))
    arrived: dict[Hashable, list[tuple[_Rank, Launch, float]]] = {}
    # Every rank as far as it goes, until none goes any further.
    while sum(_dispatch(rank, members, arrived) for rank in ranks):
        pass
    waiting = [
        f"rank {number} before {queue[-1].name}"
        for number, rank in enumerate(ranks)
        for queue in rank.queues.values()
        if queue
    ]
    waiting += [f"{exchange} for a rank" for exchange, there in arrived.items() if len(there) < members[exchange]]
    if waiting:
        raise ScheduleError(f"the launches deadlock: {', '.join(waiting)}")
    return [rank.ended for rank in ranks]


def _dispatch(
    rank: _Rank, members: Mapping[Hashable, int], arrived: dict[Hashable, list[tuple[_Rank, Launch, float]]]
) -> bool:
    """Dispatch what is ready on ``rank``; whether anything was."""
    is_moving = False
    for name, queue in rank.queues.items():
        while queue:
            launch = queue[-1]
            before = (*launch.after, *((rank.latest[launch.stream],) if launch.stream in rank.latest else ()))
            if any(other not in rank.ended for other in before):
                break
            queue.pop()
            is_moving = True
            time = max((rank.dispatched.get(name, 0.0), *(rank.ended[other] for other in before)))
            rank.dispatched[name], rank.latest[launch.stream] = time, launch.name
            if launch.exchange is None:
                rank.ended[launch.name] = time + launch.duration
                continue
            there = arrived.setdefault(launch.exchange, [])
            there.append((rank, launch, time))
            if len(there) == members[launch.exchange]:
                start = max(time for _, _, time in there)
                for other, theirs, _ in there:
                    other.ended[theirs.name] = start + theirs.duration
    return is_moving


def pipeline_launches(
    schedule: Schedule, stage: int, durations: Mapping[Kind, float], send: float, overlap: bool
) -> Iterator[Launch]:
    """The launches of ``stage``, in the order of the executor (:mod:`megatron.core.pipeline_parallel`).

    With ``overlap`` the input of the next action is received while an action runs. A receive waits for no computation;
    a send waits for the action that it follows. Every channel between two stages has a stream.
    """
    steps = schedule.steps(stage)
    received = set()
    for step, following in zip(steps, (*steps[1:], None)):
        for one in (step, following if overlap else None):
            if one is not None and one.incoming is not None and one.incoming not in received:
                received.add(one.incoming)
                yield Launch(("receive", one.incoming), one.incoming.channel, send, (), one.incoming)
        after = () if step.incoming is None else (("receive", step.incoming),)
        yield Launch(step.action, "compute", durations[step.action.kind], after)
        if step.outgoing is not None:
            yield Launch(("send", step.outgoing), step.outgoing.channel, send, (step.action,), step.outgoing)


def needs_receives_ahead(schedule: Schedule) -> bool:
    """Whether ``schedule`` deadlocks in one hardware queue unless inputs are received ahead.

    Interleaved groups with more microbatches than stages do: a stage sends twice before the next one receives.
    """
    stages = range(schedule.placement.num_stages)
    durations: Mapping[Kind, float] = {"F": 1.0, "B": 1.0, "W": 1.0}
    programs = [list(pipeline_launches(schedule, stage, durations, 0.0, overlap=False)) for stage in stages]
    try:
        run_launches(programs, one_queue=True)
    except ScheduleError:
        return True
    return False
