"""Plays a schedule with tokens, tick after tick; knows nothing of the code under test but its lists of actions.

A pass may start when the tokens that it takes lie before it. Tokens between two stages travel in queues, one for
each kind and pair of stages, and only the head of a queue can be taken.
"""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from megatron.schedules.schedule import Action, Schedule
from megatron.schedules.simulator import Durations

Place = tuple[int, int]
"""(stage, chunk)"""
Token = tuple[str, int, Place]
"""What it lets happen (F, B or W), the microbatch, and where."""


def places_in_layer_order(stages: int, chunks: int, shape: str) -> list[Place]:
    """The chunks from the embedding to the loss."""
    if shape == "v":
        return [(stage, 0) for stage in range(stages)] + [(stage, 1) for stage in reversed(range(stages))]
    return [(stage, chunk) for chunk in range(chunks) for stage in range(stages)]


@dataclass
class TokenGame:
    """One play: :meth:`play` moves every stage on as far as it goes."""

    schedule: Schedule
    durations: Durations | None = None
    """Times of passes and messages; without, a pass takes a tick, and a message none."""
    tick: float = 1.0
    cores: float = math.inf
    """Cores that the working stages share, each of them at most one."""
    queues: dict[tuple[str, int, int], deque[tuple[Token, float]]] = field(default_factory=lambda: defaultdict(deque))
    """Tokens on their way between stages, with their arrival."""
    own: set[Token] = field(default_factory=set)
    """Tokens that a stage has laid down for itself."""
    peaks: list[int] = field(default_factory=list)
    spans: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    """Start and end by stage and name of the action."""
    left: list[list[Action]] = field(default_factory=list)
    """What each stage could not do; empty lists when the schedule runs to its end."""

    def play(self) -> "TokenGame":
        """Play to the end, or until no stage can move."""
        placement = self.schedule.placement
        self.places = places_in_layer_order(placement.num_stages, placement.num_chunks, placement.shape)
        self.number = {place: number for number, place in enumerate(self.places)}
        waiting = [deque(actions) for actions in self.schedule.actions]
        held, self.peaks = [0] * len(waiting), [0] * len(waiting)
        working: dict[int, tuple[Action, float, float]] = {}  # action, start, and time that is left, by stage
        self.now = 0.0
        while True:
            for stage, actions in enumerate(waiting):
                if stage not in working and actions and self._take(stage, actions[0]):
                    action = actions.popleft()
                    working[stage] = action, self.now, self._time(action, (stage, action.chunk))
                    held[stage] += self._change(action)
                    self.peaks[stage] = max(self.peaks[stage], held[stage])
            if not working and not any(arrival > self.now for queue in self.queues.values() for _, arrival in queue):
                break
            share = min(1.0, self.cores / max(1, len(working)))
            self.now += self.tick
            for stage, (action, start, time) in list(working.items()):
                working[stage] = action, start, time - share * self.tick
                if working[stage][2] < 1e-9:
                    del working[stage]
                    self.spans[stage, str(action)] = start, self.now
                    self._lay_down(action, (stage, action.chunk))
        self.left = [list(actions) for actions in waiting]
        return self

    def is_won(self) -> bool:
        """Whether every pass of every microbatch ran exactly once, and nothing is left over."""
        kinds = ("F", "B", "W") if self.schedule.splits_backward else ("F", "B")
        passes = len(kinds) * self.schedule.num_microbatches * self.schedule.placement.num_chunks
        is_whole = all(len(actions) == len(set(actions)) == passes for actions in self.schedule.actions)
        return is_whole and not any(self.left) and not self.own and not any(self.queues.values())

    def _change(self, action: Action) -> int:
        last = "W" if self.schedule.splits_backward else "B"
        return {"F": 1, last: -1}.get(action.kind, 0)

    def _time(self, action: Action, place: Place) -> float:
        if self.durations is None:
            return self.tick
        durations, number = self.durations, self.number[place]
        forward, backward, weight = durations.forward[number], durations.backward[number], durations.weight[number]
        whole = backward if self.schedule.splits_backward else backward + weight
        return {"F": forward, "B": whole, "W": weight}[action.kind]

    def _take(self, stage: int, action: Action) -> bool:
        """Take the tokens that ``action`` needs, if all are there."""
        kind, microbatch, chunk = action
        place = (stage, chunk)
        if place not in self.number or microbatch >= self.schedule.num_microbatches:
            return False
        needed = self._needed(kind, microbatch, place)
        if not all(self._lies_ready(token, source) for token, source in needed):
            return False
        for token, source in needed:
            if source == stage:
                self.own.remove(token)
            else:
                self.queues[token[0], source, stage].popleft()
        return True

    def _needed(self, kind: str, microbatch: int, place: Place) -> list[tuple[Token, int]]:
        """Tokens with the stages that they come from."""
        number, stage = self.number[place], place[0]
        if kind == "F":
            return [(("F", microbatch, place), self.places[number - 1][0])] if number else []
        if kind == "W":
            return [(("W", microbatch, place), stage)]
        own = (("kept", microbatch, place), stage)
        if number == len(self.places) - 1:
            return [own]
        return [own, (("B", microbatch, place), self.places[number + 1][0])]

    def _lies_ready(self, token: Token, source: int) -> bool:
        stage = token[2][0]
        if source == stage:
            return token in self.own
        queue = self.queues[token[0], source, stage]
        return bool(queue) and queue[0][0] == token and queue[0][1] <= self.now

    def _lay_down(self, action: Action, place: Place) -> None:
        (kind, microbatch, _), number, stage = action, self.number[place], place[0]
        if kind == "F":
            self.own.add(("kept", microbatch, place))
        if kind == "B" and self.schedule.splits_backward:
            self.own.add(("W", microbatch, place))
        following = number + {"F": 1, "B": -1, "W": len(self.places)}[kind]
        if 0 <= following < len(self.places):
            target = self.places[following]
            token = (kind, microbatch, target)
            if target[0] == stage:
                self.own.add(token)
            else:
                send = 0.0 if self.durations is None else self.durations.send
                self.queues[kind, stage, target[0]].append((token, self.now + send))
