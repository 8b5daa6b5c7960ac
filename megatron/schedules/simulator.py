"""What a schedule costs: when each action runs, how long stages idle, how many activations live at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.schedules.schedule import Action, Kind, Placement, Result, Schedule, ScheduleError


@dataclass(frozen=True)
class Durations:
    """Times in any one unit: of each pass through each virtual stage, and of a message between two stages."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    send: float = 0.0

    @staticmethod
    def uniform(placement: Placement, forward: float, backward: float, weight: float, send: float = 0.0) -> "Durations":
        """From the times of a whole stage, of which each of its chunks takes its share."""
        count = placement.num_virtual_stages
        forwards, backwards, weights = ((time / placement.num_chunks,) * count for time in (forward, backward, weight))
        return Durations(forwards, backwards, weights, send)

    def of(self, kind: Kind, virtual_stage: int, splits_backward: bool) -> float:
        """How long an action takes; a backward pass that is not split takes B and W."""
        if kind == "F":
            return self.forward[virtual_stage]
        if kind == "W":
            return self.weight[virtual_stage]
        return self.backward[virtual_stage] + (0.0 if splits_backward else self.weight[virtual_stage])


@dataclass(frozen=True)
class Span:
    """An action and when it ran."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When everything ran; simulated or measured."""

    num_stages: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all stages."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all stages' time: ``(makespan - M (F + B + W)) / makespan`` where stages are equal."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1.0 - busy / (self.num_stages * self.makespan)

    def stage_spans(self, stage: int) -> list[Span]:
        """What ``stage`` did, in order."""
        return sorted((span for span in self.spans if span.stage == stage), key=lambda span: span.start)

    @property
    def stage_idle_fractions(self) -> tuple[float, ...]:
        """The idle share of each stage between its own first start and last end.

        Stages start one after the other; where nothing makes them meet, that costs a run nothing.
        """
        idle = []
        for stage in range(self.num_stages):
            spans = self.stage_spans(stage)
            busy = sum(span.end - span.start for span in spans)
            idle.append(1.0 - busy / (spans[-1].end - spans[0].start))
        return tuple(idle)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Run ``schedule`` on paper: a stage runs its list in order, each action as soon as all that it needs is there.

    A message arrives ``durations.send`` after the end of the action that sent it, and keeps no stage busy.
    Raises :class:`ScheduleError` when stages wait for each other in a circle.
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
    """(stage, action) of all stages in an order in which they can run, each stage's own order kept.

    Raises :class:`ScheduleError` when there is none.
    """
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
    stuck = {
        stage: actions[reached]
        for stage, (actions, reached) in enumerate(zip(schedule.actions, position))
        if reached < len(actions)
    }
    if stuck:
        waiting = ", ".join(f"stage {stage} before {action}" for stage, action in stuck.items())
        raise ScheduleError(f"{schedule.name} deadlocks: {waiting}")


def peak_live_activations(schedule: Schedule) -> tuple[int, ...]:
    """By stage: most (microbatch, chunk) pairs between their F and the end of their backward pass.

    A chunk's activations are 1/V of those of its stage.
    """
    last: Kind = "W" if schedule.splits_backward else "B"
    return tuple(max(_live(actions, last), default=0) for actions in schedule.actions)


def _live(actions: Iterable[Action], last: Kind) -> Iterator[int]:
    live = 0
    for action in actions:
        live += (action.kind == "F") - (action.kind == last)
        yield live
