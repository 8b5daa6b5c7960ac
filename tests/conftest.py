"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four gloo ranks for a module."""
    with RankPool(4, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Eight gloo ranks for a module; costly on two cores."""
    with RankPool(8, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
