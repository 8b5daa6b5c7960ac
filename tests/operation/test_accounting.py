"""The records of attempts: every second in one class, over simulated runs that are killed at random moments."""

import json
import random
import socket
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatron.config.operation import OperationConfig
from megatron.operation import accounting, attempt_recorder, heartbeat
from megatron.operation.accounting import (
    ATTEMPTS,
    CURRENT,
    TIME_CLASSES,
    Attempt,
    EffectiveTimeMeter,
    Outcome,
    account,
    append_attempt,
    close_lost_attempt,
    from_json,
    gaps,
    history,
    measured,
    newest_run,
    read_attempts,
    read_current,
    settle,
    to_json,
    write_current,
)
from megatron.operation.attempt_recorder import (
    AttemptRecorder,
    Beginning,
    FailureFacts,
    LaunchedAttempts,
    outcome_of,
    reported_failure,
)
from megatron.operation.heartbeat import Heartbeat, HeartbeatMemory, Section
from megatron.operation.run_settings import RunSettings

CLASS_OF = {
    Section.START: "start",
    Section.LOAD: "load",
    Section.DATA: "data",
    Section.STEP: "step",
    Section.FORWARD_BACKWARD: "step",
    Section.GRADS_REDUCE: "step",
    Section.OPTIMIZER: "step",
    Section.EVALUATION: "evaluation",
    Section.SAVE: "save",
    Section.END: "idle",
}


@dataclass
class Clock:
    """Simulated time; the wall clock is 1,000,000 s ahead of the monotonic one."""

    now_ns: int = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def time(self) -> float:
        return 1e6 + self.now_ns / 1e9

    def monotonic(self) -> float:
        return self.now_ns / 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (heartbeat, attempt_recorder):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Killed(Exception):
    """The simulated attempt ends here."""


@dataclass
class SimulatedAttempt:
    """A process on a simulated clock, which is killed at ``dies_ns``, and its true seconds by class."""

    clock: Clock
    draws: random.Random
    dies_ns: int
    truth: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    since_commit: float = 0.0
    """Seconds of training after the state of the newest checkpoint was copied."""

    def spend(self, beat: Heartbeat, section: Section, seconds: float) -> None:
        beat.enter(section)
        nanoseconds = min(round(seconds * 1e9), self.dies_ns - self.clock.now_ns)
        self.clock.now_ns += nanoseconds
        self.truth[CLASS_OF[section]] += nanoseconds / 1e9
        if CLASS_OF[section] == "step":
            self.since_commit += nanoseconds / 1e9
        if self.clock.now_ns >= self.dies_ns:
            raise Killed

    def train(self, beat: Heartbeat, recorder: AttemptRecorder, first: int, last: int, every: int) -> None:
        """Train the iterations after ``first``; the recorder looks at the heartbeat at every section."""
        draw = self.draws.uniform
        self.spend(beat, Section.START, draw(5, 60))
        self.spend(beat, Section.LOAD, draw(0, 30))
        beat.start_training(first)
        for iteration in range(first + 1, last + 1):
            beat.start_iteration(iteration)
            for section in (Section.DATA, Section.FORWARD_BACKWARD, Section.GRADS_REDUCE, Section.OPTIMIZER):
                self.spend(beat, section, draw(0, 2))
                recorder.update(beat.snapshot())
            beat.enter(Section.STEP)
            beat.finish_iteration(iteration)
            if iteration % 7 == 0:
                self.spend(beat, Section.EVALUATION, draw(0, 5))
            if iteration % every == 0 or iteration == last:
                copied = beat.step_ns
                self.spend(beat, Section.SAVE, draw(0, 4))
                beat.committed(iteration, copied)
                self.since_commit = 0.0
        self.spend(beat, Section.END, draw(0, 3))


@pytest.mark.parametrize("seed", range(50))
def test_classes_add_up_to_wall_time_whenever_a_run_is_killed(seed: int, tmp_path: Path, clock: Clock) -> None:
    draws = random.Random(seed)
    every, last, first = draws.choice([1, 3, 10]), 40, 0
    truth: dict[str, float] = defaultdict(float)
    began_ns = clock.now_ns
    for number in range(1, 30):
        beginning = Beginning.now()
        clock.now_ns += draws.randrange(3 * 10**9)  # before the rank attaches
        beat = Heartbeat()
        truth["start"] += (clock.now_ns - beginning.monotonic_ns) / 1e9
        life_s = draws.choice([draws.uniform(0, 60), draws.uniform(0, 400), 1e6])
        process = SimulatedAttempt(clock, draws, clock.now_ns + round(life_s * 1e9))
        recorder = AttemptRecorder(tmp_path, beginning, 4, ["a"], pytest.fail)
        assert recorder.attempt.attempt == number
        kind = draws.choice(["failed", "hang", "lost"])
        is_complete = False
        try:
            process.train(beat, recorder, first, last, every)
            is_complete = True
            recorder.finish(beat.snapshot(), "complete", 0)
        except Killed:
            if kind == "hang":
                hang_ns = draws.randrange(600 * 10**9)
                # A section that never ends is a hang from its beginning.
                open_s = (clock.now_ns - beat.snapshot().entered_ns) / 1e9
                section = CLASS_OF[beat.snapshot().section]
                process.truth[section] -= open_s
                process.since_commit -= open_s if section == "step" else 0.0
                process.truth["hang"] += open_s + hang_ns / 1e9
                clock.now_ns += hang_ns
                recorder.finish(beat.snapshot(), "failed", 1, FailureFacts("hang", 1, "a"))
            elif kind == "failed":
                recorder.finish(beat.snapshot(), "failed", -9)
            else:  # the recorder dies, too, some time after its last record
                record = read_current(tmp_path)
                assert record is not None and clock.time() - record.end <= attempt_recorder.WRITE_SECONDS + 90.0
        if is_complete:
            process.truth["lost"] = 0.0
        else:
            process.truth["step"] -= process.since_commit
            process.truth["lost"] += process.since_commit
            kept = beat.snapshot().committed_iteration
            first = first if kept is None else kept
        for name, seconds in process.truth.items():
            truth[name] += seconds
        if is_complete:
            break
        gap_ns = draws.randrange(20 * 10**9)
        clock.now_ns += gap_ns
        truth["idle"] += gap_ns / 1e9
    found = history(tmp_path, before=clock.time() + 1.0)
    for attempt in found:
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.wall_s, abs=0.01)
        assert min(attempt.seconds.values()) >= 0.0
    total = account(found)
    assert total.wall_s == pytest.approx((clock.now_ns - began_ns) / 1e9, rel=0.01, abs=0.1)
    if all(attempt.outcome != "lost" for attempt in found):
        for name in TIME_CLASSES:
            assert total.seconds[name] == pytest.approx(truth[name], abs=0.02 * len(found)), name
        assert total.wall_s == pytest.approx(sum(truth.values()), abs=0.1)


def attempt(number: int, start: float, end: float, **facts: object) -> Attempt:
    facts = {"outcome": "failed", "seconds": {"step": end - start}} | facts
    return Attempt(attempt=number, start=start, end=end, **facts)  # type: ignore[arg-type]


def test_a_record_survives_the_file_and_unknown_fields_are_dropped(tmp_path: Path) -> None:
    full = attempt(3, 10.0, 20.5, hosts=("a", "b"), commits=((1.5, 10), (2.5, 20)), saves=2, cause="hang", rank=1)
    full = replace(full, seconds={name: 10.5 / len(TIME_CLASSES) for name in TIME_CLASSES})
    again = from_json(to_json(full))
    assert again is not None and replace(again, seconds={}) == replace(full, seconds={})
    assert sum(again.seconds.values()) == pytest.approx(10.5, abs=0.01)
    later = json.dumps({**json.loads(to_json(full)), "colour": "red"})
    assert from_json(later) == again
    for damaged in ("", "{", "[]", "null", '{"attempt": 1}', to_json(full).replace("10.0", '"x"'), "[" * 10**5):
        assert from_json(damaged) is None


def test_a_torn_last_line_costs_no_other_line(tmp_path: Path) -> None:
    for number in (1, 2):
        append_attempt(tmp_path, attempt(number, number, number + 1.0))
    path = tmp_path / ATTEMPTS
    path.write_bytes(path.read_bytes()[:-20])
    assert [found.attempt for found in read_attempts(tmp_path)] == [1]
    append_attempt(tmp_path, attempt(3, 3.0, 4.0))
    assert [found.attempt for found in read_attempts(tmp_path)] == [1, 3]
    assert read_attempts(tmp_path / "missing") == []


def test_a_record_that_was_left_is_closed_as_lost_once(tmp_path: Path) -> None:
    left = attempt(1, 0.0, 50.0, outcome="running", uncommitted_s=20.0, committed_iteration=3)
    write_current(tmp_path, left)
    assert [found.outcome for found in history(tmp_path, before=60.0)] == ["lost"]
    assert history(tmp_path, before=40.0) == []  # its writer lives
    closed = close_lost_attempt(tmp_path)
    assert closed is not None and (closed.outcome, closed.second("step"), closed.second("lost")) == ("lost", 30.0, 20.0)
    assert read_attempts(tmp_path) == [replace(closed, seconds=read_attempts(tmp_path)[0].seconds)]
    assert not (tmp_path / CURRENT).exists() and close_lost_attempt(tmp_path) is None
    # A writer that died between the two files has not lost the attempt twice.
    write_current(tmp_path, left)
    close_lost_attempt(tmp_path)
    assert len(read_attempts(tmp_path)) == 1


def test_a_damaged_record_under_way_is_removed(tmp_path: Path) -> None:
    (tmp_path / CURRENT).write_text("{")
    assert close_lost_attempt(tmp_path) is None
    assert not (tmp_path / CURRENT).exists()


@pytest.mark.parametrize(
    ("begins", "kept"),
    [
        ([0, 30], [30, 20]),  # at the newest checkpoint that the record knows
        ([0, 40], [40, 20]),  # the background writer has completed a save after the crash
        ([0, 10], [10, 20]),  # the newest checkpoint was damaged
        ([0, None], [30, 20]),  # the later attempt did not get as far
    ],
)
def test_what_was_kept_follows_from_where_the_next_attempt_began(begins: list[int | None], kept: list[int]) -> None:
    one = attempt(1, 0.0, 50.0, first_iteration=0, last_iteration=50, committed_iteration=30)
    one = replace(one, seconds={"step": 30.0, "lost": 20.0})
    two = attempt(2, 50.0, 70.0, first_iteration=begins[1], last_iteration=60, outcome="complete")
    assert [found.second("step") for found in settle([one, two])] == kept
    assert account([one, two]).wall_s == 70.0


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_rank_that_is_killed_between_a_commit_and_its_mark_has_lost_nothing(
    tmp_path: Path, clock: Clock, is_marked: bool
) -> None:
    """The checkpoint of iteration 20 is on disk, and the next attempt begins there; the heartbeat may not say so."""

    def train(beat: Heartbeat, first: int, last: int) -> None:
        beat.start_training(first)
        for iteration in range(first + 1, last + 1):
            beat.start_iteration(iteration)
            for section in (Section.FORWARD_BACKWARD, Section.STEP):
                beat.enter(section)
                clock.now_ns += 10**9
            beat.finish_iteration(iteration)
            if iteration % 5 == 0:
                with beat.section(Section.SAVE):
                    clock.now_ns += 10**8
                    if iteration < 20 or is_marked:
                        beat.committed(iteration, beat.step_ns)
                    if iteration == 20:
                        return

    for first, last in ((0, 20), (20, 22)):
        beat, recorder = Heartbeat(), AttemptRecorder(tmp_path, Beginning.now(), 2, ["a"], pytest.fail)
        train(beat, first, last)
        recorder.finish(beat.snapshot(), "failed" if last == 20 else "complete", -9 if last == 20 else 0)
    recorded = read_attempts(tmp_path)
    assert recorded[0].committed_iteration == (20 if is_marked else 15)
    assert recorded[0].second("lost") == (0.0 if is_marked else 10.0)
    settled = settle(recorded)
    assert [one.second("step") for one in settled] == [40.0, 4.0]
    assert [one.second("lost") for one in settled] == [0.0, 0.0]
    assert account(recorded).seconds["save"] == pytest.approx(0.4)
    assert account(recorded).wall_s == pytest.approx(44.4)


def test_a_return_behind_the_beginning_of_an_attempt_costs_earlier_ones_too() -> None:
    rows = ((1, 0, 100, 100), (2, 100, 150, 140), (3, 50, 80, 80))
    attempts = [
        attempt(number, first, last, first_iteration=first, last_iteration=last, committed_iteration=committed)
        for number, first, last, committed in rows
    ]
    assert [found.second("step") for found in settle(attempts)] == [50.0, 0.0, 30.0]
    assert [found.second("lost") for found in settle(attempts)] == [50.0, 50.0, 0.0]


def test_a_gap_after_a_complete_run_is_no_interruption() -> None:
    attempts = [attempt(1, 0.0, 10.0), attempt(2, 15.0, 20.0, outcome="complete"), attempt(3, 99.0, 100.0)]
    assert gaps(attempts) == [5.0, 0.0]
    assert account(attempts).seconds["idle"] == 5.0


def test_a_run_from_the_start_after_a_complete_one_is_another_run() -> None:
    outcomes = [("failed", 0), ("complete", 5), ("failed", None), ("complete", 9), ("lost", None), ("failed", 0)]
    attempts = [
        attempt(number, number, number + 1.0, outcome=outcome, first_iteration=first)
        for number, (outcome, first) in enumerate(outcomes, 1)
    ]
    for length, numbers in ((3, [1, 2, 3]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4, 5]), (6, [5, 6])):
        assert [found.attempt for found in newest_run(attempts[:length])] == numbers


def test_a_rollback_drops_steps_within_the_attempt(clock: Clock) -> None:
    beat, start_ns = Heartbeat(), clock.now_ns
    beat.start_training(0)
    for iteration in range(1, 11):
        beat.enter(Section.STEP)
        clock.now_ns += 10**9
        beat.finish_iteration(iteration)
        if iteration in (4, 8):
            beat.committed(iteration, beat.step_ns)
    beat.enter(Section.LOAD)
    beat.start_training(4)
    beat.enter(Section.STEP)
    clock.now_ns += 10**9
    beat.finish_iteration(5)
    now = measured(attempt(1, 0.0, 0.0, outcome="running"), beat.snapshot(), start_ns, clock.now_ns)
    assert (now.second("step"), now.second("lost"), now.dropped_s, now.uncommitted_s) == (5.0, 6.0, 6.0, 1.0)
    failed = accounting.ended(now, "failed", 1)
    assert (failed.second("step"), failed.second("lost")) == (4.0, 7.0)
    resumed = settle([failed, attempt(2, 11.0, 12.0, first_iteration=5)])[0]
    assert (resumed.second("step"), resumed.second("lost")) == (5.0, 6.0)


def test_a_stopped_attempt_keeps_what_it_saved_and_loses_the_rest_without_a_save(clock: Clock) -> None:
    for saves in (True, False):
        beat, start_ns = Heartbeat(), clock.now_ns
        beat.start_training(0)
        beat.enter(Section.STEP)
        clock.now_ns += 10**9
        beat.finish_iteration(1)
        if saves:
            beat.committed(1, beat.step_ns)
        clock.now_ns += 10**6
        now = measured(attempt(1, 0.0, 0.0), beat.snapshot(), start_ns, clock.now_ns)
        assert accounting.ended(now, "stopped", 75).second("step") == (1.001 if saves else 0.0)
        assert accounting.ended(now, "complete", 0).second("step") == 1.001


@pytest.mark.parametrize(
    ("codes", "outcome"), [([0, 0], "complete"), ([75, 0], "stopped"), ([0, 1], "failed"), ([-9], "failed")]
)
def test_outcome(codes: list[int], outcome: str) -> None:
    assert outcome_of(codes) == outcome


def test_the_cause_comes_from_a_report_of_this_attempt(tmp_path: Path) -> None:
    assert reported_failure(tmp_path, 0.0) is None
    report = {"time": 50.0, "cause": "hang", "rank": 3, "host": "b"}
    (tmp_path / "failure.json").write_text(json.dumps(report))
    assert FailureFacts("hang").is_hang and not FailureFacts("killed").is_hang
    assert reported_failure(tmp_path, 40.0) == FailureFacts("hang", 3, "b")
    assert reported_failure(tmp_path, 60.0) is None  # of an earlier attempt
    (tmp_path / "failure.json").write_text("[]")
    assert reported_failure(tmp_path, 0.0) is None


def test_the_meter_counts_all_attempts_and_the_gaps(tmp_path: Path, clock: Clock) -> None:
    append_attempt(tmp_path, attempt(1, 1e6, 1e6 + 50.0, seconds={"step": 40.0, "lost": 10.0}))
    clock.now_ns = 60 * 10**9
    beat, start_ns = Heartbeat(), clock.now_ns
    meter = EffectiveTimeMeter(tmp_path, clock.time(), start_ns)
    beat.start_training(40)
    clock.now_ns += 20 * 10**9
    beat.enter(Section.STEP)
    clock.now_ns += 20 * 10**9
    assert meter.read(beat.snapshot(), clock.now_ns) == pytest.approx(60.0 / 100.0)
    clock.now_ns += 100 * 10**9
    assert meter.read(beat.snapshot(), clock.now_ns) == pytest.approx(160.0 / 200.0)


def test_the_record_is_written_after_a_save_and_every_30_seconds(tmp_path: Path, clock: Clock) -> None:
    beat, recorder = Heartbeat(), AttemptRecorder(tmp_path, Beginning.now(), 1, ["a"], pytest.fail)

    def written() -> float:
        recorder.update(beat.snapshot())
        current = read_current(tmp_path)
        assert current is not None
        return current.wall_s

    assert written() == 0.0
    clock.now_ns += 29 * 10**9
    assert written() == 0.0
    beat.committed(7, 0)
    assert written() == 29.0
    assert recorder.attempt.commits == ((29.0, 7),)
    clock.now_ns += 29 * 10**9
    assert written() == 29.0
    clock.now_ns += 10**9
    assert written() == 59.0


def launched(memory: HeartbeatMemory, run_dir: Path | None, outcome: Outcome, code: int, *hosts: str) -> None:
    """An attempt under a launcher whose rank 0 gets as far as its settings, and with ``hosts`` as far as the lock."""
    memory.clear()
    attempts = LaunchedAttempts(memory, run_dir, pytest.fail)
    attempts.begin([0, 1], 2, Beginning.now())
    beat = Heartbeat.attach({heartbeat.HEARTBEATS: memory.path}, 0)
    if run_dir is not None:
        beat.write_settings(RunSettings(0, 2, str(run_dir), OperationConfig(), hosts).to_json())
    attempts.poll()
    attempts.end(outcome, code)
    attempts.end("failed", 1)  # told twice


def test_the_launcher_leaves_the_record_of_a_run_alone_that_holds_the_lock(tmp_path: Path, clock: Clock) -> None:
    memory = HeartbeatMemory(2)
    live = attempt(5, clock.time(), clock.time(), outcome="running")
    write_current(tmp_path, live)
    clock.now_ns += 10**9
    for outcome, code in (("failed", 2), ("complete", 0)):  # kept out by the lock; an evaluation
        launched(memory, tmp_path, outcome, code)  # type: ignore[arg-type]
    assert read_attempts(tmp_path) == []
    launched(memory, tmp_path, "failed", -9)  # killed before it came to the lock
    launched(memory, None, "failed", 1)
    assert read_current(tmp_path) == from_json(to_json(live))
    assert [found.attempt for found in read_attempts(tmp_path)] == [6]
    clock.now_ns += 10**9
    launched(memory, tmp_path, "stopped", 75, "a", "b")
    found = read_attempts(tmp_path)
    assert [(one.attempt, one.outcome, one.hosts) for one in found] == [
        (5, "lost", ()),
        (6, "failed", (socket.gethostname(),)),
        (7, "stopped", ("a", "b")),
    ]
    assert not (tmp_path / CURRENT).exists()
    memory.close()


def test_an_unwritable_directory_is_told_once(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    recorder = AttemptRecorder(tmp_path / "file" / "run", Beginning.now(), 1, ["a"], told.append)
    for _ in range(3):
        clock.now_ns += 40 * 10**9
        recorder.update(Heartbeat().snapshot())
    recorder.finish(None, "failed", 1)
    assert len(told) == 1 and "is not recorded" in told[0]


def test_many_checkpoints_are_thinned() -> None:
    found = attempt(1, 0.0, 1.0)
    for iteration in range(5000):
        found = accounting.with_commit(found, float(iteration), iteration)
    assert 400 < len(found.commits) <= 1000
    assert found.commits[-1] == (4999.0, 4999)
