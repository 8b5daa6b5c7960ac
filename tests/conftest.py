"""Fixtures for all tests, and the tiers that they run in.

Without options, all tests run that are not marked ``slow``; a mark gives the reason. ``--unit`` leaves those that start
no other process and rehearse few layouts, ``--slow`` adds the slow ones, ``--whole-matrix`` these and all rows of
products of layouts. A file named on the command line runs with its slow tests. Tests marked ``alone`` compare seconds:
beside other workers they run only where their file is named, and ``tests/run.sh`` starts them after the slow ones.
``--transport gloo`` runs the default tests of several ranks, which else share memory, over gloo's sockets:
``tests/run.sh`` does so last.
"""

import gc
import os
import random
import secrets
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import settings

from tests import durations
from tests.rank_pool import RankPool

pytest_plugins = ("pytester",)

# How long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)

TESTS = Path(__file__).parent

REHEARSALS = tuple(f"planner/test_{name}.py" for name in ("extrapolation", "search", "stage_memory", "unit_records"))
NOT_UNIT = ("benchmarks", "end_to_end", "examples", "operation", "parallel", *REHEARSALS)
"""Folders whose tests start processes, or train; files that rehearse so many layouts that each takes a minute."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The tiers."""
    parser.addoption("--unit", action="store_true", help="only tests of one process that are quick")
    parser.addoption("--slow", action="store_true", help="slow tests, too")
    parser.addoption("--whole-matrix", action="store_true", help="slow tests, and all rows of products of factors")
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where tests/gpu and the staged layouts compute"
    )
    parser.addoption(
        "--transport",
        choices=("shared-memory", "gloo"),
        default="shared-memory",
        help="gloo: only the default tests of several ranks, over gloo instead of shared memory",
    )
    parser.addoption("--module-order", type=int, help="test files in an order that this seed draws")
    parser.addoption(
        "--compare-seconds", action="store_true", help="fail if the tests take longer than a reference load explains"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what does not belong to the tier."""
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    left_out = [item for item in items if not belongs_to_tier(item, config, item.path in named)]
    config.hook.pytest_deselected(items=left_out)
    kept = set(items) - set(left_out)
    files = dict.fromkeys(item.path for item in items if item in kept)
    order = list(files)
    if config.getoption("--module-order") is not None:
        random.Random(config.getoption("--module-order")).shuffle(order)
    place = {path: number for number, path in enumerate(order)}
    items[:] = sorted((item for item in items if item in kept), key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Freeze the modules and the collected tests: a garbage collection that traverses them takes a second, and some
    tests collect hundreds of times."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Otherwise extension modules report leaks when Python exits."""
    gc.unfreeze()


NEXT_REFERENCE = pytest.StashKey[float]()
VERDICT = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Time the reference load between tests, under whatever load they have."""
    config = item.config
    if config.getoption("--compare-seconds") and time.monotonic() >= config.stash.get(NEXT_REFERENCE, 0.0):
        item.user_properties.append((durations.REFERENCE, durations.time_reference_load()))
        config.stash[NEXT_REFERENCE] = time.monotonic() + durations.REFERENCE_INTERVAL
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if the tests took longer than the reference load explains; not in a worker."""
    config = session.config
    if config.getoption("--compare-seconds") and not hasattr(config, "workerinput"):
        properties = [
            one for report in reports_of(config) if report.when == "teardown" for one in report.user_properties
        ]
        reference = [float(str(value)) for name, value in properties if name == durations.REFERENCE]
        if not reference:  # not a single test has run
            return
        total = sum(seconds_of_tests(config).values())
        is_within, config.stash[VERDICT] = durations.compare(total, fmean(reference), durations.recorded_times())
        if not is_within:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Where the seconds of a long run went."""
    lines = durations.lines_of(seconds_of_tests(config))
    lines += [config.stash[VERDICT]] if VERDICT in config.stash else []
    if lines:
        terminalreporter.section("seconds by folder")
        terminalreporter.write_line("\n".join(lines))


def seconds_of_tests(config: pytest.Config) -> dict[str, float]:
    """Of each test that has run."""
    return durations.seconds_of((one.nodeid, one.duration) for one in reports_of(config))


def reports_of(config: pytest.Config) -> list[pytest.TestReport]:
    """Of each phase of each test."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    return [one for found in reporter.stats.values() for one in found if isinstance(one, pytest.TestReport)]


def belongs_to_tier(item: pytest.Item, config: pytest.Config, is_named: bool) -> bool:
    """Whether a test runs under the options given; ``is_named`` says whether its file is on the command line."""
    if item.get_closest_marker("whole_matrix") and not config.getoption("--whole-matrix"):
        return False
    has_company = getattr(config, "workerinput", {}).get("workercount", 1) > 1 and not is_named
    if item.get_closest_marker("alone") and has_company:
        return False
    if config.getoption("--transport") == "gloo":
        return has_ranks(item) and not is_over_gloo(item) and not item.get_closest_marker("slow")
    if config.getoption("--unit"):
        return is_unit(item)
    is_slow_wanted = is_named or config.getoption("--slow") or config.getoption("--whole-matrix")
    return is_slow_wanted or not item.get_closest_marker("slow")


def is_unit(item: pytest.Item) -> bool:
    """Whether a test is quick and starts no process."""
    if any(item.get_closest_marker(name) for name in ("slow", "processes")):
        return False
    path = item.path.relative_to(TESTS)
    return not has_ranks(item) and not any(path.is_relative_to(place) for place in NOT_UNIT)


def has_ranks(item: pytest.Item) -> bool:
    """Whether a test runs on the ranks of a session."""
    return bool({"four_ranks", "sixteen_ranks"} & set(getattr(item, "fixturenames", ())))


def is_over_gloo(item: pytest.Item) -> bool:
    """Whether a test of ranks does not depend on ``--transport``: tests of collectives, which choose it, and rows of
    layouts on a transport of the tests, which is over gloo."""
    if item.path.name in ("test_communication.py", "test_transport.py"):
        return True
    callspec = getattr(item, "callspec", None)
    layout = callspec.params.get("layout") if callspec is not None else None
    return getattr(layout, "late", False) or getattr(layout, "staged", False)


@pytest.fixture(scope="session")
def four_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four ranks, the same for all modules."""
    with RankPool(4, tmp_path_factory.mktemp("ranks"), request.config.getoption("--transport")) as pool:
        yield pool


@pytest.fixture(scope="session")
def sixteen_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Up to sixteen ranks, the same for all modules; costly on two cores."""
    with RankPool(16, tmp_path_factory.mktemp("ranks"), request.config.getoption("--transport")) as pool:
        yield pool


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    """The device of tests that can run on a GPU: ``--device``."""
    name: str = request.config.getoption("--device")
    if name == "cuda":
        import torch

        assert torch.cuda.is_available(), "--device cuda needs a GPU"
    return name


@pytest.fixture
def chance() -> random.Random:
    """The dice of a test, thrown afresh each time; a failure shows their seed, and FAULT_SEED sets it."""
    seed = int(os.environ.get("FAULT_SEED", secrets.randbits(32)))
    print(f"FAULT_SEED={seed}")
    return random.Random(seed)
