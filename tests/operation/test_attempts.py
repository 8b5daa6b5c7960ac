"""The records of attempts: every second in one class, over simulated runs that are killed at random moments."""

import json
import random
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatron.config.operation import OperationConfig
from megatron.errors import NoProgressError
from megatron.operation import attempt_recorder, heartbeat
from megatron.operation.attempt_recorder import (
    AttemptRecorder,
    Beginning,
    FailureFacts,
    LaunchedAttempts,
    outcome_of,
    reported_failure,
)
from megatron.operation.attempts import (
    ATTEMPTS,
    CURRENT,
    TIME_CLASSES,
    Attempt,
    EffectiveTimeMeter,
    Outcome,
    account,
    append_attempt,
    check_progress,
    close_lost_attempt,
    ended,
    failures_without_progress,
    from_json,
    gaps,
    history,
    measured,
    newest_run,
    read_attempts,
    read_current,
    settle,
    to_json,
    with_commit,
    write_current,
)
from megatron.operation.heartbeat import Heartbeat, HeartbeatMemory, RunSettings, Section

CLASS_OF = {Section.START: "start", Section.LOAD: "load", Section.DATA: "data", Section.STEP: "step"}
CLASS_OF |= {Section.EVALUATION: "evaluation", Section.SAVE: "save", Section.END: "idle"}
CLASS_OF |= dict.fromkeys((Section.FORWARD_BACKWARD, Section.GRADS_REDUCE, Section.OPTIMIZER), "step")


@dataclass
class Clock:
    """Simulated time; the wall clock is 1,000,000 s ahead of the monotonic one."""

    ns: int = 0

    def now_ns(self) -> int:
        return self.ns

    def time(self) -> float:
        return 1e6 + self.ns / 1e9

    def pass_by(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(now_ns=self.now_ns)

    def recorder(self, directory: Path, warn: Callable[[str], None] = pytest.fail) -> AttemptRecorder:
        """Of an attempt that begins now."""
        return AttemptRecorder(directory, Beginning(self.time(), self.ns), 4, ["a"], warn, now_ns=self.now_ns)


class Killed(Exception):
    """The simulated attempt ends here."""


@dataclass
class SimulatedAttempt:
    """A process on a simulated clock, which is killed at ``dies_ns``, and its true seconds by class."""

    clock: Clock
    draws: random.Random
    dies_ns: int
    beat: Heartbeat
    newest: int
    """Iteration of the newest checkpoint."""
    truth: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    since_commit: float = 0.0
    """Seconds of training after the state of the newest checkpoint was copied."""

    def spend(self, section: Section, seconds: float) -> None:
        self.beat.enter(section)
        nanoseconds = min(round(seconds * 1e9), self.dies_ns - self.clock.ns)
        self.clock.ns += nanoseconds
        self.truth[CLASS_OF[section]] += nanoseconds / 1e9
        if CLASS_OF[section] == "step":
            self.since_commit += nanoseconds / 1e9
        if self.clock.ns >= self.dies_ns:
            raise Killed

    def train(self, recorder: AttemptRecorder, last: int, every: int) -> None:
        """Train the iterations after the newest checkpoint; the recorder looks at the heartbeat at every section."""
        draw, iteration = self.draws.uniform, self.newest
        self.spend(Section.START, draw(5, 60))
        self.spend(Section.LOAD, draw(0, 30))
        self.beat.start_training(iteration)
        while iteration < last:
            iteration += 1
            self.beat.start_iteration(iteration)
            for section in (Section.DATA, Section.FORWARD_BACKWARD, Section.GRADS_REDUCE, Section.OPTIMIZER):
                self.spend(section, draw(0, 2))
                recorder.update(self.beat.snapshot())
            self.beat.enter(Section.STEP)
            self.beat.finish_iteration(iteration)
            if iteration % 7 == 0:
                self.spend(Section.EVALUATION, draw(0, 5))
            if self.draws.random() < 0.03:
                iteration = self.roll_back()
            elif iteration % every == 0 or iteration == last:
                self.save(iteration)
        self.spend(Section.END, draw(0, 3))

    def roll_back(self) -> int:
        self.spend(Section.LOAD, self.draws.uniform(0, 30))
        self.lose()
        self.beat.start_training(self.newest)
        return self.newest

    def save(self, iteration: int) -> None:
        copied, is_on_disk = self.beat.step_ns, self.draws.random() < 0.5
        try:
            self.spend(Section.SAVE, self.draws.uniform(0, 8))
        except Killed:
            # The checkpoint may be complete on disk, although rank 0 has not marked that.
            if is_on_disk:
                self.newest, self.since_commit = iteration, 0.0
            raise
        self.beat.committed(iteration, copied)
        self.newest, self.since_commit = iteration, 0.0

    def lose(self) -> None:
        """The steps after the newest checkpoint are lost."""
        self.truth["step"] -= self.since_commit
        self.truth["lost"] += self.since_commit
        self.since_commit = 0.0


@pytest.mark.parametrize("seed", range(100))
def test_classes_add_up_to_wall_time_whenever_a_run_is_killed_or_rolls_back(seed: int, tmp_path: Path) -> None:
    draws, clock = random.Random(seed), Clock()
    every, newest = draws.choice([1, 3, 10]), 0
    truth: dict[str, float] = defaultdict(float)
    is_complete = False
    while not is_complete:
        recorder = clock.recorder(tmp_path)
        waited = draws.uniform(0, 3)  # before the rank attaches
        clock.pass_by(waited)
        life_s = draws.choice([draws.uniform(0, 60), draws.uniform(0, 400), 1e6])
        process = SimulatedAttempt(clock, draws, clock.ns + round(life_s * 1e9), beat := clock.heartbeat(), newest)
        process.truth["start"] += waited
        kind = draws.choice(["failed", "hang", "lost"])
        try:
            process.train(recorder, 40, every)
            is_complete = True
            recorder.finish(beat.snapshot(), "complete", 0)
        except Killed:
            if kind == "hang":
                hang_s = draws.uniform(0, 600)
                # A section that never ends is a hang from its beginning.
                open_s = (clock.ns - beat.snapshot().entered_ns) / 1e9
                section = CLASS_OF[beat.snapshot().section]
                process.truth[section] -= open_s
                process.since_commit -= open_s if section == "step" else 0.0
                process.truth["hang"] += open_s + hang_s
                clock.pass_by(hang_s)
                recorder.finish(beat.snapshot(), "failed", 1, FailureFacts("hang", 1, "a"))
            elif kind == "failed":
                recorder.finish(beat.snapshot(), "failed", -9)
            else:  # the recorder dies, too, some time after its last record
                record = read_current(tmp_path)
                assert record is not None and clock.time() - record.end <= attempt_recorder.WRITE_SECONDS + 90.0
            process.lose()
            newest = process.newest
            gap_s = draws.uniform(0, 20)
            clock.pass_by(gap_s)
            truth["idle"] += gap_s
        for name, seconds in process.truth.items():
            truth[name] += seconds
    found = history(tmp_path, before=clock.time() + 1.0)
    assert [one.attempt for one in found] == list(range(1, len(found) + 1))
    for attempt in found:
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.wall_s, abs=0.01)
        assert min(attempt.seconds.values()) >= 0.0
    total = account(found)
    assert total.wall_s == pytest.approx(clock.ns / 1e9, rel=0.01, abs=0.1)
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
    close_lost_attempt(tmp_path)
    (closed,) = read_attempts(tmp_path)
    assert (closed.outcome, closed.second("step"), closed.second("lost")) == ("lost", 30.0, 20.0)
    assert not (tmp_path / CURRENT).exists()
    # A writer that died between the two files has not lost the attempt twice.
    write_current(tmp_path, left)
    close_lost_attempt(tmp_path)
    assert read_attempts(tmp_path) == [closed]
    # A damaged one is removed.
    (tmp_path / CURRENT).write_text("{")
    close_lost_attempt(tmp_path)
    assert read_attempts(tmp_path) == [closed] and not (tmp_path / CURRENT).exists()


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


def test_a_stopped_attempt_keeps_what_it_saved_and_loses_the_rest_without_a_save() -> None:
    for saves in (True, False):
        clock = Clock()
        beat = clock.heartbeat()
        beat.start_training(0)
        beat.enter(Section.STEP)
        clock.pass_by(1.0)
        beat.finish_iteration(1)
        if saves:
            beat.committed(1, beat.step_ns)
        clock.pass_by(0.001)
        now = measured(attempt(1, 0.0, 0.0), beat.snapshot(), 0, clock.ns)
        assert ended(now, "stopped", 75).second("step") == (1.001 if saves else 0.0)
        assert ended(now, "complete", 0).second("step") == 1.001


@pytest.mark.parametrize(
    ("codes", "outcome"), [([0, 0], "complete"), ([75, 0], "stopped"), ([0, 1], "failed"), ([-9], "failed")]
)
def test_outcome(codes: list[int], outcome: str) -> None:
    assert outcome_of(codes) == outcome


def test_the_cause_comes_from_a_report_of_this_attempt(tmp_path: Path) -> None:
    assert reported_failure(tmp_path, 0.0) is None
    (tmp_path / "failure.json").write_text(json.dumps({"time": 50.0, "cause": "hang", "rank": 3, "host": "b"}))
    assert reported_failure(tmp_path, 40.0) == FailureFacts("hang", 3, "b")
    assert reported_failure(tmp_path, 60.0) is None  # of an earlier attempt
    (tmp_path / "failure.json").write_text("[]")
    assert reported_failure(tmp_path, 0.0) is None


def test_the_meter_counts_all_attempts_and_the_gaps(tmp_path: Path) -> None:
    append_attempt(tmp_path, attempt(1, 1e6, 1e6 + 50.0, seconds={"step": 40.0, "lost": 10.0}))
    clock = Clock(60 * 10**9)
    beat, meter = clock.heartbeat(), EffectiveTimeMeter(tmp_path, clock.time(), clock.ns)
    beat.start_training(40)
    clock.pass_by(20.0)
    beat.enter(Section.STEP)
    clock.pass_by(20.0)
    assert meter.read(beat.snapshot(), clock.ns) == pytest.approx(60.0 / 100.0)
    clock.pass_by(100.0)
    assert meter.read(beat.snapshot(), clock.ns) == pytest.approx(160.0 / 200.0)


def test_the_record_is_written_after_a_save_and_every_30_seconds(tmp_path: Path) -> None:
    clock = Clock()
    beat, recorder = clock.heartbeat(), clock.recorder(tmp_path)
    for seconds, written in ((0.0, 0.0), (29.0, 0.0), (0.0, 29.0), (29.0, 29.0), (1.0, 59.0)):
        if clock.ns and not seconds:
            beat.committed(7, 0)
        clock.pass_by(seconds)
        recorder.update(beat.snapshot())
        current = read_current(tmp_path)
        assert current is not None and current.wall_s == written
    assert recorder.attempt.commits == ((29.0, 7),)


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


def test_the_launcher_leaves_the_record_of_a_run_alone_that_holds_the_lock(tmp_path: Path) -> None:
    memory = HeartbeatMemory(2)
    live = attempt(5, time.time() - 1.0, time.time(), outcome="running")
    write_current(tmp_path, live)
    launched(memory, tmp_path, "failed", 2)  # kept out by the lock
    launched(memory, tmp_path, "complete", 0)  # an evaluation
    assert read_attempts(tmp_path) == []
    launched(memory, tmp_path, "failed", -9)  # killed before it came to the lock
    launched(memory, None, "failed", 1)
    assert read_current(tmp_path) == from_json(to_json(live))
    assert [found.attempt for found in read_attempts(tmp_path)] == [6]
    launched(memory, tmp_path, "stopped", 75, "a", "b")
    assert [(one.attempt, one.outcome, one.hosts) for one in read_attempts(tmp_path)] == [
        (5, "lost", ()),
        (6, "failed", (socket.gethostname(),)),
        (7, "stopped", ("a", "b")),
    ]
    assert not (tmp_path / CURRENT).exists()


def test_an_unwritable_directory_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    clock = Clock()
    recorder = clock.recorder(tmp_path / "file" / "run", told.append)
    for _ in range(3):
        clock.pass_by(40.0)
        recorder.update(clock.heartbeat().snapshot())
    recorder.finish(None, "failed", 1)
    assert len(told) == 1 and "is not recorded" in told[0]


def test_many_checkpoints_are_thinned() -> None:
    found = attempt(1, 0.0, 1.0)
    for iteration in range(5000):
        found = with_commit(found, float(iteration), iteration)
    assert 400 < len(found.commits) <= 1000
    assert found.commits[-1] == (4999.0, 4999)


# --- attempts without progress -------------------------------------------------------------------------------

LIMIT = 3


def starts(directory: Path, newest: int, code: int | None = 1, saves: bool = False) -> bool:
    """Whether an attempt may start at the checkpoint ``newest`` (0: none). It ends with ``code``; None: its writer is
    killed, too."""
    recorder = AttemptRecorder(directory, Beginning.now(age_s=1.0), 1, ["a"], pytest.fail, counts_from=newest)
    try:
        check_progress(directory, recorder.attempt.start, newest, LIMIT)
    except NoProgressError as error:
        assert error.exit_code == 93 and "start once with a larger --max-failed-attempts" in str(error)
        recorder.set_counts_from(None, None)
        recorder.finish(None, "failed", 93, FailureFacts("no_progress"))
        return False
    beat = Heartbeat()
    if saves:
        beat.committed(newest + 1, 0)
    if code is not None:
        recorder.finish(beat.snapshot(), outcome_of([code]), code)
    return True


@pytest.mark.parametrize("newest", [0, 40])
@pytest.mark.parametrize("code", [1, -9, 93, None])
def test_the_start_after_three_failures_is_refused(tmp_path: Path, newest: int, code: int | None) -> None:
    assert [starts(tmp_path, newest, code) for _ in range(5)] == [True] * LIMIT + [False] * 2
    check_progress(tmp_path, time.time(), newest, LIMIT + 1)


def test_a_new_checkpoint_starts_the_count_anew(tmp_path: Path) -> None:
    """A first one, too; and one below the others, after a return to it; and one that is gone."""
    assert all(starts(tmp_path, newest) for newest in (0, 0, 5, 5, 10, 10, 5, 5, 5))
    assert not starts(tmp_path, 5)
    assert starts(tmp_path, 0) and starts(tmp_path, 0, saves=True)
    assert all(starts(tmp_path, 0) for _ in range(LIMIT)) and not starts(tmp_path, 0)


@pytest.mark.parametrize("code", [0, 75, 2])
def test_stopped_complete_and_mistyped_attempts_are_not_counted_and_forgive_nothing(tmp_path: Path, code: int) -> None:
    assert [starts(tmp_path, 5, end) for end in (1, code, 1, code, code, code, 1)] == [True] * 7
    assert not starts(tmp_path, 5)


def test_an_attempt_whose_launcher_is_killed_with_it_counts_before_its_record_is_closed(tmp_path: Path) -> None:
    write_current(tmp_path, attempt(1, 0.0, 50.0, outcome="running", counts_from=5))
    for before, failed in ((60.0, 1), (40.0, 0)):  # in the second case it is the attempt under way
        assert failures_without_progress(history(tmp_path, before), 5) == failed


def test_records_of_earlier_versions_and_attempts_that_never_had_the_lock_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "failed_attempts.json").write_text('{"newest_iteration": 5, "failed": 9}')
    for number in range(1, 9):
        append_attempt(tmp_path, attempt(number, number, number + 1.0, exit_code=1))
    lines = (tmp_path / ATTEMPTS).read_text().replace('"counts_from": null, ', "")
    (tmp_path / ATTEMPTS).write_text(lines)
    assert "counts_from" not in lines and starts(tmp_path, 5)
