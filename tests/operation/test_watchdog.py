"""When the watchdog decides that a rank hangs, on a simulated clock: never in a sound run, and soon after a limit."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from megatron.config.operation import OperationConfig
from megatron.operation.heartbeat import Heartbeat, Section, Snapshot
from megatron.operation.watchdog import (
    AGAIN_FACTOR,
    COMPILE_FACTOR,
    FACTOR,
    FEW,
    FIRST_ITERATIONS,
    LEARNED_FACTOR,
    LEARNED_SECONDS,
    LONGEST_PERIOD,
    STOPPED_SECONDS,
    Limits,
    Overrun,
    Processes,
    Watchdog,
)

SECOND = 10**9
STEP = {
    Section.STEP: 0.02,
    Section.DATA: 0.05,
    Section.FORWARD_BACKWARD: 0.6,
    Section.GRADS_REDUCE: 0.2,
    Section.OPTIMIZER: 0.1,
}
"""Sections of an iteration, as shares of its time."""
RARE = (Section.START, Section.LOAD, Section.SAVE, Section.EVALUATION)
"""Sections outside of iterations whose limits are learned."""
DEFAULT = Limits()


class SimulatedRank:
    """A rank whose sections last as long as the test says."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.snapshot = Heartbeat(now_ns=lambda: 0).snapshot()

    def enter(self, section: Section) -> None:
        times = self.snapshot.section_ns_until(self.now_ns)
        self.snapshot = replace(self.snapshot, section=section, entered_ns=self.now_ns, section_ns=times)

    def stay(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)


class Simulation:
    """A rank and its watchdog, which samples at its own period."""

    def __init__(
        self, limits: Limits = DEFAULT, jitter: random.Random | None = None, earlier: Mapping[str, float] | None = None
    ) -> None:
        self.rank, self.watchdog = SimulatedRank(), Watchdog(1, 0, limits, earlier)
        self.processes: Callable[[], Processes] = Processes
        """What the kernel says, if the watchdog asks."""
        self.jitter = jitter or random.Random(0)
        self.alarms: list[tuple[float, Overrun]] = []
        """Seconds and overrun."""
        self._next_ns = 0

    def stay(self, section: Section, seconds: float) -> None:
        """Be in ``section`` for so long, while the watchdog samples."""
        self.rank.enter(section)
        end_ns = self.rank.now_ns + round(seconds * SECOND)
        while self._next_ns <= end_ns:
            self.rank.now_ns = max(self.rank.now_ns, self._next_ns)
            self.sample(self.rank.snapshot)
        self.rank.now_ns = end_ns

    def sample(self, snapshot: Snapshot | None) -> None:
        now_ns = self.rank.now_ns
        stuck = {number: self.processes() for number in self.watchdog.stuck(now_ns)}
        self.alarms += [(now_ns / SECOND, one) for one in self.watchdog.sample(now_ns, [snapshot], stuck)]
        late = self.jitter.uniform(1.0, 1.3)
        self._next_ns = now_ns + round(self.watchdog.period() * late * SECOND)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            before = self.rank.snapshot
            self.rank.snapshot = replace(before, first_iteration=0, iteration=before.iteration + 1)
            for section, share in STEP.items():
                self.stay(section, seconds * share * self.jitter.lognormvariate(0.0, 0.2))

    def hang(self, section: Section, seconds: float = 7200.0) -> float:
        """Stay in ``section``: the seconds after which the watchdog decides that this is a hang, infinite if it does
        not. There was no alarm before."""
        assert self.alarms == []
        began = self.rank.now_ns / SECOND
        self.stay(section, seconds)
        return self.alarms[0][0] - began if self.alarms else math.inf

    @property
    def limit(self) -> float:
        """The limit that was exceeded first."""
        return self.alarms[0][1].limit


def first_alarms(
    watchdog: Watchdog,
    snapshots: Callable[[int], Sequence[Snapshot | None]],
    seconds: int = 60,
    processes: Processes | None = None,
) -> list[Overrun]:
    """Sample once a second until there are alarms."""
    for second in range(seconds):
        stuck = dict.fromkeys(watchdog.stuck(second * SECOND), processes or Processes())
        alarms = watchdog.sample(second * SECOND, snapshots(second), stuck)
        if alarms:
            return list(alarms)
    return []


@pytest.mark.parametrize(("count", "seconds", "limit"), [(10_000, 0.03, 2.0), (10_000, 1.0, 60.0), (200, 40.0, 2.0)])
def test_quiet_steps_never_alarm(chance: random.Random, count: int, seconds: float, limit: float) -> None:
    """Also if each takes longer than the limit of the flags, with saves, evaluations, and a start that compiles."""
    run = Simulation(Limits(step=limit), chance)
    run.stay(Section.START, 600.0)
    run.stay(Section.LOAD, 900.0)
    run.rank.snapshot = replace(run.rank.snapshot, iteration=0)
    run.stay(Section.FORWARD_BACKWARD, 20 * 60.0)  # compiles
    for _ in range(10):
        run.steps(count // 10, seconds)
        run.stay(Section.SAVE, 300.0)
        run.stay(Section.EVALUATION, 300.0)
    assert run.alarms == []


@pytest.mark.parametrize("section", STEP)
@pytest.mark.parametrize("limit", [2.0, 60.0])
def test_a_hang_is_decided_within_two_seconds_of_its_limit(
    chance: random.Random, section: Section, limit: float
) -> None:
    run = Simulation(Limits(step=limit, data=limit), chance)
    run.steps(300, 1.0)
    decided = run.hang(section, 10 * limit)
    overrun = run.alarms[0][1]
    assert overrun.section == section and overrun.seconds > overrun.limit
    assert overrun.limit < decided <= overrun.limit + 2.0
    assert overrun.limit <= max(limit, FACTOR * 5.0)  # learned from a second's steps with jitter


@pytest.mark.parametrize(
    ("section", "limit"),
    [
        (Section.START, 1800.0),
        (Section.LOAD, 1801.0),
        (Section.SAVE, 1802.0),
        (Section.EVALUATION, 1803.0),
        (Section.END, 1802.0),
        (Section.SPARE, math.inf),
    ],
)
def test_a_limit_that_is_given_keeps_its_meaning_also_after_short_stays(section: Section, limit: float) -> None:
    run = Simulation(Limits(60.0, 1800.0, 1801.0, 1802.0, 1803.0), earlier={section.label: 1.0})
    run.steps(100, 1.0)
    decided = run.hang(section)
    assert decided == limit or limit < decided <= limit + 2.0


def test_the_limit_of_long_sections_is_learned() -> None:
    run = Simulation()
    run.steps(10, 100.0)
    longest = max(span for span in run.watchdog._ranks[0].spans[Section.FORWARD_BACKWARD])
    run.hang(Section.FORWARD_BACKWARD, 2 * FACTOR * longest)
    assert run.limit == pytest.approx(FACTOR * longest)


@pytest.mark.parametrize("section", [Section.START, Section.LOAD])
def test_slow_iterations_before_a_restart_or_a_return_to_a_checkpoint_allow_no_longer_hangs(section: Section) -> None:
    run = Simulation(Limits(step=60.0))
    run.steps(10, 100.0)
    run.stay(section, 10.0)
    run.steps(5, 1.0)
    run.hang(Section.FORWARD_BACKWARD)
    assert run.limit == 60.0


def test_the_first_iterations_may_compile_for_as_long_as_a_start() -> None:
    run = Simulation(Limits(step=2.0, start=100.0))
    run.stay(Section.START, 90.0)
    for _ in range(2 * FIRST_ITERATIONS - 2):
        run.steps(1, 1.0)
        run.stay(Section.FORWARD_BACKWARD, 90.0)
    run.hang(Section.OPTIMIZER, 101.0 + 2.0)
    assert run.limit == 100.0


@pytest.mark.parametrize("section", STEP)
def test_a_hang_after_a_few_fast_iterations_is_decided_by_the_limit_of_iterations(section: Section) -> None:
    """The launcher has sampled hardly any of them."""
    run = Simulation(Limits(step=2.0, start=1800.0, data=2.0))
    run.stay(Section.START, 5.0)
    run.steps(2 * FIRST_ITERATIONS + 1, 0.03)
    assert run.hang(section, 10.0) <= 4.0


def test_a_rank_that_hangs_before_the_first_sample_has_the_limit_of_iterations() -> None:
    """It attaches, trains and hangs within the second between two samples."""
    hung = replace(
        SimulatedRank().snapshot, section=Section.STEP, first_iteration=0, iteration=2 * FIRST_ITERATIONS + 2
    )
    watchdog = Watchdog(1, 0, Limits(step=2.0, start=1800.0))
    (alarm,) = first_alarms(watchdog, lambda second: [hung if second else None], seconds=6)
    assert alarm.limit == 2.0


def test_a_rank_that_never_attaches_has_no_limit_unless_it_is_stopped() -> None:
    """It cannot open the memory, or the others wait for it at their start, which has a limit."""
    starting = SimulatedRank().snapshot

    def moving(second: int) -> list[Snapshot | None]:
        return [replace(starting, section=Section.STEP, entered_ns=second * SECOND), None]

    assert first_alarms(Watchdog(2, 0, Limits(start=10.0)), moving, seconds=10_000) == []
    (alarm,) = first_alarms(Watchdog(2, 0, Limits(start=10.0)), lambda second: [starting, None], seconds=13)
    assert (alarm.local_rank, alarm.section, alarm.limit) == (0, Section.START, 10.0)
    (alarm,) = first_alarms(Watchdog(1, 0, Limits()), lambda second: [None], processes=Processes(is_stopped=True))
    assert (alarm.section, alarm.limit) == (Section.START, STOPPED_SECONDS)


def test_progress_within_a_section_counts() -> None:
    """A section with many microbatches or collectives is not a hang."""
    run = Simulation()
    run.steps(100, 0.1)
    for _ in range(100):
        run.rank.snapshot = replace(run.rank.snapshot, collectives=run.rank.snapshot.collectives + 1)
        run.rank.stay(50.0)
        for _ in range(2):
            run.sample(run.rank.snapshot)
    assert run.alarms == []


def test_words_read_while_the_rank_writes_them_do_not_alarm() -> None:
    """The launcher may read a new section with the time at which the section before was entered."""
    run = Simulation()
    run.steps(100, 1.0)
    run.stay(Section.SAVE, 600.0)
    run.sample(replace(run.rank.snapshot, section=Section.STEP))
    run.rank.enter(Section.STEP)
    run.rank.stay(1.0)
    run.sample(run.rank.snapshot)
    run.steps(10, 1.0)
    assert run.alarms == []


def test_a_job_that_was_suspended_is_not_a_hang_and_a_hang_after_it_is_found() -> None:
    """SLURM may stop the launcher with its ranks for hours."""
    run = Simulation()
    run.steps(100, 1.0)
    run.rank.enter(Section.FORWARD_BACKWARD)
    run.sample(run.rank.snapshot)
    run.rank.stay(3600.0)
    for _ in range(20):
        run.sample(run.rank.snapshot)
        run.rank.stay(1.0)
    # The limit is 5 times the part of that span that counts.
    assert run.hang(Section.FORWARD_BACKWARD, 200.0) < math.inf


# --- limits that are learned ---------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [Section.SAVE, Section.EVALUATION])
@pytest.mark.parametrize(("count", "seconds"), [(FEW - 1, 0.4), (FEW, 0.4), (FEW, 30.0), (FEW, 170.0), (FEW, 500.0)])
def test_after_a_few_stays_a_section_is_not_given_half_an_hour(section: Section, count: int, seconds: float) -> None:
    """Fewer teach nothing."""
    run = Simulation()
    for _ in range(count):
        run.steps(20, 1.0)
        run.stay(section, seconds)
    run.steps(20, 1.0)
    learned = max(LEARNED_SECONDS, LEARNED_FACTOR * seconds) if count >= FEW else math.inf
    expected = min(learned, max(1800.0, FACTOR * seconds))
    assert expected < run.hang(section) <= 1.02 * expected + 10.0


@pytest.mark.parametrize(
    ("section", "steps"), [(Section.START, 0), (Section.LOAD, 0), (Section.SAVE, 20), (Section.FORWARD_BACKWARD, 2)]
)
def test_the_next_attempt_has_the_limits_that_the_last_one_has_learned(section: Section, steps: int) -> None:
    """Also for the first iterations, whose limit is that of a start."""
    first = Simulation()
    first.stay(Section.START, 8.0)
    first.stay(Section.LOAD, 2.0)
    for _ in range(FEW + 1):
        first.steps(20, 1.0)
        first.stay(Section.SAVE, 0.4)
    first.steps(1, 1.0)
    earlier = first.watchdog.stays(first.rank.now_ns)
    assert earlier.keys() == {"start", "load", "save", "first-iterations"}
    assert earlier["start"] == pytest.approx(8.0) and earlier["load"] == pytest.approx(2.0)
    run = Simulation(earlier=earlier)
    run.stay(Section.START, 10.0)
    run.stay(Section.LOAD, 3.0)
    run.steps(steps, 1.0)
    limit = 80.0 if section == Section.START else 60.0
    assert limit <= run.hang(section, 1800.0) <= limit + 3.0


def test_a_compilation_is_learned_although_fast_iterations_follow_before_the_next_sample() -> None:
    run = Simulation()
    run.stay(Section.START, 8.0)
    run.steps(1, 0.01)
    run.stay(Section.FORWARD_BACKWARD, 100.0)
    run.steps(200, 0.03)
    assert run.watchdog.stays(run.rank.now_ns)["first-iterations"] == pytest.approx(100.0, rel=0.02)
    # But nothing from an attempt that has not done enough of them.
    run = Simulation()
    run.stay(Section.START, 8.0)
    run.steps(FIRST_ITERATIONS, 1.0)
    assert "first-iterations" not in run.watchdog.stays(run.rank.now_ns)


@pytest.mark.parametrize(
    ("section", "steps", "factor"),
    [
        (Section.START, 0, AGAIN_FACTOR),
        (Section.LOAD, 0, AGAIN_FACTOR),
        (Section.SAVE, 3, AGAIN_FACTOR),
        (Section.EVALUATION, 3, AGAIN_FACTOR),
        # A restart on other nodes may compile everything anew.
        (Section.FORWARD_BACKWARD, 1, COMPILE_FACTOR),
    ],
)
def test_after_a_hang_the_limit_of_the_next_attempt_is_longer(section: Section, steps: int, factor: float) -> None:
    """The decision may be wrong. But most are right, and collectives time out after ten minutes, which names others."""
    label = section.label if section in RARE else "first-iterations"
    found: list[float] = []
    earlier = {label: 0.5}
    for _ in range(2):
        run = Simulation(earlier=earlier)
        run.steps(steps, 1.0)
        run.hang(section, 65.0 if not found else 1800.0)
        found.append(run.limit)
        earlier = run.watchdog.stays(run.rank.now_ns)
    assert found[0] == 60.0 and factor * 60.0 <= found[1] <= factor * 67.5


# --- what cannot be slow, and what may be --------------------------------------------------------------------


@pytest.mark.parametrize("section", [section for section in Section if section != Section.SPARE])
def test_a_process_that_is_stopped_is_noticed_in_a_minute_in_any_section(section: Section) -> None:
    run = Simulation()
    run.steps(2, 1.0)
    run.processes = lambda: Processes(is_stopped=True)
    assert STOPPED_SECONDS < run.hang(section, 100.0) <= 60.0


def test_a_debugger_that_attaches_now_and_then_is_no_alarm() -> None:
    run, looks = Simulation(), iter(range(10**6))
    run.steps(20, 1.0)
    run.processes = lambda: Processes(is_stopped=next(looks) % 20 < 15)
    assert run.hang(Section.SAVE, 1000.0) == math.inf


@pytest.mark.parametrize("section", RARE)
def test_reading_and_writing_is_progress(section: Section) -> None:
    """A slow file system: no hang, and nothing to learn from. A few bytes are none: the thread that renews a lock
    writes them while the rank hangs."""
    run, written, each = Simulation(earlier={section.label: 0.4}), 0, 100_000

    def write() -> Processes:
        nonlocal written
        written += each
        return Processes(transferred=written)

    run.steps(20, 1.0)
    run.processes = write
    assert run.hang(section, 3600.0) == math.inf
    each = 200
    assert run.hang(section, 300.0) <= 100.0


@pytest.mark.parametrize("section", [Section.SAVE, Section.LOAD, Section.STEP, Section.FORWARD_BACKWARD])
def test_a_stall_of_the_storage_is_no_hang_and_a_wait_for_a_device_in_a_step_is(section: Section) -> None:
    """A server that fails over takes minutes; the process waits in the kernel (state D)."""
    run = Simulation(earlier={section.label: 0.4})
    run.steps(20, 1.0)
    run.processes = lambda: Processes(waits_for_storage=True)
    if section == Section.FORWARD_BACKWARD:
        assert run.hang(section, 70.0) < math.inf
        return
    assert run.hang(section, 300.0) == math.inf and run.watchdog.waits_for_storage
    run.processes = Processes
    run.steps(1, 1.0)
    assert run.hang(section, 100.0) < math.inf


def test_waiting_for_data_may_take_minutes_and_not_for_ever() -> None:
    run = Simulation()
    run.steps(100, 1.0)
    run.stay(Section.DATA, 590.0)
    run.steps(100, 1.0)
    run.hang(Section.DATA, 6000.0)
    assert run.limit == 600.0


@pytest.mark.parametrize("is_here", [True, False], ids=["the rank is of this node", "the rank is of another node"])
def test_ranks_that_wait_for_a_rank_that_waits_for_data_do_not_hang(is_here: bool) -> None:
    """Nor at the moment at which the data has arrived, and that rank does its microbatch. Then they do."""
    slow, waiting = SimulatedRank(), SimulatedRank()
    ranks = [slow, waiting] if is_here else [waiting]
    watchdog = Watchdog(len(ranks), 0, DEFAULT)
    for rank in (slow, waiting):
        rank.snapshot = replace(rank.snapshot, first_iteration=0, iteration=100)
    alarms: list[Overrun] = []
    entered = {0: (Section.DATA, Section.GRADS_REDUCE), 300: (Section.FORWARD_BACKWARD, Section.GRADS_REDUCE)}
    for second in range(380):
        assert alarms == [] or second > 340
        for rank, section in zip((slow, waiting), entered.get(second, ())):
            if rank.snapshot.section != section:
                rank.enter(section)
        others_wait = not is_here and second < 300
        alarms += watchdog.sample(second * SECOND, [rank.snapshot for rank in ranks], {}, others_wait)
        for rank in (slow, waiting):
            rank.stay(1.0)
    assert alarms


def test_a_loader_that_may_take_longer_is_waited_for() -> None:
    operation = OperationConfig(hang_limit_s=60.0, hang_limit_start_s=900.0)
    limits = {timeout: Limits.of_flags(operation, timeout) for timeout in (None, 30.0, 1000.0, 0.0)}
    assert [limits[timeout].data for timeout in (None, 30.0, 0.0)] == [600.0, 600.0, 900.0]
    assert limits[1000.0].data > 1000.0
    assert Limits.of_flags(OperationConfig(hang_limit_s=700.0), None).data == 700.0
    assert {one.step for one in limits.values()} == {60.0}


def test_no_limit_disables_the_watchdog_and_short_limits_shorten_its_period() -> None:
    off = Simulation(Limits.of_flags(OperationConfig(hang_limit_s=0.0), 300.0))
    off.steps(10, 0.1)
    assert off.hang(Section.OPTIMIZER, 3600.0) == math.inf
    assert off.watchdog.period() == Watchdog(1, 0, DEFAULT).period() == LONGEST_PERIOD
    assert Watchdog(1, 0, Limits(step=2.0)).period() == pytest.approx(0.2)
    starting = Watchdog(1, 0, Limits(start=4.0))
    starting.sample(0, [SimulatedRank().snapshot])
    assert starting.period() == pytest.approx(0.4)
