"""Writers of the records of attempts (:mod:`megatron.operation.attempts`): in the launcher, or on rank 0 without one.

An error of the file system does not end a run: it is reported once, and every later write is tried.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.errors import ExitCode
from megatron.operation.attempts import (
    Attempt,
    Outcome,
    append_attempt,
    close_lost_attempt,
    ended,
    measured,
    read_attempts,
    read_current,
    remove_current,
    with_commit,
    write_current,
)
from megatron.operation.causes import Cause
from megatron.operation.failure import FILE, read_failure
from megatron.operation.heartbeat import Heartbeat, HeartbeatMemory, RunSettings, Snapshot
from megatron.operation.lease import THIS_HOST

# Seconds between two writes of the record of the attempt under way.
WRITE_SECONDS = 30.0
# Seconds between two looks at the heartbeat.
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Beginning:
    """When an attempt began, by both clocks."""

    epoch: float
    monotonic_ns: int

    @classmethod
    def now(cls, age_s: float = 0.0) -> "Beginning":
        """``age_s`` seconds ago."""
        return cls(time.time() - age_s, time.monotonic_ns() - round(age_s * 1e9))


@dataclass(frozen=True)
class FailureFacts:
    """What the record of an attempt has of its failure, as far as it is known."""

    cause: str | None = None
    rank: int | None = None
    host: str | None = None

    @property
    def is_hang(self) -> bool:
        """Whether the watchdog ended the attempt, so that the time since the last sign of life is a hang."""
        return self.cause in (Cause.HANG, Cause.STOPPED_PROCESS)


def reported_failure(directory: Path, since: float) -> FailureFacts | None:
    """The failure in RUN_DIR/failure.json, if it is not older than ``since`` (seconds since the epoch)."""
    found = read_failure(directory / FILE) or {}
    moment, kinds = found.get("time"), {"cause": str, "rank": int, "host": str}
    if not isinstance(moment, int | float) or moment < since:
        return None
    return FailureFacts(**{name: found[name] for name, kind in kinds.items() if isinstance(found.get(name), kind)})


def outcome_of(exit_codes: Iterable[int]) -> Outcome:
    codes = set(exit_codes)
    if codes <= {ExitCode.COMPLETE}:
        return "complete"
    return "stopped" if codes <= {ExitCode.COMPLETE, ExitCode.STOPPED} else "failed"


class AttemptRecorder:
    """Writes the record of one attempt, and closes one that an earlier attempt has left.

    Without ``has_lock``, the lock of the directories of the run, it only appends the record at the end: the record
    under way may be of another run, which holds the lock.
    """

    def __init__(
        self,
        directory: Path,
        beginning: Beginning,
        world_size: int,
        hosts: Sequence[str],
        warn: Callable[[str], None],
        has_lock: bool = True,
        counts_from: int | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``now_ns`` reads the monotonic clock; the others are fields of the record."""
        self._directory, self._beginning, self._warn, self._has_lock = directory, beginning, warn, has_lock
        self._now_ns = now_ns
        self._has_warned = False
        self._written = -WRITE_SECONDS
        if has_lock:
            self._try(lambda: close_lost_attempt(directory))
        current = read_current(directory)
        recorded = [*read_attempts(directory), *([] if current is None else [current])]
        number = max((attempt.attempt for attempt in recorded), default=0) + 1
        self.attempt = Attempt(
            attempt=number,
            start=beginning.epoch,
            end=beginning.epoch,
            outcome="running",
            world_size=world_size,
            hosts=tuple(hosts),
            counts_from=counts_from,
        )
        self.update(None)

    def update(self, snapshot: Snapshot | None, is_due: bool = False) -> None:
        """Write the record if it is due: every 30 s, and after a save."""
        now = self._now_ns()
        is_due = is_due or now / 1e9 - self._written >= WRITE_SECONDS
        has_saved = snapshot is not None and snapshot.saves > self.attempt.saves
        if not self._has_lock or not (is_due or has_saved):
            return
        self._measure(snapshot, now)
        self._written = now / 1e9
        self._try(lambda: write_current(self._directory, self.attempt))

    def set_counts_from(self, iteration: int | None, snapshot: Snapshot | None) -> None:
        """Change :attr:`Attempt.counts_from`, also in the file."""
        if self.attempt.counts_from != iteration:
            self.attempt = replace(self.attempt, counts_from=iteration)
            self.update(snapshot, is_due=True)

    def finish(
        self,
        snapshot: Snapshot | None,
        outcome: Outcome,
        exit_code: int | None,
        failure: FailureFacts | None = None,
        ended_ns: int | None = None,
    ) -> None:
        """Append the record to attempts.jsonl. The attempt ended now, or at ``ended_ns`` of the monotonic clock."""
        failure = failure or FailureFacts()
        self._measure(snapshot, self._now_ns() if ended_ns is None else ended_ns, failure.is_hang)
        facts = replace(self.attempt, cause=failure.cause, rank=failure.rank, host=failure.host)
        self.attempt = ended(facts, outcome, exit_code)
        self._try(lambda: append_attempt(self._directory, self.attempt))
        if self._has_lock:
            remove_current(self._directory)

    def _measure(self, snapshot: Snapshot | None, now_ns: int, is_hang: bool = False) -> None:
        attempt = self.attempt
        if snapshot is not None and snapshot.committed_iteration is not None and snapshot.saves > attempt.saves:
            since_start = (now_ns - self._beginning.monotonic_ns) / 1e9
            attempt = with_commit(attempt, since_start, snapshot.committed_iteration)
        self.attempt = measured(attempt, snapshot, self._beginning.monotonic_ns, now_ns, is_hang)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._has_warned:
                self._warn(f"The time of this attempt is not recorded in {self._directory}: {error}")
            self._has_warned = True


class LaunchedAttempts:
    """Records the attempts of the ranks of a node, if rank 0 is among them.

    ``run_dir`` is the run directory as far as the launcher knows it from the command line.
    """

    def __init__(self, memory: HeartbeatMemory, run_dir: Path | None, warn: Callable[[str], None]) -> None:
        self._memory, self._run_dir, self._warn = memory, run_dir, warn
        self._beginning = Beginning.now()
        self._world_size = 1
        # Local rank of rank 0 in the attempt under way.
        self._local_rank: int | None = None
        # The last snapshot of rank 0 in the attempt under way.
        self._seen: Snapshot | None = None
        self._is_stopping = False
        self._recorder: AttemptRecorder | None = None
        self._polled = 0.0

    def begin(self, global_ranks: Sequence[int], world_size: int, beginning: Beginning) -> None:
        """The ranks of this node have been started; ``global_ranks`` by local rank."""
        self._recorder, self._beginning, self._world_size, self._seen = None, beginning, world_size, None
        self._local_rank, self._is_stopping = global_ranks.index(0) if 0 in global_ranks else None, False

    def poll(self) -> None:
        """Write the record if it is due; call it often."""
        if self._local_rank is None:
            return
        self._notice_restart(self._local_rank)
        now = time.monotonic()
        if now - self._polled < POLL_SECONDS:
            return
        self._polled = now
        self._open(self._local_rank)
        if self._recorder is not None:
            self._recorder.update(self._memory.read(self._local_rank))

    def end(self, outcome: Outcome, exit_code: int | None) -> None:
        """The ranks have ended, and failure.json is written; a second call for the same attempt does nothing."""
        local_rank, self._local_rank = self._local_rank, None
        if local_rank is None:
            return
        self._open(local_rank)
        # Without the lock: not a misspelled flag, an evaluation, or a run that another one keeps out.
        if self._recorder is None and outcome == "failed" and exit_code != ExitCode.ACTION_REQUIRED:
            self._recorder = self._record(hosts=(socket.gethostname(),), has_lock=False)
        if self._recorder is not None and self._run_dir is not None:
            failure = reported_failure(self._run_dir, self._beginning.epoch) if outcome == "failed" else None
            self._recorder.finish(self._memory.read(local_rank), outcome, exit_code, failure)

    def stop_requested(self) -> None:
        """A signal stops the attempt under way, so it never counts as failed, even if it is killed before its end."""
        self._is_stopping = True
        if self._local_rank is not None:
            self._open(self._local_rank)

    def _notice_restart(self, local_rank: int) -> None:
        """End the record, and begin another, if the ranks have restarted in process (``--inprocess-restart``)."""
        seen, snapshot = self._seen, self._memory.read(local_rank)
        if snapshot is None:
            return
        self._seen = snapshot
        if seen is None or seen.attached_ns == snapshot.attached_ns:
            return
        self._open(local_rank)
        if self._recorder is not None and self._run_dir is not None:
            failure = reported_failure(self._run_dir, self._beginning.epoch)
            self._recorder.finish(seen, "failed", ExitCode.CRASH, failure, snapshot.attached_ns)
        age_s = (time.monotonic_ns() - snapshot.attached_ns) / 1e9
        self._recorder, self._beginning = None, Beginning.now(age_s)
        self._open(local_rank)

    def _open(self, local_rank: int) -> None:
        """Begin the record when rank 0 has written the hosts of the run, which it does when it holds the lock."""
        settings = RunSettings.from_json(self._memory.settings(local_rank))
        if settings is None:
            return
        self._run_dir = None if settings.run_dir is None else Path(settings.run_dir)
        if self._recorder is None and settings.hosts:
            self._recorder = self._record(settings.hosts, has_lock=True)
        if self._recorder is not None:
            # Again at every call: the settings stay when the ranks restart in process, and are replaced then.
            counts_from = None if self._is_stopping else settings.counts_from
            self._recorder.set_counts_from(counts_from, self._memory.read(local_rank))

    def _record(self, hosts: Sequence[str], has_lock: bool) -> AttemptRecorder | None:
        if self._run_dir is None:
            return None
        return AttemptRecorder(self._run_dir, self._beginning, self._world_size, hosts, self._warn, has_lock)


class RecorderThread:
    """Updates a record on rank 0 without a launcher, also while the main thread is busy."""

    def __init__(self, recorder: AttemptRecorder, heartbeat: Heartbeat) -> None:
        self._recorder, self._heartbeat = recorder, heartbeat
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attempt record", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            self._recorder.update(self._heartbeat.snapshot())

    def finish(self, outcome: Outcome, exit_code: int | None, failure: FailureFacts | None) -> None:
        self._is_over.set()
        self._thread.join()
        self._recorder.finish(self._heartbeat.snapshot(), outcome, exit_code, failure)


def process_age_s() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    with suppress(OSError, ValueError, AttributeError):
        started = int(THIS_HOST.start_of("self")[1]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    return 0.0
