"""A simulator of a run that fails, saves and restarts: its attempts, as a real run records them.

:func:`megatron.operation.attempts.account` and :mod:`megatron.operation.run_summary` therefore compute its figures as
the figures of a real run; ``recorded_run.py`` estimates the model and the events of a real run from its records.

Time is divided as the records divide it: processes start, the state is loaded, then steps and saves alternate until an
event ends the attempt. Nothing fails between attempts. Work is measured in seconds of steps at full size and speed.
"""

import math
import random
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from megatron.errors import ConfigError, ExitCode
from megatron.operation.attempts import Attempt, Outcome, TimeClass
from megatron.operation.run_summary import Costs, daly_interval_s

Kind = Literal["crash", "hang", "slow", "planned", "end"]
"""crash, hang: a failure; slow: a slow node, which is replaced after a save; planned: a stop after a save; end: the end
of the simulation."""
LLAMA_3 = Path(__file__).with_name("llama3_failures.toml")
_DAY = 86400.0
_ROUNDING = 1e-9
Losses = defaultdict[tuple[str, str], float]
"""GPU-seconds, or GPU-hours, by cause and part."""
_MOST_EVENTS = 100_000


@dataclass(frozen=True)
class FailureCause:
    """A kind of events that end attempts."""

    name: str
    count: float = 0.0
    kind: Kind = "crash"
    loses_node: bool = False
    """Whether the node needs a repair."""

    @property
    def is_failure(self) -> bool:
        return self.kind in ("crash", "hang")


@dataclass(frozen=True)
class FailureTable:
    """How often a run is interrupted, by cause."""

    causes: tuple[FailureCause, ...]
    gpu_hours: float
    """GPU-hours in which the counts came."""
    source: str

    def mtbf_s(self, gpus: int) -> float:
        """Mean time between the failures, which are not planned, of a job."""
        failures = sum(cause.count for cause in self.causes if cause.is_failure)
        return self.gpu_hours / gpus / failures * 3600.0 if failures else math.inf

    def changed(self, factor: float, slow_nodes: float = 0.0) -> "FailureTable":
        """The table with ``factor`` times as many failures, and more slow nodes."""
        causes = [replace(one, count=one.count * factor) if one.is_failure else one for one in self.causes]
        causes += [FailureCause("slow node", slow_nodes, "slow", True)] if slow_nodes else []
        return replace(self, causes=tuple(causes))


def read_table(path: str | Path) -> FailureTable:
    """The table of a TOML file like ``llama3_failures.toml``; raises :class:`ConfigError`."""
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        causes = tuple(FailureCause(**cause) for cause in found["causes"])
        table = FailureTable(causes, float(found["gpu_hours"]), str(found.get("source", path)))
        total, stated = math.fsum(cause.count for cause in causes), float(found["interruptions"])
        wrong = [one.name for one in causes if one.kind not in get_args(Kind)[:-1] or one.count < 0]
        if wrong or not 0 < table.mtbf_s(1) < math.inf:
            raise ValueError(f"kind or count of {wrong[0]}" if wrong else "no failures, or no hours")
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"--causes {path} is no table ({error}): write it like {LLAMA_3.name}.") from error
    if not math.isclose(total, stated, rel_tol=1e-3):
        raise ConfigError(
            f"--causes {path} does not add up: its causes have {total:g} interruptions, and it states {stated:g}: "
            "correct the counts or the total."
        )
    return table


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """What the time of a run depends on."""

    gpus: int = 16384
    """GPUs that train. Source: Llama 3 405B."""
    gpus_per_node: int = 8
    """GPUs of a node. Source: DGX H100."""
    step_s: float = 10.0
    """Seconds of a step. Only iteration numbers and --steps depend on it. Source: assumed."""
    days: float | None = None
    """Days of wall time. Source: not given, until --steps are done."""
    steps: int | None = None
    """Steps of the whole run, which then ends when they are done. Source: not given, until --days are over."""

    save_interval_s: float = 0.0
    """Seconds of training between two saves; 0: the best, a step at least. Source: Daly 2006, for these failures and
    saves."""
    save_s: float = 5.0
    """Seconds for which a save blocks training. Source: assumed, as in estimate failures."""
    commit_s: float = 30.0
    """Seconds after it in which the save is written in the background. Source: assumed."""
    local_interval_s: float = 0.0
    """Seconds of training between two local copies, each also held by another node; 0: none. Source: none assumed."""
    local_save_s: float = 1.0
    """Seconds for which a local copy blocks training. Source: assumed."""

    notice_s: float = 15.0
    """Seconds from a crash, or from a stop after a save, to the end of the processes. Source: torch's heartbeats."""
    hang_s: float = 60.0
    """Seconds from the last progress of a hang to the end of the processes. Source: default of --hang-limit-s."""
    decide_s: float = 45.0
    """Seconds between the end of the processes and their next start, if a spare node is free. Source: assumed."""
    start_s: float = 120.0
    """Seconds from the start of the processes to the load. Source: assumed."""
    load_s: float = 60.0
    """Seconds to load a checkpoint from the remote storage. Source: assumed."""
    local_load_s: float = 10.0
    """Seconds to load local copies. Source: assumed."""
    warm_up_s: float = 60.0
    """Seconds by which the first steps of an attempt take longer. Source: assumed; with these five, 5 min a restart."""
    data_share: float = 0.0
    """Waits for data and evaluations, as a share of the steps' time. Source: none assumed."""

    spares: int | None = None
    """Spare nodes. Source: one for 128 nodes assumed."""
    repair_s: float = 86400.0
    """Seconds until a node that was lost is back. Source: assumed."""
    elastic_min_nodes: int | None = None
    """Fewest nodes with which the run goes on when spares are missing. Source: not given, it waits for all nodes."""
    nodes_per_replica: int = 1
    """Nodes of a model replica, of which smaller sizes are multiples. Source: assumed."""
    correlated_share: float = 0.02
    """Share of the lost nodes that take others with them. Source: assumed."""
    correlated_nodes: int = 2
    """Nodes that are then lost together, with their local copies. Source: a rack of Llama 3, section 3.3.1."""
    straggler_s: float = 1800.0
    """Seconds until a slow node is found and replaced. Source: assumed."""
    straggler_factor: float = 1.2
    """How many times as long a step takes with a slow node. Source: assumed."""

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def num_spares(self) -> int:
        return math.ceil(self.nodes / 128) if self.spares is None else self.spares

    def with_interval(self, table: FailureTable) -> Self:
        """The model with the best save interval, a step at least, if it has none."""
        costs = Costs(table.mtbf_s(self.gpus), 0.0, self.save_s)
        return self if self.save_interval_s else replace(self, save_interval_s=max(self.step_s, daly_interval_s(costs)))


def of_costs(costs: Costs, interval_s: float, days: float, **others: float) -> tuple[RunModel, FailureTable]:
    """The run of Daly's formula: one GPU, one cause, and a restart during which it can fail as well."""
    fields = dict.fromkeys(("notice_s", "hang_s", "decide_s", "load_s", "warm_up_s", "commit_s"), 0.0)
    fields |= {"start_s": costs.restart_s, "save_s": costs.save_s, "save_interval_s": interval_s, "days": days}
    run = RunModel(gpus=1, gpus_per_node=1, spares=0, **{**fields, **others})  # type: ignore[arg-type]
    return run, FailureTable((FailureCause("unknown", 1.0),), costs.mtbf_s / 3600.0, "")


# --- events --------------------------------------------------------------------------------------------------

COMPLETE, CUT = FailureCause("complete", kind="end"), FailureCause("cut", kind="end")
_RETURNED = FailureCause("node returned", kind="planned")


@dataclass(frozen=True)
class Event:
    """What ends an attempt, or slows it."""

    gpu_s: float
    """GPU-seconds in attempts since the event before."""
    cause: FailureCause
    nodes: int = 0
    """Nodes that are lost."""


def random_events(run: RunModel, table: FailureTable, seed: int) -> Iterator[Event]:
    """Exponentially distributed events. Each takes three draws: other runs with this seed meet the same ones in order.

    Raises :class:`ConfigError` after more of them than any run could bear.
    """
    draws, counts = random.Random(seed), [cause.count for cause in table.causes]
    for _ in range(_MOST_EVENTS):
        gpu_s = draws.expovariate(1.0) * table.gpu_hours * 3600.0 / sum(counts)
        (cause,) = draws.choices(table.causes, counts)
        lost = run.correlated_nodes if draws.random() < run.correlated_share else 1
        yield Event(gpu_s, cause, lost if cause.loses_node else 0)
    raise ConfigError(f"The run is not over after {_MOST_EVENTS:,} interruptions: give it fewer, or shorter restarts.")


# --- steps and saves -----------------------------------------------------------------------------------------


class _Progress(NamedTuple):
    """What is done after some time, in seconds of work, and the seconds blocked by saves."""

    work: float
    copied: float  # up to the newest copy on other nodes
    commits: int
    local_saves: int
    blocked_s: float


class Cycle:
    """Steps with local saves, then a save to the remote storage; and so on.

    |- local_interval -|l|- local_interval -|l|- rest -|save|    of save_interval seconds of work

    A second of work takes ``stretch`` seconds: more than 1 on fewer nodes, or with waits for data.
    """

    def __init__(self, run: RunModel, stretch: float) -> None:
        self.run, self.stretch, local = run, stretch, run.local_interval_s
        self.num_local = math.ceil(run.save_interval_s / local - _ROUNDING) - 1 if local else 0
        self.whole_s = run.save_interval_s * stretch + self.num_local * run.local_save_s + run.save_s

    def after(self, seconds: float) -> _Progress:
        run, count, local_s = self.run, self.num_local, self.run.local_interval_s * self.stretch + self.run.local_save_s
        cycles = int(seconds // self.whole_s)
        rest = seconds - cycles * self.whole_s
        copies = min(count, int(rest / local_s)) if count else 0
        rest -= copies * local_s
        segment = run.local_interval_s if copies < count else run.save_interval_s - count * run.local_interval_s
        trained = min(rest, segment * self.stretch)
        copied, local_saves = cycles * run.save_interval_s + copies * run.local_interval_s, cycles * count + copies
        commits = max(0, math.floor((seconds - run.commit_s) / self.whole_s))
        blocked_s = cycles * run.save_s + local_saves * run.local_save_s + rest - trained
        return _Progress(copied + trained / self.stretch, copied, commits, local_saves, blocked_s)

    def seconds_to(self, work: float) -> float:
        """The time of so much work, without a save at its end."""
        run = self.run
        cycles = max(0, math.ceil(work / run.save_interval_s - _ROUNDING) - 1)
        rest = work - cycles * run.save_interval_s
        copies = max(0, math.ceil(rest / run.local_interval_s - _ROUNDING) - 1) if self.num_local else 0
        return cycles * self.whole_s + rest * self.stretch + min(self.num_local, copies) * run.local_save_s


# --- the simulation ------------------------------------------------------------------------------------------


class Simulation:
    """A simulated run; ``run.save_interval_s`` is set."""

    def __init__(self, run: RunModel, events: Iterable[Event]) -> None:
        self.run, self.events = run, iter(events)
        self.attempts: list[Attempt] = []
        self.hidden = Losses(float)
        """GPU-seconds that no record shows apart: waits for nodes, warm-up and slow nodes."""
        self.now, self.load_s, self.end = 0.0, run.load_s, math.inf if run.days is None else run.days * _DAY
        self.cause = FailureCause("first start")  # what the next attempt follows
        self.work, self.remote = 0.0, 0.0  # where it resumes, and the newest checkpoint on the remote storage
        self.repairs: list[float] = []  # when lost nodes are back
        self.slow: list[tuple[float, Event]] = []  # seconds until each slow node is found, and what it then ends
        # By attempt the work at its start and its newest copy, the work done, and what is hidden of it.
        self.kept: list[tuple[float, float, float, dict[tuple[str, str], float]]] = []

    def run_attempt(self) -> None:
        nodes = self._allocate()
        gpus = self.run.gpus * nodes // self.run.nodes
        cycle = Cycle(self.run, self.run.gpus / gpus * (1.0 + self.run.data_share))
        life, slow_s, event = self._life(gpus, nodes, cycle)
        self._record(gpus, cycle, life, slow_s, event)
        self.repairs += [self.now + self.run.repair_s] * event.nodes
        self.now = min(self.now + self.run.decide_s, max(self.now, self.end))

    def _free(self) -> int:
        self.repairs = sorted(back for back in self.repairs if back > self.now)
        return self.run.nodes + self.run.num_spares - len(self.repairs)

    def _allocate(self) -> int:
        """The nodes of the next attempt; waits until they are enough."""
        run, begun, least, nodes = self.run, self.now, self.run.elastic_min_nodes or self.run.nodes, 0
        while self.now < self.end and nodes < least:
            nodes = min(run.nodes, self._free() // run.nodes_per_replica * run.nodes_per_replica)
            self.now = self.now if nodes >= least else min(self.repairs[0], self.end)
        self.hidden[self.cause.name, "waiting"] += (self.now - begun) * run.gpus
        return nodes if nodes >= least else run.nodes  # for the attempt without a second that is the end

    def _life(self, gpus: int, nodes: int, cycle: Cycle) -> tuple[float, float, Event]:
        """Seconds from the start of the processes to the event that ends the attempt, seconds of them with a slow node,
        and the event."""
        run, life, slow_from = self.run, 0.0, 0.0 if self.slow else math.inf
        while True:
            event = next(self.events)
            life += event.gpu_s / gpus
            if event.cause.kind != "slow" or (self.slow and self.slow[0][0] <= life):
                break
            slow_from = min(slow_from, life)
            self.slow.append((life + run.straggler_s, event))
        if self.slow and self.slow[0][0] <= life:
            life, event = self.slow[0]
        if nodes < run.nodes:  # it restarts as soon as a replica more has its nodes
            missing = nodes + run.nodes_per_replica - self._free()
            if (back := self.repairs[missing - 1] - self.now) < life:
                life, event = back, Event(0.0, _RETURNED)
        if run.steps is not None:
            left = run.start_s + self.load_s + run.warm_up_s + cycle.seconds_to(run.steps * run.step_s - self.work)
            left += max(0.0, left - max(slow_from, run.start_s + self.load_s)) * (run.straggler_factor - 1.0)
            if left <= life:
                life, event = left, Event(0.0, COMPLETE)
        if self.end - self.now <= life:
            life, event = max(0.0, self.end - self.now), Event(0.0, CUT)
        # A slow node that is not found is in the next attempt, too.
        left_of = [(found - life, one) for found, one in self.slow if one is not event]
        self.slow = [(found, one) for found, one in left_of if found < run.straggler_s]
        return life, max(0.0, life - slow_from), event

    def _record(self, gpus: int, cycle: Cycle, life: float, slow_s: float, event: Event) -> None:
        """Append the attempt, and note where the next one resumes."""
        run, cause = self.run, event.cause
        begun = min(life, run.start_s)
        loaded = min(life - begun, self.load_s)
        trained = life - begun - loaded
        slow = min(slow_s, trained) * (1.0 - 1.0 / run.straggler_factor)
        warm = min(trained - slow, run.warm_up_s)
        done = cycle.after(trained - warm - slow)
        base, saves = self.work, trained > 0.0 and (cause is COMPLETE or cause.kind in ("planned", "slow"))
        if done.commits:
            self.remote = base + done.commits * run.save_interval_s
        # One other node holds a copy; on one node nothing does.
        has_local = run.local_interval_s > 0.0 and event.nodes < min(2, run.nodes * gpus // run.gpus)
        self.load_s = run.local_load_s if has_local else run.load_s
        if cause.is_failure:
            self.work = base + done.copied if has_local else self.remote
        else:
            self.work = base + done.work
            self.remote = self.work if saves else self.remote
        kept = max(0.0, self.work - base)
        stretch, first_s = run.gpus / gpus, warm + slow if kept else 0.0
        # What a lost copy takes back is in lost steps, in proportion, as :func:`settle` divides it.
        for number, (first, newest, all_s, hidden) in enumerate(self.kept if self.work < base else ()):
            if self.work < newest:
                share = max(0.0, self.work - first) / all_s
                hidden = {key: gpu_s * share for key, gpu_s in hidden.items()}
                self.kept[number] = (first, self.work, all_s, hidden)
        if kept:
            hidden = {(self.cause.name, "warm-up"): warm * gpus, ("slow node", "slow steps"): slow * gpus}
            self.kept.append((base, self.work, done.work, hidden))
        is_hang = cause.kind == "hang"
        seconds: dict[TimeClass, float] = {
            "start": begun,
            "load": loaded,
            "step": kept * stretch + first_s,
            "lost": (done.work - kept) * stretch + warm + slow - first_s,
            "data": done.work * stretch * run.data_share,
            "save": done.blocked_s + (run.save_s + run.commit_s) * saves,
            "hang": min(run.hang_s, self.end - self.now - life) * is_hang,
            "idle": 0.0 if is_hang or cause is CUT else run.notice_s,
        }
        end = self.now + sum(seconds.values())
        outcome: Outcome = "failed" if cause.is_failure else "complete" if cause is COMPLETE else "stopped"
        after_s = begun + loaded + warm + run.commit_s
        numbers = range(1, done.commits + 1, 1 + done.commits // 1000)
        commits = [(after_s + number * cycle.whole_s, number) for number in numbers]
        attempt = Attempt(
            attempt=len(self.attempts) + 1,
            start=self.now,
            end=end,
            outcome=outcome,
            seconds=seconds,
            exit_code=ExitCode.STOPPED if outcome == "stopped" else None,
            world_size=gpus,
            first_iteration=self._iteration(base) if trained > 0 else None,
            last_iteration=self._iteration(base + done.work) if trained > 0 else None,
            committed_iteration=self._iteration(self.work) if kept or saves else None,
            saves=done.commits + done.local_saves + saves,
            commits=tuple((at_s, self._iteration(base + number * run.save_interval_s)) for at_s, number in commits),
            cause=None if cause.kind == "end" else cause.name,
        )
        self.attempts.append(attempt)
        self.now, self.cause = end, cause

    def _iteration(self, work: float) -> int:
        return int(work / self.run.step_s + 1e-6)


def simulate(run: RunModel, events: Iterable[Event]) -> Simulation:
    """Simulate until the days are over, the steps done, or an event is the end, whose steps are kept."""
    found = Simulation(run, events)
    with suppress(StopIteration):  # the last attempt of a replay may have failed
        while found.cause.kind != "end":
            found.run_attempt()
    for *_, hidden in found.kept:
        for key, gpu_s in hidden.items():
            found.hidden[key] += gpu_s
    return found
