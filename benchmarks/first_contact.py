#!/usr/bin/env python3
"""The first minutes on a GPU: what must be known first, in the order of its value, in two calls.

    python benchmarks/first_contact.py --call 1 --out DIR                      # 9 minutes: losses, speed, memory
    python benchmarks/first_contact.py --call 2 --out DIR                      # 4 minutes: kernels and ranks, by tests
    python benchmarks/first_contact.py --call 1 --out DIR --device cpu --tiny  # a rehearsal without a GPU

Every line runs in a process of its own with a limit of its own, so a crash, a hang or an error that breaks the GPU
costs this line alone. One JSON line per result is appended to DIR/results.jsonl at once; a table ends the output, and
after every line the whole directory is in one archive. benchmarks/first_contact_report.py writes the figures into
docs/performance.md.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_lines.first_contact_lines import CALL_SECONDS, CALLS
from benchmarks.gpu_lines.line import Line
from benchmarks.gpu_lines.session import SessionConfig, run_session
from megatron.commands.tool import run_tool


@dataclass(frozen=True)
class CallConfig(SessionConfig):
    """Which call, where, and for how long."""

    call: Literal[1, 2] = 1
    """1 answers whether runs are right and how fast they are; 2 tests kernels and ranks."""
    seconds: float | None = None
    """Seconds of all lines (default: 530 for call 1, 210 for call 2): a line is not started if less than half of what
    it is expected to take is left."""


def run(config: CallConfig) -> int:
    """Run the lines and print the table; the exit code is 1 if a line is not right."""
    lines: list[Line] = CALLS[config.call]
    return run_session(config, lines, config.seconds or CALL_SECONDS[config.call])


main = partial(run_tool, CallConfig, run, __doc__)

if __name__ == "__main__":
    sys.exit(main())
