"""The summary of a long test run."""

from tests import durations


def test_seconds_are_summed_by_folder_and_the_slowest_tests_come_first() -> None:
    phases = [(f"tests/data/test_a.py::test_{number}", 0.001) for number in range(durations.LEAST_TESTS)]
    phases += [("tests/core/deep/test_b.py::test_slow[x::y]", 2.0), ("tests/core/deep/test_b.py::test_slow[x::y]", 1.0)]
    phases += [("tests/data/test_a.py::test_7", 0.7)]
    lines = durations.lines_of(phases)
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
    assert durations.lines_of([("tests/data/test_a.py::test_x", 5.0)]) == []
