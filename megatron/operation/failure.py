"""``failure.json``: why an attempt failed, for people and programs.

    RUN_DIR/failures/0003.json    of the third attempt
    RUN_DIR/failure.json          a copy of the newest

The launcher writes it, since it also knows of ranks that hang or were killed. Without the launcher, the first rank that
fails does.
"""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import DirectoryInUseError, ExitCode, UserError, cause_of
from megatron.operation.attempts import read_attempts, read_current, replace_file
from megatron.operation.causes import Cause, OutOfMemoryKills, advice, cause_named
from megatron.operation.evidence import process_state
from megatron.operation.heartbeat import Heartbeat, HeartbeatMemory, RunSettings

if TYPE_CHECKING:
    from megatron.operation.nodes import Nodes

FILE = "failure.json"
DIRECTORY = "failures"
SCHEMA = 1
# Characters of a traceback that are kept, from its end.
_MOST_TEXT = 8000
MOST_LISTED = 8

# What a rank reports when another one has gone.
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
        head = {"schema": SCHEMA, "attempt": attempt, "time": time.time()}
        return {**head, **asdict(self), "advice": advice(self.cause)}


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


def failure_of_ends(ends: Sequence[RankEnd], exit_code: int, out_of_memory: bool) -> Failure:
    """Why an attempt failed whose ranks ended so; ``out_of_memory``: the kernel has killed a process for memory."""
    first = min(ends, key=RankEnd.precedence)
    checkpoints = [one.committed_iteration for one in ends if one.committed_iteration is not None]
    return Failure(
        cause=_cause(first, out_of_memory),
        message=_message(first, out_of_memory),
        exit_code=exit_code,
        stack=None if first.text is None else first.text[-_MOST_TEXT:],
        last_checkpoint=max(checkpoints, default=None),
        rank=first.rank if first.is_local else None,
        local_rank=first.local_rank if first.is_local else None,
        host=first.host if first.is_local else None,
        iteration=first.iteration,
        microbatch=first.microbatch,
        section=first.section,
    )


def list_ranks(ranks: Sequence[int]) -> str:
    """``ranks`` in words: rank 3; ranks 1 and 2; ranks 1, 2, 3 and 40 more."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > MOST_LISTED:
        return f"ranks {', '.join(numbers[: MOST_LISTED - 1])} and {len(numbers) - MOST_LISTED + 1} more"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def failure_of_lost_nodes(nodes: Mapping[str, Sequence[int]]) -> Failure:
    """The launchers of ``nodes`` (host: ranks) do not answer."""
    lost = "; ".join(f"{host} ({list_ranks(ranks)})" if ranks else host for host, ranks in nodes.items())
    is_one = len(nodes) == 1
    return Failure(
        cause=Cause.NODE_LOST,
        message=f"The launcher of {'a node' if is_one else f'{len(nodes)} nodes'} does not answer: {lost}.",
        exit_code=ExitCode.CRASH,
        rank=next((ranks[0] for ranks in nodes.values() if ranks), None) if is_one else None,
        host=next(iter(nodes)) if is_one else None,
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


def write_failure(directory: Path, failure: Failure, attempt: int, replace: bool = True) -> None:
    """Write both files; raises :class:`OSError`.

    Without ``replace``, the first of several ranks that fail in the same attempt writes, and the others do not.
    """
    text = json.dumps(failure.to_json(attempt), indent=1) + "\n"
    path = directory / DIRECTORY / f"{attempt:04d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if replace:
        replace_file(path, text)
    else:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return
    replace_file(directory / FILE, text)


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
        **heartbeat.snapshot().position(),
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


def read_failure(path: Path) -> dict[str, Any] | None:
    """The content of a file; None if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# --- reports of a launcher -----------------------------------------------------------------------------------


@dataclass
class RankStart:
    """One start of the ranks of a node."""

    ranks: Mapping[int, int]
    """Global rank by local rank."""
    pids: Mapping[int, int]
    """Process by local rank."""
    nodes: "Nodes | None"
    """The launchers of all nodes, if there are several."""
    node: int
    restarts: int
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    number: int | None = None
    """Number of the attempt in the run directory, from the first report."""
    settings: RunSettings | None = None
    """The settings of the first rank that has written them."""


class FailureReports:
    """Reports why the attempts of the ranks of a node fail: in a sentence on the console, and in failure.json.

    Each launcher publishes how its ranks ended. The first one whose ranks failed asks for what the others have
    published, and writes one report for all nodes.
    """

    def __init__(self, heartbeats: HeartbeatMemory, nodes_seconds: float) -> None:
        """``nodes_seconds``: time for the other launchers to say what they know of their ranks."""
        self.host = socket.gethostname()
        self.nodes_seconds = nodes_seconds
        self.start: RankStart | None = None
        self.failure: Failure | None = None
        """Why the last attempt failed; None if it did not, or if another launcher reports it."""
        self.hang_lasts = False
        """Whether a reported hang lasts (``--on-hang report``): it is the cause of the failures after it."""
        self._heartbeats = heartbeats
        self._out_of_memory = OutOfMemoryKills()

    def begin(self, start: RankStart) -> None:
        self.start, self.failure, self.hang_lasts = start, None, False
        self._out_of_memory.rose()  # since now
        if start.nodes is not None:
            content = {"host": self.host, "ranks": list(start.ranks.values())}
            start.nodes.publish("host", start.restarts, start.node, content)

    def settings(self) -> RunSettings | None:
        """The settings of the run; None before a rank has written them."""
        start = self.start
        if start is not None and start.settings is None:
            found = (RunSettings.from_json(self._heartbeats.settings(rank)) for rank in start.ranks)
            start.settings = next((one for one in found if one is not None), None)
        return None if start is None else start.settings

    def directory(self) -> Path | None:
        """The run directory; None if the ranks have none."""
        settings = self.settings()
        return None if settings is None or settings.run_dir is None else Path(settings.run_dir)

    def record_ends(
        self, failures: Mapping[int, Any], first: Collection[int], exit_code: int, endpoint: str | None = None
    ) -> None:
        """Report an attempt in which ranks failed.

        ``failures`` are torch's, by local rank; ``first`` the local ranks that had failed when the launcher noticed it,
        before it ended the others. ``endpoint`` is the rendezvous host with its port.
        """
        start = self.start
        if start is None:
            return
        ends = [self._end(start, rank, failure) for rank, failure in failures.items()]
        ends = [end for end in ends if end.local_rank in first or end.text is not None] or ends
        nodes = start.nodes
        if nodes is None:
            if ends:
                self.record(failure_of_ends(ends, exit_code, self._out_of_memory.rose()))
            return
        nodes.publish("ends", start.restarts, start.node, [asdict(end) for end in ends])
        if not ends or not nodes.is_first("report", start.restarts):
            return
        # A rank that lost its connection says that another has gone: that one's launcher may need a moment.
        are_consequences = all(end.is_consequence for end in ends)
        found = nodes.collect("ends", start.restarts, self.nodes_seconds if are_consequences else 0.0)
        if are_consequences and start.node not in found and endpoint is not None:
            self.record_lost_rendezvous(endpoint)  # the store does not even have what this launcher has published
            return
        every = [RankEnd(**end) for content in found.values() for end in content] or ends
        lost = self.missing_nodes(found) if are_consequences else {}
        if lost and all(end.is_consequence for end in every):
            self.record(failure_of_lost_nodes(dict(lost.values())))
        else:
            self.record(failure_of_ends(every, exit_code, self._out_of_memory.rose()))

    def publish_health(self) -> None:
        """Publish for the other launchers that no rank of this node has failed."""
        if self.start is not None and self.start.nodes is not None:
            self.start.nodes.publish("ends", self.start.restarts, self.start.node, [])

    def record_survivor(self, local_rank: int) -> None:
        """Report that a process does not end although it was killed."""
        start = self.start
        assert start is not None
        pid = start.pids[local_rank]
        text = (
            f"process {pid} does not end after SIGKILL (state {process_state(pid)}): a driver or a file system does "
            "not answer"
        )
        end = self._end_of(start, local_rank, exit_code=1, text=text, cause="hang")
        self.record(failure_of_ends([end], exit_code=1, out_of_memory=False))

    def record_lost_rendezvous(self, endpoint: str) -> None:
        """Report that the launcher with the store of all launchers, at ``endpoint``, has ended."""
        message = f"has lost the rendezvous host {endpoint}: its launcher or the host has ended."
        failure = Failure(
            cause=Cause.NODE_LOST,
            message=f"The launcher on {self.host} {message}",
            exit_code=ExitCode.CRASH,
            host=endpoint.rpartition(":")[0],
        )
        if self.failure is None or self.failure.message != failure.message:
            self.record(failure, replace=False)

    def record_lost_link(self, endpoint: str, seconds: float, limit: float) -> None:
        """Report that the store at ``endpoint`` does not answer this launcher."""
        message = (
            f"The launcher on {self.host} cannot reach the rendezvous host {endpoint}: no answer for {seconds:.1f} s, "
            f"the limit is {limit:.1f} s."
        )
        self.record(Failure(cause=Cause.LINK_LOST, message=message, exit_code=ExitCode.CRASH), replace=False)

    def missing_nodes(self, found: Collection[int]) -> dict[int, tuple[str, list[int]]]:
        """Host and ranks of the nodes that are not among those that were ``found``."""
        start = self.start
        assert start is not None and start.nodes is not None
        hosts = start.nodes.collect("host", start.restarts, 0.0)
        missing = sorted(set(range(start.nodes.count)) - set(found))
        return {
            node: (hosts[node]["host"], hosts[node]["ranks"]) if node in hosts else (f"node {node}", [])
            for node in missing
        }

    def _end(self, start: RankStart, local_rank: int, failure: Any) -> RankEnd:
        """The end of a rank that torch's agent describes by ``failure``."""
        message = failure.message
        info = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        moment = float(failure.timestamp)  # whole seconds
        with suppress(OSError):
            moment = os.stat(failure.error_file).st_mtime_ns * 1e-9
        text = message.get("message") if isinstance(message, dict) else None
        facts = {"cause": info.get("cause"), "is_local": info.get("is_local", True), "time": moment}
        return self._end_of(start, local_rank, exit_code=failure.exitcode, text=text, **facts)

    def _end_of(self, start: RankStart, local_rank: int, **facts: Any) -> RankEnd:
        snapshot = self._heartbeats.read(local_rank)
        position = {} if snapshot is None else snapshot.position()
        return RankEnd(rank=start.ranks[local_rank], local_rank=local_rank, host=self.host, **facts, **position)

    def record(self, failure: Failure, replace: bool = True, what: str = "The attempt failed") -> None:
        """Print and write a report that begins with ``what``; without ``replace``, a report of this attempt by another
        launcher is kept."""
        reported, self.failure = self.failure, failure
        directory, start, note = self.directory(), self.start, ""
        if self.hang_lasts:
            self.failure, replace = reported, False
        if directory is not None and failure.cause != Cause.IN_USE:
            try:
                assert start is not None
                newest = read_failure(directory / FILE) if not replace else None
                if newest is None or newest.get("time", 0.0) < start.started:
                    if start.number is None:
                        start.number = attempt_number(directory, start.started)
                    write_failure(directory, failure, start.number)
                note = f" See {directory / FILE}."
            except OSError as error:
                note = f" {directory / FILE} cannot be written ({error.strerror})."
        print(f"{what} ({failure.cause}). {failure.message}{note}", file=sys.stderr, flush=True)
