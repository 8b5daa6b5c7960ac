"""Fixtures for all tests."""

import os
import random
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.rank_pool import RankPool

# How long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is left out by default, to be run when there is time."""
    parser.addoption(
        "--whole-matrix", action="store_true", help="all rows of products of factors, and more kills at random moments"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked whole_matrix, unless it is asked for."""
    if config.getoption("--whole-matrix"):
        return
    left_out = [item for item in items if item.get_closest_marker("whole_matrix")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("whole_matrix")]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four gloo ranks for a module."""
    with RankPool(4, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="module")
def sixteen_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Up to sixteen gloo ranks for a module; costly on two cores."""
    with RankPool(16, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture
def chance() -> random.Random:
    """The dice of a test, thrown afresh each time; a failure shows their seed, and FAULT_SEED sets it."""
    seed = int(os.environ.get("FAULT_SEED", secrets.randbits(32)))
    print(f"FAULT_SEED={seed}")
    return random.Random(seed)
