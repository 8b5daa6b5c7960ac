"""Ranks for experiments, started once, when they are first needed, for all modules."""

from collections.abc import Iterator

import pytest

from tests.comparison.in_process import Ranks, ranks_started


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    with ranks_started(tmp_path_factory.mktemp("ranks"), 2, 4) as started:
        yield started
