"""Where a rank spends the time of a step, by looking at its stack.

Unlike torch's profiler this sees the waits for other ranks, and does not slow small operators.
"""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType

OTHER = "other"
GROUPS: tuple[tuple[str, str], ...] = (
    ("communication", r"megatron/core/(communication|transport)\.py|torch/distributed/"),
    ("products", r"megatron/core/ops/(matmul|grouped)\.py"),
    ("attention", r"megatron/core/ops/attention\w*\.py"),
    ("norms, SwiGLU, rotary", r"megatron/core/ops/(norm|swiglu|rope)\.py"),
    ("loss", r"megatron/core/(ops|tensor_parallel)/cross_entropy\.py"),
    ("optimizer", r"megatron/(core/optimizer|update_rules)/"),
)
"""Groups with the files of their functions: the innermost function that is in one of them counts."""
INTERVAL = 1e-3
"""Seconds between two looks."""


def group_of(frame: FrameType | None) -> str:
    """The group of a stack by its innermost ``frame``; :data:`OTHER` if no function of it is in a group."""
    while frame is not None:
        for group, pattern in GROUPS:
            if re.search(pattern, frame.f_code.co_filename):
                return group
        frame = frame.f_back
    return OTHER


def time_by_group(run: Callable[[], None]) -> dict[str, float]:
    """The share of each group in the time of ``run``, which this thread calls."""
    thread, ended = threading.get_ident(), threading.Event()
    counts: Counter[str] = Counter()

    def look() -> None:
        while not ended.wait(INTERVAL):
            counts[group_of(sys._current_frames().get(thread))] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        run()
    finally:
        ended.set()
        watcher.join()
    total = max(1, counts.total())
    return {group: counts[group] / total for group in (*(name for name, _ in GROUPS), OTHER)}
