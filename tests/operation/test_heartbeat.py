"""The heartbeat: what a launcher reads of a rank, also of one that hangs or is dead; and its cost."""

import cProfile
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config.operation import OperationConfig
from megatron.metrics.timers import Timers
from megatron.operation.heartbeat import (
    DUMP_SIGNAL,
    HEARTBEATS,
    STEP_SECTIONS,
    Heartbeat,
    HeartbeatMemory,
    RunSettings,
    Section,
)
from megatron.operation.waits import SECTION_OF_TIMER, Sections
from tests.end_to_end.run_process import TINY_RUN, call_training, words_of
from tests.forked import fork_context


def test_every_moment_is_in_one_section() -> None:
    moments = iter(range(10))  # the clock goes on by 1 ns at every look
    heartbeat = Heartbeat(now_ns=lambda: next(moments))
    for section in (Section.LOAD, Section.STEP):
        heartbeat.enter(section)
        with heartbeat.section(Section.DATA):
            pass
    assert heartbeat.enter(Section.END) == Section.STEP
    times = heartbeat.snapshot().section_ns_until(20)
    assert {section: time for section, time in times.items() if time} == {
        Section.START: 1,
        Section.LOAD: 2,
        Section.STEP: 2,
        Section.DATA: 2,
        Section.END: 13,
    }


def test_a_nested_section_returns_to_the_outer_one_but_not_after_an_error() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter(Section.STEP)
    with heartbeat.section(Section.FORWARD_BACKWARD), heartbeat.section(Section.DATA):
        assert heartbeat.snapshot().section == Section.DATA
    assert heartbeat.snapshot().section == Section.STEP
    with pytest.raises(ValueError, match="no disk"), heartbeat.section(Section.SAVE):
        raise ValueError("no disk")
    assert heartbeat.snapshot().section == Section.SAVE


def test_seconds_of_training_include_the_open_section() -> None:
    now_ns = 0
    heartbeat = Heartbeat(now_ns=lambda: now_ns)
    assert heartbeat.step_ns == 0
    for section in STEP_SECTIONS:
        heartbeat.enter(section)
        now_ns += 2
    assert heartbeat.step_ns == 2 * len(STEP_SECTIONS)
    heartbeat.enter(Section.SAVE)
    now_ns += 2
    assert heartbeat.step_ns == 2 * len(STEP_SECTIONS)


def rank(path: str, local_rank: int, directory: Path) -> None:
    heartbeat = Heartbeat.attach({HEARTBEATS: path}, local_rank)
    heartbeat.dump_stacks_on_signal()
    heartbeat.write_settings({"rank": local_rank, "run_dir": str(directory)})
    heartbeat.start_iteration(7)
    heartbeat.count_microbatch()
    heartbeat.count_collective()
    heartbeat.add_waited(5)
    heartbeat.committed(6, 123)
    heartbeat.enter(Section.OPTIMIZER)
    (directory / f"ready.{local_rank}").touch()
    time.sleep(600)


def test_the_launcher_reads_a_rank_while_it_hangs_and_after_it_is_killed(tmp_path: Path) -> None:
    memory = HeartbeatMemory(3)
    processes = [fork_context().Process(target=rank, args=(memory.path, number, tmp_path)) for number in (0, 2)]
    for process in processes:
        process.start()
    while len(list(tmp_path.glob("ready.*"))) < 2:
        time.sleep(0.01)
    assert memory.read(1) is None and memory.settings(1) == {}
    for number, process in zip((0, 2), processes):
        snapshot, settings = memory.read(number), memory.settings(number)
        assert snapshot is not None and snapshot.pid == process.pid
        assert (snapshot.section, snapshot.iteration, snapshot.microbatch) == (Section.OPTIMIZER, 7, 1)
        assert (snapshot.collectives, snapshot.waited_ns[Section.START]) == (1, 5)
        assert (snapshot.committed_iteration, snapshot.step_ns_at_commit) == (6, 123)
        assert settings["rank"] == number and settings["run_dir"] == str(tmp_path)
        if DUMP_SIGNAL is not None:
            assert process.pid is not None
            os.kill(process.pid, DUMP_SIGNAL)
            stacks = Path(settings["stacks"])
            while "in rank" not in stacks.read_text():
                time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert memory.read(number) == snapshot
    memory.clear()
    assert memory.read(0) is None and memory.settings(0) == {}


@pytest.mark.parametrize("level", [0, 2])
def test_the_timers_mark_sections_at_every_level(level: int) -> None:
    heartbeat = Heartbeat()
    sections = Sections(heartbeat, level)
    heartbeat.enter(Section.STEP)
    for name, section in SECTION_OF_TIMER.items():
        with sections(name, level=2):
            assert heartbeat.snapshot().section == section
            with sections("a part of it", level=2):
                assert heartbeat.snapshot().section == section
        assert heartbeat.snapshot().section == Section.STEP
    assert bool(sections.elapsed()) == (level == 2)
    assert isinstance(sections, Timers)


def test_a_rollback_drops_the_time_since_the_checkpoint() -> None:
    now_ns = 0
    heartbeat = Heartbeat(now_ns=lambda: now_ns)
    assert heartbeat.snapshot().first_iteration is None and heartbeat.snapshot().done_iteration is None
    heartbeat.start_training(10)
    heartbeat.enter(Section.STEP)
    for iteration in (11, 12, 13, 14, 15):
        now_ns += 5
        heartbeat.finish_iteration(iteration)
        if iteration % 2 == 0:
            heartbeat.committed(iteration, heartbeat.step_ns)
    heartbeat.enter(Section.LOAD)
    heartbeat.start_training(12)
    snapshot = heartbeat.snapshot()
    assert (snapshot.first_iteration, snapshot.done_iteration, snapshot.saves) == (10, 12, 2)
    assert heartbeat.step_ns == snapshot.step_ns_at_commit == 10 and snapshot.dropped_ns == 15
    heartbeat.start_training(8)  # a checkpoint of an earlier attempt
    assert heartbeat.step_ns == heartbeat.snapshot().step_ns_at_commit == 0
    assert heartbeat.snapshot().first_iteration == 8


@pytest.mark.parametrize("path", [None, "/proc/1/fd/nothing"], ids=["no launcher", "its memory cannot be opened"])
def test_without_a_launchers_memory_a_rank_trains_as_well(capsys: pytest.CaptureFixture[str], path: str | None) -> None:
    """As in a container of its own, which is said."""
    heartbeat = Heartbeat.attach({} if path is None else {HEARTBEATS: path}, 0)
    heartbeat.start_iteration(3)
    assert heartbeat.is_private and heartbeat.snapshot().iteration == 3
    assert heartbeat.snapshot().committed_iteration is None
    said = capsys.readouterr().err
    wanted = f"WARNING: the launcher's heartbeat memory {path} cannot be opened (No such file or directory)"
    assert said.startswith(wanted) if path is not None else not said
    assert not said or said.endswith("start the launcher and its ranks in one PID namespace.\n")


def test_ranks_may_have_newer_code_than_their_launcher() -> None:
    settings = RunSettings(0, 2, "/run", OperationConfig(max_failed_attempts=7), hosts=("a",))
    written = settings.to_json()
    assert RunSettings.from_json(written) == settings
    written["operation"]["a_later_flag"] = 1
    written["a_later_setting"] = 2
    assert RunSettings.from_json(written) == settings


# --- its cost ------------------------------------------------------------------------------------------------

STEP_SECONDS = 0.03
"""Processor time of a short step."""
CALLS: dict[str, Callable[[Heartbeat], object]] = {
    "enter": lambda heartbeat: heartbeat.enter(Section.STEP),
    "start_iteration": lambda heartbeat: heartbeat.start_iteration(7),
    "finish_iteration": lambda heartbeat: heartbeat.finish_iteration(7),
    "count_microbatch": Heartbeat.count_microbatch,
    "count_collective": Heartbeat.count_collective,
    "add_waited": lambda heartbeat: heartbeat.add_waited(1),
}


def seconds_per_call(call: Callable[[Heartbeat], object]) -> float:
    """Processor time of a call; the least of several measurements, since others use the processor's caches."""
    heartbeat, count, least = Heartbeat(), 5000, float("inf")
    for _ in range(10):
        started = time.process_time()
        for _ in range(count):
            call(heartbeat)
        least = min(least, (time.process_time() - started) / count)
    return least


def calls_of_a_run(iterations: int) -> Counter[str]:
    flags = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "train_iters": iterations, "eval_iters": 0}
    with cProfile.Profile() as profile:
        assert call_training(words_of(flags)).exit_code == 0
    names = {getattr(Heartbeat, name).__code__: name for name in CALLS}
    return Counter({names[one.code]: one.callcount for one in profile.getstats() if one.code in names})


def test_the_heartbeat_costs_less_than_a_thousandth_of_a_step() -> None:
    short, long = (calls_of_a_run(iterations) for iterations in (2, 6))
    per_step = {name: (long[name] - short[name]) / 4 for name in CALLS}
    # 4 microbatches, each with a section of its own for its data.
    assert per_step["enter"] >= 2 * (4 + 3) and per_step["count_microbatch"] == 4
    # One process has no collectives: as many as a step of a small data-parallel model.
    per_step["count_collective"] = per_step["add_waited"] = 10.0
    cost = {name: seconds_per_call(call) * per_step[name] for name, call in CALLS.items()}
    assert sum(cost.values()) <= 1e-3 * STEP_SECONDS, cost
    print(f"{sum(cost.values()) * 1e6:.1f} us per step: {cost}")
