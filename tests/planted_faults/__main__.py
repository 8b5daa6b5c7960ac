"""Plants faults in clones of the repository, and says which of them the default tier does not see.

    python -m tests.planted_faults                       the chosen faults
    python -m tests.planted_faults --room data           those in a folder of megatron/
    python -m tests.planted_faults --drawn 60 --seed 1   faults that are drawn, at lines that the default tier executes

For drawn faults the default tier runs once to find out which test files reach their lines. The exit code is 1 if a
fault was not seen.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.planted_faults.chosen import CHOSEN
from tests.planted_faults.drawn import draw
from tests.planted_faults.fault import SOURCES, Fault
from tests.planted_faults.runner import REPOSITORY, Outcome, make_clone, try_faults
from tests.planted_faults.trace import trace

_SURPLUS = 3
"""Lines that are traced for each fault to be drawn: many are executed by no test of the default tier."""


def room_of(fault: Fault) -> str:
    """The folder of megatron/ in which a fault is planted."""
    parts = fault.find(REPOSITORY)[0].relative_to(REPOSITORY).parts
    return parts[1] if len(parts) > 2 else parts[0]


def drawn(count: int, seed: int, place: Path, pytest: Sequence[str]) -> list[tuple[Fault, Sequence[str]]]:
    """Drawn faults, with the test files that reach them."""
    clone = make_clone(place / "traced")
    mutations = draw(clone, _SURPLUS * count, seed)
    faults = [one.fault(clone) for one in mutations]
    found = trace(clone, mutations, place / "trace", pytest)
    reached = [(faults[number], [file.removeprefix("tests/") for file in files]) for number, files in found.items()]
    print(f"{len(reached)} of {len(faults)} lines are executed by the default tier")
    return random.Random(seed).sample(reached, min(count, len(reached)))


def show(outcomes: Sequence[Outcome]) -> None:
    """A summary: seen by room, and the faults that were not seen."""
    rooms = Counter(room_of(one.fault) for one in outcomes)
    seen = Counter(room_of(one.fault) for one in outcomes if one.seen_by is not None)
    print(f"seen: {seen.total()} of {len(outcomes)}", ", ".join(f"{room} {seen[room]}/{rooms[room]}" for room in rooms))
    for one in outcomes:
        if one.seen_by is None:
            path, _ = one.fault.find(REPOSITORY)
            print(f"NOT SEEN: {one.fault.kind} ({path.relative_to(REPOSITORY)})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", help=f"only chosen faults in this folder of {SOURCES[0]}/")
    parser.add_argument("--drawn", type=int, default=0, help="draw so many faults instead")
    parser.add_argument("--seed", type=int, default=0, help="of the faults that are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="clones that run tests at a time")
    parser.add_argument("--most-seconds", type=float, default=900.0, help="for the tests of one fault")
    parser.add_argument("--match", default="", help="only chosen faults whose description has this text")
    options = parser.parse_args()
    outcomes = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as directory:
        if options.drawn:
            workers = ["-n", str(options.jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
            faults = drawn(options.drawn, options.seed, Path(directory), workers)
        else:
            chosen = [one for one in CHOSEN if options.room in (None, room_of(one)) and options.match in one.kind]
            faults = [(fault, fault.tests) for fault in chosen]
        for outcome in try_faults(faults, Path(directory), options.jobs, options.most_seconds):
            outcomes.append(outcome)
            verdict = "NOT SEEN" if outcome.seen_by is None else f"seen by {outcome.seen_by}"
            print(f"{outcome.fault.kind}: {verdict}, {outcome.files} files, {outcome.seconds:.0f} s", flush=True)
    show(outcomes)
    print(f"{(time.monotonic() - start) / 60:.1f} min")
    return int(any(one.seen_by is None for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
