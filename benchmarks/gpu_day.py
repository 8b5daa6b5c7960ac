#!/usr/bin/env python3
"""A longer day on a GPU: every kernel against its reference, and the speed of every recipe's ranks.

    python benchmarks/gpu_day.py --out DIR                            # 25 minutes, the most valuable stages first
    python benchmarks/gpu_day.py --out DIR                            # again: what the first has not reached
    python benchmarks/gpu_day.py --out DIR --only documents bench/8B  # these stages and lines, into the same table
    python benchmarks/gpu_day.py --out DIR --device cpu --tiny        # a rehearsal without a GPU

Every line runs in a process of its own with a limit, as in benchmarks/first_contact.py, which comes first. A line whose
result is in DIR already, and tests that have passed, are not repeated unless --only names them. --list prints the
lines.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_lines.day_lines import LINES, STAGES
from benchmarks.gpu_lines.line import Line, Verdict, read_results, whole_of
from benchmarks.gpu_lines.session import SessionConfig, run_session
from megatron.commands.tool import run_tool

MEASURED = (Verdict.RIGHT, Verdict.SLOW)


@dataclass(frozen=True)
class DayConfig(SessionConfig):
    """What runs, where, and for how long."""

    budget_minutes: float = 25.0
    """Minutes in all."""
    list: bool = False
    """Print the names of all lines and the seconds that each takes, and run nothing."""


def lines_of(config: DayConfig) -> "tuple[DayConfig, Sequence[Line]]":
    """The flags with stages of ``--only`` replaced by their lines, and the lines without those that have results."""
    if config.only:
        names = [line.name for one in config.only for line in STAGES.get(one, ())]
        lines = [name for name in config.only if name not in STAGES]
        return replace(config, only=tuple(dict.fromkeys([*names, *lines]))), LINES
    results = read_results(Path(config.out))
    wholes = {name: whole_of(found) for name, found in results.items()}
    measured = {name for name, whole in wholes.items() if whole is not None and whole.verdict in MEASURED}
    return config, [line for line in LINES if line.name not in measured]


def run(config: DayConfig) -> int:
    """Run the lines and print the table; the exit code is 1 if a line is not right."""
    if config.list:
        print("\n".join(f"{line.name}  {line.seconds:.0f} s" for line in LINES))
        return 0
    config, lines = lines_of(config)
    return run_session(config, lines, 60 * config.budget_minutes)


main = partial(run_tool, DayConfig, run, __doc__)

if __name__ == "__main__":
    sys.exit(main())
