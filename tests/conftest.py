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
