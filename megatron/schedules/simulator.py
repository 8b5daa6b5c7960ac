"""Simulation and verification of a schedule: when each action runs, how long stages idle, how many activations live at
once, and whether it can run at all, also where all streams of a GPU share one hardware queue."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from megatron.schedules.schedule import Action, Kind, Placement, Result, Schedule, ScheduleError


@dataclass(frozen=True)
class Durations:
    """Times of each pass by virtual stage, and of a message between two stages, in any unit."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    send: float = 0.0

    @staticmethod
    def uniform(placement: Placement, forward: float, backward: float, weight: float, send: float = 0.0) -> "Durations":
        """Durations from the times of a whole stage, divided evenly among its chunks."""
        count = placement.num_virtual_stages
        forwards, backwards, weights = ((time / placement.num_chunks,) * count for time in (forward, backward, weight))
        return Durations(forwards, backwards, weights, send)

    def of(self, kind: Kind, virtual_stage: int, splits_backward: bool) -> float:
        """Duration of an action; a backward pass that is not split takes B and W."""
        if kind == "F":
            return self.forward[virtual_stage]
        if kind == "W":
            return self.weight[virtual_stage]
        return self.backward[virtual_stage] + (0.0 if splits_backward else self.weight[virtual_stage])


@dataclass(frozen=True)
class Span:
    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All spans of a schedule, simulated or measured."""

    num_stages: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end, over all stages."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all stages' time: ``(makespan - M (F + B + W)) / makespan`` where stages are equal."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1.0 - busy / (self.num_stages * self.makespan)

    def stage_spans(self, stage: int) -> list[Span]:
        return sorted((span for span in self.spans if span.stage == stage), key=lambda span: span.start)

    @property
    def stage_idle_fractions(self) -> tuple[float, ...]:
        """The idle share of each stage between its own first start and last end."""
        idle = []
        for stage in range(self.num_stages):
            spans = self.stage_spans(stage)
            busy = sum(span.end - span.start for span in spans)
            idle.append(1.0 - busy / (spans[-1].end - spans[0].start))
        return tuple(idle)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Simulate ``schedule``: a stage runs its actions in order, each as soon as its requirements are met.

    A message arrives ``durations.send`` after the end of the action that sent it; sending and receiving take no time of
    a stage. Raises :class:`ScheduleError` for a deadlock.
    """
    ended: dict[Result, float] = {}
    free = [0.0] * schedule.placement.num_stages
    spans = []
    for stage, action in execution_order(schedule):
        result = schedule.result(stage, action)
        start = free[stage]
        for requirement in schedule.requirements(stage, action):
            is_local = schedule.placement.location(requirement.virtual_stage)[0] == stage
            start = max(start, ended[requirement] + (0.0 if is_local else durations.send))
        end = start + durations.of(action.kind, result.virtual_stage, schedule.splits_backward)
        free[stage] = ended[result] = end
        spans.append(Span(stage, action, start, end))
    return Timeline(schedule.placement.num_stages, tuple(spans))


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(stage, action) in an order in which all stages can run; raises :class:`ScheduleError` for a deadlock."""
    done: set[Result] = set()
    position = [0] * schedule.placement.num_stages
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, actions in enumerate(schedule.actions):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                if not done.issuperset(schedule.requirements(stage, action)):
                    break
                done.add(schedule.result(stage, action))
                position[stage] += 1
                is_moving = True
                yield stage, action
    waiting = [
        f"stage {stage} before {actions[reached]}"
        for stage, (actions, reached) in enumerate(zip(schedule.actions, position))
        if reached < len(actions)
    ]
    if waiting:
        raise ScheduleError(f"{schedule.name} deadlocks: {', '.join(waiting)}")


def peak_live_activations(schedule: Schedule) -> tuple[int, ...]:
    """The most (microbatch, chunk) pairs between their F and the end of their backward pass, by stage."""
    last: Kind = "W" if schedule.splits_backward else "B"
    changes = ([(action.kind == "F") - (action.kind == last) for action in actions] for actions in schedule.actions)
    return tuple(max(accumulate(change), default=0) for change in changes)


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
    # On every channel, messages are received in the order in which they are sent.
    sent: dict[tuple[Kind, int, int], list[Result]] = defaultdict(list)
    received: dict[tuple[Kind, int, int], list[Result]] = defaultdict(list)
    for stage in range(schedule.placement.num_stages):
        for step in schedule.steps(stage):
            for messages, message in ((sent, step.outgoing), (received, step.incoming)):
                if message is not None:
                    messages[message.channel].append(message.result)
    for key in sent.keys() | received.keys():
        if sent[key] != received[key]:
            kind, source, target = key
            raise ScheduleError(
                f"{schedule.name}: stage {target} does not receive the {kind} messages of stage {source} in the order "
                "in which they are sent"
            )
    if live_activations is not None:
        for stage, (live, bound) in enumerate(zip(peak_live_activations(schedule), live_activations, strict=True)):
            if live > bound:
                raise ScheduleError(f"{schedule.name}, stage {stage}: holds activations of {live} passes, not {bound}")


# When the kernels of several GPUs run, by the order in which their hosts launch them.
#
# With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams of a GPU share one hardware queue: a kernel whose stream or event is
# not ready blocks every kernel launched after it, also in other streams. So the order of launches decides whether
# communication overlaps with computation, and whether two ranks wait for each other.


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
