"""Triton's two modes, each in a process that all modules share. Without Triton no module here is collected."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.triton_kernels.worker import TritonProcess

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[TritonProcess]:
    """Kernels run on CPU tensors."""
    with TritonProcess(interprets=True) as process:
        yield process


@pytest.fixture(scope="session")
def compiler() -> Iterator[TritonProcess]:
    """Kernels are compiled for Hopper."""
    with TritonProcess(interprets=False) as process:
        yield process
