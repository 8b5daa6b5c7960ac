"""``failure.json``: why an attempt failed, for people and programs.

    RUN_DIR/failures/0003.json    of the third attempt
    RUN_DIR/failure.json          a copy of the newest

The launcher writes it, since it also knows of ranks that hang or were killed. Without the launcher, the first rank that
fails does.
"""

import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.errors import DirectoryInUseError, ExitCode, UserError, cause_of
from megatron.operation.attempts import read_attempts, read_current
from megatron.operation.causes import Cause, advice, cause_named
from megatron.operation.culprit import Evidence, Verdict
from megatron.operation.evidence import excerpt, group_by_stack, is_waiting_for_ranks
from megatron.operation.heartbeat import Heartbeat, Snapshot

FILE = "failure.json"
DIRECTORY = "failures"
SCHEMA = 1
_MOST_TEXT = 8000
"""Characters of a traceback that are kept, from its end."""
_MOST_LISTED = 8

_CONSEQUENCE = re.compile(
    "|".join(
        (
            "Connection closed by peer",
            "Connection reset by peer",
            "Connection refused",
            "Broken pipe",
            "Application timeout caused pair closure",
            "connectFullMesh failed",
            "Timed out waiting",
            "[Ww]atchdog caught collective operation timeout",
            "remote process exited or there was a network error",
            "ncclRemoteError",
            "NCCL communicator was aborted",
            "DistNetworkError",
            "recvValue failed",
            "failed to recv",
            "Socket [Tt]imeout",
        )
    )
)
"""What a rank reports when another one has gone."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt failed."""

    cause: Cause
    message: str
    """One sentence."""
    exit_code: int
    rank: int | None = None
    """None if no single rank failed, or nothing distinguishes one."""
    local_rank: int | None = None
    host: str | None = None
    iteration: int | None = None
    microbatch: int | None = None
    section: str | None = None
    stack: str | None = None
    """Innermost frames of the rank, or the end of its traceback."""
    groups: Sequence[Mapping[str, Any]] = field(default=())
    """Ranks with equal stacks: ``ranks``, ``section`` and ``stack``."""
    last_checkpoint: int | None = None
    """Iteration of the newest checkpoint that the run is known to have committed."""

    def to_json(self, attempt: int) -> dict[str, Any]:
        """The content of failure.json."""
        head = {"schema": SCHEMA, "attempt": attempt, "time": time.time()}
        return {**head, **asdict(self), "advice": advice(self.cause)}


# --- ranks that hang -----------------------------------------------------------------------------------------


def failure_of_hang(verdict: Verdict, evidence: Sequence[Evidence], seconds: float, limit: float) -> Failure:
    """``evidence`` of all ranks; one of them has made no progress for ``seconds``."""
    culprit = next((one for one in evidence if one.rank == verdict.rank), None)
    groups = tuple(
        {
            "ranks": ranks,
            "section": _only([one.section for one in evidence if one.rank in ranks]),
            "stack": None if stack is None else excerpt(stack),
        }
        for ranks, stack in group_by_stack({one.rank: one.stack for one in evidence})
    )
    checkpoints = [one.committed_iteration for one in evidence if one.committed_iteration is not None]
    found = f"no progress for {seconds:.1f} s, the limit is {limit:.1f} s"
    last_checkpoint = max(checkpoints, default=None)
    if culprit is None:
        section = _only([one.section for one in evidence])
        message = f"The ranks hang{f' in {section}' if section else ''}: {verdict.reason}; {found}."
        return Failure(
            cause=verdict.cause,
            message=message + _different_waits(evidence),
            exit_code=ExitCode.CRASH,
            section=section,
            groups=groups,
            last_checkpoint=last_checkpoint,
        )
    where = culprit.section if not culprit.iteration else f"{culprit.section} of iteration {culprit.iteration}"
    message = f"Rank {culprit.rank} on {culprit.host} hangs in {where}: {verdict.reason}; {found}."
    return Failure(
        cause=verdict.cause,
        message=message + _different_waits(evidence),
        exit_code=ExitCode.CRASH,
        rank=culprit.rank,
        local_rank=culprit.local_rank,
        host=culprit.host,
        iteration=culprit.iteration,
        microbatch=culprit.microbatch,
        section=culprit.section,
        stack=None if culprit.stack is None else excerpt(culprit.stack),
        groups=groups,
        last_checkpoint=last_checkpoint,
    )


def _only(values: Sequence[str]) -> str | None:
    """The value, if all are equal."""
    return values[0] if len(set(values)) == 1 else None


def _different_waits(evidence: Sequence[Evidence]) -> str:
    """A sentence if all ranks wait for others, at different places: they have not called the same collective."""
    waiting = {one.rank: one.stack for one in evidence}
    if not all(stack is not None and is_waiting_for_ranks(stack) for stack in waiting.values()):
        return ""
    groups = group_by_stack(waiting)
    if len(groups) < 2:
        return ""
    counts = {one.rank: one.collectives for one in evidence}
    places = []
    for ranks, stack in groups[:_MOST_LISTED]:
        assert stack is not None
        caller = next((frame for frame in stack if not is_waiting_for_ranks((frame,))), stack[-1])
        places.append(f"{ranks_text(ranks)} at {caller} (collective {counts[ranks[0]]})")
    return f" All ranks wait for others, in different collectives: {'; '.join(places)}."


def ranks_text(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_MOST_LISTED]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}{', ...' * (len(ranks) > _MOST_LISTED)}"


# --- ranks that ended ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended that did not succeed, as its launcher sees it."""

    rank: int
    local_rank: int
    host: str
    exit_code: int
    """Negative: the signal that ended it."""
    text: str | None = None
    """Message or traceback from torchrun's error file."""
    cause: str | None = None
    """The cause that the rank itself has recorded."""
    is_local: bool = True
    """Whether only this rank has the error."""
    time: float = 0.0
    """When it wrote its error file, in seconds since the epoch; without a file, when its end was noticed."""
    iteration: int | None = None
    microbatch: int | None = None
    section: str | None = None
    committed_iteration: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether the error says that another rank has gone."""
        if self.text is not None and self.cause in (None, Cause.EXCEPTION):
            return _CONSEQUENCE.search(self.text[-_MOST_TEXT:]) is not None
        # NCCL's watchdog aborts its own process; launchers and batch systems terminate.
        return self.text is None and self.exit_code in (-signal.SIGABRT, -signal.SIGTERM)

    def precedence(self) -> tuple[int, float]:
        """The smallest is the cause of the others' ends."""
        is_killed = self.exit_code < 0 and self.text is None
        if self.is_consequence:
            # A process that aborts closes its connections: it precedes the ranks that lost theirs.
            return (2 if is_killed else 3), self.time
        return (0 if is_killed else 1), self.time

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "RankEnd":
        return RankEnd(**values)


def first_end(ends: Sequence[RankEnd]) -> RankEnd:
    """The rank that failed first."""
    return min(ends, key=RankEnd.precedence)


def failure_of_ends(ends: Sequence[RankEnd], exit_code: int, out_of_memory: bool) -> Failure:
    """Why an attempt failed whose ranks ended so; ``out_of_memory``: the kernel has killed a process for memory."""
    first = first_end(ends)
    checkpoints = [one.committed_iteration for one in ends if one.committed_iteration is not None]
    return Failure(
        cause=_cause(first, out_of_memory),
        message=_message(first, out_of_memory),
        exit_code=exit_code,
        rank=first.rank if first.is_local else None,
        local_rank=first.local_rank if first.is_local else None,
        host=first.host if first.is_local else None,
        iteration=first.iteration,
        microbatch=first.microbatch,
        section=first.section,
        stack=None if first.text is None else first.text[-_MOST_TEXT:],
        last_checkpoint=max(checkpoints, default=None),
    )


def failure_of_lost_nodes(nodes: Mapping[str, Sequence[int]]) -> Failure:
    """The launchers of ``nodes`` (host: ranks) do not answer."""
    lost = "; ".join(f"{host} ({ranks_text(ranks)})" if ranks else host for host, ranks in nodes.items())
    is_one = len(nodes) == 1
    return Failure(
        cause=Cause.NODE_LOST,
        message=f"The launcher of {'a node' if is_one else f'{len(nodes)} nodes'} does not answer: {lost}.",
        exit_code=ExitCode.CRASH,
        rank=next((ranks[0] for ranks in nodes.values() if ranks), None) if is_one else None,
        host=next(iter(nodes)) if is_one else None,
    )


def failure_of_lost_rendezvous(host: str, endpoint: str) -> Failure:
    """The launcher with the store at ``endpoint`` has ended, and another one, on ``host``, notices it."""
    return Failure(
        cause=Cause.NODE_LOST,
        message=f"The launcher on {host} has lost the rendezvous host {endpoint}: its launcher or the host has ended.",
        exit_code=ExitCode.CRASH,
        host=endpoint.rpartition(":")[0],
    )


def failure_of_lost_link(host: str, endpoint: str, seconds: float, limit: float) -> Failure:
    """The store at ``endpoint`` does not answer the launcher on ``host``."""
    return Failure(
        cause=Cause.LINK_LOST,
        message=f"The launcher on {host} cannot reach the rendezvous host {endpoint}: no answer for {seconds:.1f} s, "
        f"the limit is {limit:.1f} s.",
        exit_code=ExitCode.CRASH,
    )


def _cause(end: RankEnd, out_of_memory: bool) -> Cause:
    if end.cause is not None:
        return cause_named(end.cause)
    if end.text is not None:
        return Cause.EXCEPTION
    if end.exit_code == -signal.SIGKILL and out_of_memory:
        return Cause.OUT_OF_MEMORY
    if end.exit_code < 0:
        return Cause.KILLED
    by_code = {ExitCode.ACTION_REQUIRED: Cause.USER_ERROR, ExitCode.NO_PROGRESS: Cause.NO_PROGRESS}
    return next((cause for code, cause in by_code.items() if code == end.exit_code), Cause.UNKNOWN)


def _message(end: RankEnd, out_of_memory: bool) -> str:
    if end.text is not None:
        if end.text.startswith("ERROR: "):
            return end.text.removeprefix("ERROR: ")
        last = next((line.strip() for line in reversed(end.text.splitlines()) if line.strip()), "no text")
        return f"Rank {end.rank} on {end.host} failed: {last}"
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name if -end.exit_code in set(signal.Signals) else str(-end.exit_code)
        why = ": the kernel killed a process for lack of memory" if out_of_memory else ""
        return f"Rank {end.rank} on {end.host} was ended by signal {name}{why}."
    return f"Rank {end.rank} on {end.host} ended with exit code {end.exit_code}, without a message."


# --- files ---------------------------------------------------------------------------------------------------


def attempt_number(directory: Path, since: float) -> int:
    """The number of the attempt that began ``since`` (seconds since the epoch) in the run directory."""
    current = read_current(directory)
    if current is not None and current.end >= since:
        return current.attempt
    finished = read_attempts(directory)
    if finished and finished[-1].end >= since:
        return finished[-1].attempt  # without the launcher, a rank closes the record before it reports its error
    # An older record under way belongs to an attempt that was lost.
    recorded = [one.attempt for one in finished] + ([] if current is None else [current.attempt])
    with suppress(OSError):
        names = [path.stem for path in (directory / DIRECTORY).glob("*.json")]
        recorded += [int(name) for name in names if name.isdigit()]
    return max(recorded, default=0) + 1


def write_failure(directory: Path, failure: Failure, attempt: int, replace: bool = True) -> bool:
    """Write both files; whether they were written. Raises :class:`OSError`.

    Without ``replace``, the first of several ranks that fail in the same attempt writes, and the others do not.
    """
    text = json.dumps(failure.to_json(attempt), indent=1) + "\n"
    path = directory / DIRECTORY / f"{attempt:04d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not replace:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
    else:
        _put(path, text)
    _put(directory / FILE, text)
    return True


def record_own_failure(error: Exception, text: str, rank: int, local_rank: int, heartbeat: Heartbeat) -> None:
    """Write the files for an ``error`` of this rank, in a run without the launcher; never raises.

    ``text`` is the message or the traceback. An error that all ranks have is recorded by the rank that it names, else
    by rank 0.
    """
    directory = heartbeat.settings.get("run_dir")
    if isinstance(error, DirectoryInUseError):
        return
    culprit = error.culprit if isinstance(error, UserError) else rank
    is_local = culprit == rank or (isinstance(error, UserError) and error.is_local)
    if directory is None or not (is_local or (culprit is None and rank == 0)):
        return
    exit_code = error.exit_code if isinstance(error, UserError) else ExitCode.CRASH
    end = RankEnd(
        rank=rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        exit_code=exit_code,
        text=text,
        cause=cause_of(error),
        is_local=is_local,
        **position(heartbeat.snapshot()),
    )
    started = time.time() - (time.monotonic_ns() - heartbeat.snapshot().attached_ns) * 1e-9
    try:
        newest = read_failure(Path(directory) / FILE)
        if newest is not None and newest.get("time", 0.0) >= started:
            return  # another rank has failed before this one
        failure = failure_of_ends([end], exit_code, out_of_memory=False)
        write_failure(Path(directory), failure, attempt_number(Path(directory), started), replace=False)
    except (OSError, TypeError) as problem:
        print(f"WARNING: {FILE} cannot be written ({problem}).", file=sys.stderr, flush=True)


def position(snapshot: Snapshot) -> dict[str, Any]:
    """Where a rank is, or has ended, for :class:`RankEnd` and :class:`Evidence`."""
    known = [number for number in (snapshot.committed_iteration, snapshot.first_iteration) if number]
    return {
        "iteration": snapshot.iteration or None,
        "microbatch": snapshot.microbatch if snapshot.iteration else None,
        "section": snapshot.section.label,
        "committed_iteration": known[0] if known else None,
    }


def read_failure(path: Path) -> dict[str, Any] | None:
    """The content of a file; None if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _put(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
