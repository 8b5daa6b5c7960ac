"""The summary of a long test run."""

import pytest

from tests import durations


def test_seconds_are_summed_by_folder_and_the_slowest_tests_come_first() -> None:
    phases = [(f"tests/data/test_a.py::test_{number}", 0.001) for number in range(durations.LEAST_TESTS)]
    phases += [("tests/core/deep/test_b.py::test_slow[x::y]", 2.0), ("tests/core/deep/test_b.py::test_slow[x::y]", 1.0)]
    phases += [("tests/data/test_a.py::test_7", 0.7)]
    lines = durations.lines_of(durations.seconds_of(phases))
    assert lines[:3] == [
        "       5 s in 1,001 tests, of all workers together",
        "       3 s  core (1)",
        "       2 s  data (1,000)",
    ]
    assert lines[4:6] == [
        "     3.0 s  tests/core/deep/test_b.py::test_slow[x::y]",
        "     0.7 s  tests/data/test_a.py::test_7",
    ]
    assert len(lines) == 4 + durations.SLOWEST


def test_a_short_run_has_no_summary() -> None:
    assert durations.lines_of({"tests/data/test_a.py::test_x": 5.0}) == []


def test_seconds_may_grow_as_the_reference_load_does() -> None:
    assert durations.compare(total=2600.0, reference=20.0, recorded=100.0)[0]
    is_within, sentence = durations.compare(total=2640.0, reference=20.0, recorded=100.0)
    assert not is_within
    assert sentence.startswith(
        "132 times the reference load of 20.000 s; recorded were 100 times, of which this is 1.32"
    )
    assert durations.recorded_times() > 0


def test_a_run_that_takes_too_long_fails(pytester: pytest.Pytester) -> None:
    """With the hooks of the conftest, on a load of no seconds."""
    conftest = (durations.RECORDED.parent / "conftest.py").read_text()
    pytester.makeconftest(conftest + "\ndurations.time_reference_load = lambda: 1e-9\n")
    pytester.makepyfile(test_quick="def test_quick(): pass")
    outcome = pytester.runpytest_inprocess("--compare-seconds", "-p", "no:cacheprovider")
    assert outcome.ret == pytest.ExitCode.TESTS_FAILED
    outcome.stdout.fnmatch_lines(["*times the reference load of*mark rare ones slow*"])
