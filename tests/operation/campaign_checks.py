"""What must hold of a job that faults have disturbed. Each check returns a sentence for every violation."""

import getpass
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import TRACKER
from megatron.checkpoint.lock import LOCK
from megatron.features.faults.flags import FILE as INJECTED
from megatron.features.faults.flags import SAVE, Fault
from megatron.operation import attempts, failure
from megatron.operation.causes import Cause
from megatron.operation.hang import STAYS
from megatron.operation.nodes import NAMED_NODES
from megatron.training import run_files
from tests.end_to_end.run_process import assert_same_tensors

CAUSES: Mapping[str, set[Cause]] = {
    "kill": {Cause.KILLED},
    "exit": {Cause.UNKNOWN, Cause.EXCEPTION},
    "exception": {Cause.EXCEPTION},
    "oom": {Cause.OUT_OF_MEMORY},
    "nan": {Cause.NOT_FINITE},
    "failloader": {Cause.DISK},
    "stop": {Cause.STOPPED_PROCESS},
    "sleep": {Cause.HANG},
    "gil": {Cause.HANG},
    "fifo": {Cause.HANG},
    "flip": {Cause.SILENT_CORRUPTION},
    # Of another size, gloo aborts the process that receives it, and ranks that share memory refuse it.
    "collective": {Cause.HANG, Cause.KILLED, Cause.EXCEPTION},
    "stoploader": {Cause.HANG},
}
"""The cause that the failure report must name, by the kind of the fault."""
PERMANENT = {
    TRACKER,
    LOCK,
    INJECTED,
    attempts.ATTEMPTS,
    failure.FILE,
    failure.DIRECTORY,
    NAMED_NODES,
    *run_files.FILES,
    run_files.EARLIER,
    STAYS,
}
"""What remains beside the checkpoints."""


def check_commits(commits: Mapping[int, bytes], save: Path) -> list[str]:
    """A committed checkpoint, of which the manifest was noted, is never lost or changed."""
    found = []
    for iteration, manifest in sorted(commits.items()):
        path = save / f"iter_{iteration:07d}" / "manifest.json"
        if not path.exists():
            found.append(f"the checkpoint of iteration {iteration} is lost")
        elif path.read_bytes() != manifest:
            found.append(f"the checkpoint of iteration {iteration} was replaced")
    return found


def check_bits(save: Path, reference: Path) -> list[str]:
    """All tensors of all checkpoints are those of the undisturbed run, and its last one exists."""
    found = []
    wanted = {path.name for path in reference.glob("iter_*")}
    names = {path.name for path in save.glob("iter_*")}
    if max(wanted) not in names:
        found.append(f"the last checkpoint {max(wanted)} is missing")
    for name in sorted(names & wanted):
        try:
            assert_same_tensors(save / name, reference / name, prefix=("",))
        except AssertionError as error:
            found.append(f"{name} differs from the undisturbed run: {str(error).splitlines()[0]}")
        if state_of(save / name) != state_of(reference / name):
            found.append(f"{name} has another state than in the undisturbed run")
    return found


def state_of(checkpoint: Path) -> dict[str, object]:
    """The state in a manifest, without the flags, which have paths and faults."""
    state = dict(json.loads((checkpoint / "manifest.json").read_text())["manifest"]["state"])
    state.pop("flags", None)
    return state


def check_leftovers(save: Path, temporary: Path) -> list[str]:
    """No temporary file or directory remains, after a start that could clear up."""
    # A job that did not get so far has no save directory; its violation is another one.
    names = {path.name for path in save.glob("*")} - PERMANENT
    left = sorted(name for name in names if not re.fullmatch(r"iter_\d{7}", name))
    # torch's cache of compiled kernels is one directory per user.
    kept = {path.name for path in temporary.iterdir()} - {f"torchinductor_{getpass.getuser()}"}
    left += [f"{temporary.name}/{name}" for name in sorted(kept)]
    return [f"files remain: {', '.join(left)}"] if left else []


def check_loads(log: str, commits: Iterable[int]) -> list[str]:
    """Every attempt loads a committed checkpoint, none older than the newest that was reported."""
    found, newest = [], 0
    for event, number in re.findall(r"(saved checkpoint \S*iter_|continuing after iteration )(\d+)", log):
        iteration = int(number)
        if event.startswith("saved"):
            newest = max(newest, iteration)
        elif iteration not in commits or iteration < newest:
            found.append(f"iteration {iteration} was loaded; saved until then: {newest}, committed: {sorted(commits)}")
    return found


def check_injected(faults: Iterable[Fault], injected_faults: set[str]) -> list[str]:
    """The campaign did what it says. A number of a save may never be reached by an attempt."""
    missing = {str(fault) for fault in faults if fault.moment != SAVE} - injected_faults
    return [f"never injected: {', '.join(sorted(missing))}"] if missing else []


def check_attempts(run_dir: Path) -> list[str]:
    """The classes of every attempt add up to its duration."""
    found = []
    for attempt in attempts.read_attempts(run_dir):
        total = sum(attempt.seconds.values())
        # A stop at the start makes attempts of a few hundredths of a second, and the file has whole milliseconds: half
        # of one may be missing in each class, in the start and in the end.
        rounding = 0.0005 * (sum(seconds > 0 for seconds in attempt.seconds.values()) + 2)
        if abs(total - attempt.wall_s) > 0.01 * attempt.wall_s + rounding:
            found.append(f"attempt {attempt.attempt} took {attempt.wall_s:.3f} s, its classes {total:.3f} s")
    return found


def read_reports(run_dir: Path) -> list[dict[str, Any]]:
    """The failure reports of all attempts, in their order."""
    return [json.loads(path.read_text()) for path in sorted((run_dir / failure.DIRECTORY).glob("[0-9]*.json"))]


def check_reports(faults: Sequence[Fault], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A fatal fault that is the only one is reported with its cause and its rank; no fault, no report.

    There is one report. A fault without a rank is a fault of every rank, injected in the first attempt in which *this*
    rank reaches it (docs/fault_cases.md): if the first rank has failed before another one got there, the other one
    fails in the next attempt. So there may be one report for each rank, but none names a rank a second time.
    """
    if not faults:
        return [f"a failure is reported: {one['message']}" for one in reports]
    fault = faults[0]
    if len(faults) > 1 or fault.kind not in CAUSES or fault.times is None or fault.moment == SAVE:
        return []
    most = len({report["rank"] for report in reports}) if fault.rank is None else 1
    if not reports or len(reports) > most:
        return [f"{len(reports)} failure reports after {fault}: {[report['message'] for report in reports]}"]
    found = []
    for one in reports:
        cause, rank = one["cause"], one["rank"]
        if cause not in CAUSES[fault.kind]:
            found.append(f"cause {cause} reported after {fault}: {one['message']}")
        # All ranks see NaN. Two replicas, and two ranks in different collectives, do not say which one is wrong.
        unnamed = fault.kind in ("nan", "collective") or (fault.kind == "flip" and rank is None)
        if fault.rank is not None and not unnamed and rank != fault.rank:
            found.append(f"rank {rank} named after {fault}: {one['message']}")
    return found


def check_writer(written: Path, reference: Path, attempts: int, most_missing: int) -> list[str]:
    """The kill of a background process, which writes to ``written``, restarts nothing, and costs at most so many of its
    saves or copies."""
    found = [] if attempts == 1 else [f"{attempts} attempts after the kill of a background process"]
    missing = {path.name for path in reference.glob("iter_*")} - {path.name for path in written.glob("iter_*")}
    if len(missing) > most_missing:
        found.append(f"after the kill of one background process {sorted(missing)} are missing in {written}")
    return found
