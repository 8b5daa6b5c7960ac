"""The sampled time of a step belongs to the innermost function that is in a group."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from benchmarks.lib.step_profile import GROUPS, OTHER, group_of, time_by_group


def function_in(file: str) -> Callable[[Callable[[], object]], object]:
    """A function that calls its argument, as if it were written in ``file``."""
    names: dict[str, Callable[[Callable[[], object]], object]] = {}
    exec(compile("def call(inner): return inner()", file, "exec"), names)
    return names["call"]


def here() -> FrameType:
    return sys._getframe()


@pytest.mark.parametrize(
    "files, group",
    [
        (["/x/megatron/core/ops/matmul.py"], "products"),
        (["/x/megatron/core/ops/matmul.py", "/x/megatron/core/communication.py"], "communication"),
        (["/x/megatron/core/communication.py", "/y/torch/distributed/distributed_c10d.py"], "communication"),
        (["/x/megatron/core/ops/attention.py", "/y/torch/nn/functional.py"], "attention"),
        (["/x/megatron/update_rules/adamw.py"], "optimizer"),
        (["/x/megatron/core/models/layer.py"], OTHER),
    ],
)
def test_the_innermost_function_of_a_group_counts(files: list[str], group: str) -> None:
    call: Callable[[], object] = here
    for file in reversed(files):
        call = (lambda outer, inner: lambda: outer(inner))(function_in(file), call)
    assert group_of(call()) == group  # type: ignore[arg-type]


def test_the_files_of_the_groups_exist() -> None:
    """The time of a moved module would be that of none."""
    files = [str(path) for path in (Path(__file__).parents[2] / "megatron").rglob("*.py")]
    for _, pattern in GROUPS:
        assert any(re.search(pattern, file) for file in files), pattern


def test_the_time_of_a_group_is_its_share() -> None:
    def run() -> None:
        function_in("/x/megatron/core/transport/shared_memory.py")(lambda: time.sleep(0.6))
        time.sleep(0.2)

    shares = time_by_group(run)
    assert sum(shares.values()) == pytest.approx(1)
    assert 0.6 < shares["communication"] < 0.9
