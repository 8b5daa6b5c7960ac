"""Tests of what only a GPU computes: ``pytest tests/gpu --device cuda``.

Tests with the mark ``rehearsed`` run on a CPU as well, with its kernels and small shapes; the others are skipped there.
"""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cuda":
        return
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("rehearsed"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and --device cuda"))


@pytest.fixture
def device(device_name: str) -> torch.device:
    return torch.device(device_name)
