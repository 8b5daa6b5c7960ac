"""The ranks that tests share: a case that fails, hangs or dies does not spoil the next one."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankPool


def total() -> float:
    """The sum of rank + 1 over all ranks."""
    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    return number.item()


def fail_on_the_last_rank(how: str) -> None:
    """Raise, exit, or do not answer."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return
    if how == "raises":
        raise ValueError("of this rank")
    if how == "dies":
        os._exit(1)
    threading.Event().wait()


@pytest.mark.parametrize(
    ("how", "error"), [("raises", "ValueError: of this rank"), ("dies", None), ("hangs", "rank 1 did not answer")]
)
def test_a_case_that_fails_does_not_spoil_the_next(tmp_path: Path, how: str, error: str | None) -> None:
    with RankPool(2, tmp_path) as ranks:
        assert ranks.run(total) == [3.0, 3.0]
        with pytest.raises((RuntimeError, EOFError), match=error):
            ranks.run(fail_on_the_last_rank, how, timeout=1.0 if how == "hangs" else 60.0)
        assert ranks.run(total) == [3.0, 3.0]
        assert ranks.run(total, world_size=1) == [1.0]
