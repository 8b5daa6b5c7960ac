"""Timers measure what is on, cost nothing when off, and are combined over ranks as asked."""

import time

import pytest

from megatron.metrics.timers import Timers, combine, format_timer_report


def test_spans_are_measured_in_milliseconds_and_add_up_until_they_are_read() -> None:
    timers = Timers(level=1)
    for _ in range(2):
        with timers("forward-backward"):
            time.sleep(0.02)
    assert 20 <= timers.elapsed(iterations=2)["forward-backward"] < 200
    assert timers.elapsed() == {}
    with timers("interval"):
        time.sleep(0.01)
        assert timers.elapsed() == {}, "a span counts when it ends"
    assert timers.elapsed()["interval"] >= 10


@pytest.mark.parametrize(("level", "measured"), [(0, set()), (1, {"outer"}), (2, {"outer", "inner"})])
def test_the_level_decides_what_is_measured(level: int, measured: set[str]) -> None:
    timers = Timers(level)
    with timers("outer", level=1), timers("inner", level=2):
        pass
    assert set(timers.elapsed()) == measured


def test_the_accelerator_is_waited_for_at_both_ends_and_never_by_a_timer_that_is_off() -> None:
    waits: list[None] = []
    with Timers(level=1, synchronize=lambda: waits.append(None))("step"):
        assert len(waits) == 1
    assert len(waits) == 2
    timers = Timers(level=0, synchronize=lambda: waits.append(None))
    start = time.process_time()
    for _ in range(10_000):
        with timers("step", level=2):
            pass
    assert len(waits) == 2
    assert (time.process_time() - start) / 10_000 < 20e-6


def test_an_error_inside_a_span_passes_and_leaves_the_timer_usable() -> None:
    timers = Timers(level=1)
    with pytest.raises(ValueError, match="boom"), timers("step"):
        raise ValueError("boom")
    with pytest.raises(RuntimeError, match="'step' is already running"), timers("step"), timers("step"):
        pass
    assert timers.elapsed() == {}
    with timers("step"):
        pass
    assert set(timers.elapsed()) == {"step"}


RANKS = [{"forward": 10.0, "embedding": 1.0}, {"forward": 30.0}, {"forward": 20.0}]


@pytest.mark.parametrize(
    ("option", "forward"), [("max", (30.0, 30.0)), ("minmax", (10.0, 30.0)), ("all", (10.0, 30.0))]
)
def test_ranks_are_combined_over_those_that_ran_the_phase(option: str, forward: tuple[float, float]) -> None:
    assert combine(RANKS, option) == {"forward": forward, "embedding": (1.0, 1.0)}  # type: ignore[arg-type]


def test_reports_read_as_megatrons() -> None:
    dots = "." * 40
    assert format_timer_report(RANKS, "max").splitlines() == [
        "max time across ranks (ms):",
        f"    forward {dots}: 30.00",
        f"    embedding {dots[2:]}: 1.00",
    ]
    assert f"    forward {dots}: (10.00, 30.00)" in format_timer_report(RANKS, "minmax")
    assert format_timer_report(RANKS, "all").splitlines() == [
        "times across ranks (ms):",
        "  forward:",
        "     rank  0: 10.00",
        "     rank  1: 30.00",
        "     rank  2: 20.00",
        "  embedding:",
        "     rank  0: 1.00",
    ]
    assert format_timer_report([{}, {}], "minmax") == ""
