"""The attempts of a run: every second of each in one class, and how many failed without a new checkpoint.

    RUN_DIR/attempts.jsonl         one JSON object per finished attempt
    RUN_DIR/current_attempt.json   the attempt under way, replaced every 30 s and after a save

An attempt that finds a record under way of an earlier attempt closes it as "lost": its writer was killed, or the node
has failed. Gaps between attempts are in no record; :func:`account` counts them as idle. Restarts by a launcher and
starts by a scheduler are attempts alike.
"""

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from megatron.errors import ExitCode, NoProgressError
from megatron.operation.heartbeat import STEP_SECTIONS, Section, Snapshot

ATTEMPTS = "attempts.jsonl"
CURRENT = "current_attempt.json"

Outcome = Literal["running", "complete", "stopped", "failed", "lost"]
"""``lost``: nothing has recorded the end of the attempt."""
TimeClass = Literal["start", "load", "step", "save", "evaluation", "data", "lost", "hang", "idle"]
TIME_CLASSES: tuple[TimeClass, ...] = get_args(TimeClass)
"""start: from the start of the processes to the load; load: reading the checkpoint; step: iterations that were kept;
save: the training loop blocked by a save; evaluation; data: waiting for data; lost: iterations that were repeated or
dropped; hang: from the last sign of life to the end, if the watchdog ended the attempt; idle: the end of the processes,
spare ranks, and gaps between attempts."""
FAILURES: frozenset[Outcome] = frozenset({"failed", "lost"})
_MOST_COMMITS = 1000


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt; iterations are None until the attempt has reached them."""

    attempt: int
    """Number of the attempt in this run directory, from 1."""
    start: float
    """Seconds since the epoch."""
    end: float
    """Seconds since the epoch: ``start`` and the duration by a monotonic clock; while it runs, time of the record."""
    outcome: Outcome
    seconds: Mapping[TimeClass, float] = field(default_factory=dict)
    """The sum is ``end - start``."""
    exit_code: int | None = None
    world_size: int = 1
    hosts: tuple[str, ...] = ()
    first_iteration: int | None = None
    """Iteration of the checkpoint from which the attempt started; 0 without one."""
    last_iteration: int | None = None
    """Iterations done at the end."""
    committed_iteration: int | None = None
    """Iteration of the newest checkpoint that this attempt committed."""
    saves: int = 0
    """Checkpoints that this attempt committed."""
    counts_from: int | None = None
    """Iteration of the newest checkpoint in ``--save`` when the attempt began, 0 without one. None for an attempt that
    never counts as one without progress: without ``--save``, stopped on request, refused, or ended without the lock."""
    commits: tuple[tuple[float, int], ...] = ()
    """(seconds since ``start``, iteration) of the checkpoints, thinned to at most 1,000."""
    uncommitted_s: float = 0.0
    """Seconds of class ``step`` after the newest checkpoint: lost if the attempt ends now."""
    dropped_s: float = 0.0
    """Seconds of class ``lost`` that rollbacks within the attempt have dropped."""
    cause: str | None = None
    rank: int | None = None
    host: str | None = None
    """Cause, rank and host of the failure, as in failure.json."""

    @property
    def is_failure(self) -> bool:
        return self.outcome in FAILURES

    @property
    def is_interruption(self) -> bool:
        """Whether the attempt failed, and the same command could continue: not after a wrong flag, for example."""
        return self.is_failure and self.exit_code not in (ExitCode.ACTION_REQUIRED, ExitCode.NO_PROGRESS)

    @property
    def is_without_progress(self) -> bool:
        """Whether the attempt failed before a new checkpoint, and no correction by the user was missing."""
        return self.is_failure and self.exit_code != ExitCode.ACTION_REQUIRED and self.counts_from is not None

    @property
    def wall_s(self) -> float:
        return max(0.0, self.end - self.start)

    def second(self, name: TimeClass) -> float:
        return self.seconds.get(name, 0.0)


_CLASS_OF: Mapping[Section, TimeClass] = {
    Section.START: "start",
    Section.LOAD: "load",
    Section.DATA: "data",
    **dict.fromkeys(STEP_SECTIONS, "step"),
    Section.EVALUATION: "evaluation",
    Section.SAVE: "save",
    Section.SPARE: "idle",
    Section.END: "idle",
}


def measured(attempt: Attempt, snapshot: Snapshot | None, start_ns: int, now_ns: int, is_hang: bool = False) -> Attempt:
    """The attempt as ``snapshot`` of rank 0 shows it; the times are readings of the monotonic clock.

    Every nanosecond from ``start_ns`` to ``now_ns`` is in one class: before the rank attached to its heartbeat it is
    ``start``, and the time since the last sign of life belongs to the open section, or to ``hang``.
    """
    seconds: dict[TimeClass, float] = dict.fromkeys(TIME_CLASSES, 0.0)
    end = attempt.start + (now_ns - start_ns) / 1e9
    if snapshot is None:
        seconds["start"] = (now_ns - start_ns) / 1e9
        return replace(attempt, end=end, seconds=seconds)
    for section, nanoseconds in snapshot.section_ns.items():
        seconds[_CLASS_OF[section]] += nanoseconds / 1e9
    attached_ns = max(start_ns, snapshot.attached_ns)
    seconds["start"] += (attached_ns - start_ns) / 1e9
    # The rest, and not the time since it was entered: a rank may be killed between the writes of two words.
    open_s = (now_ns - attached_ns - sum(snapshot.section_ns.values())) / 1e9
    seconds["hang" if is_hang else _CLASS_OF[snapshot.section]] += open_s
    dropped_s = min(snapshot.dropped_ns / 1e9, seconds["step"])
    seconds["step"] -= dropped_s
    seconds["lost"] += dropped_s
    return replace(
        attempt,
        end=end,
        seconds=seconds,
        first_iteration=snapshot.first_iteration,
        last_iteration=snapshot.done_iteration,
        committed_iteration=snapshot.committed_iteration,
        saves=snapshot.saves,
        uncommitted_s=max(0.0, seconds["step"] - snapshot.step_ns_at_commit / 1e9),
        dropped_s=dropped_s,
    )


def ended(attempt: Attempt, outcome: Outcome, exit_code: int | None = None) -> Attempt:
    """The attempt after its end, without the iterations that no checkpoint holds."""
    attempt = replace(attempt, outcome=outcome, exit_code=exit_code)
    is_saved = attempt.committed_iteration is not None and attempt.committed_iteration == attempt.last_iteration
    if outcome == "complete" or (outcome == "stopped" and is_saved):
        return replace(attempt, uncommitted_s=0.0)  # the rest of the last iteration, after the copy of its state
    return lose_uncommitted(attempt)


def lose_uncommitted(attempt: Attempt) -> Attempt:
    """The attempt with its steps after the newest checkpoint in class ``lost``."""
    lost = min(attempt.uncommitted_s, attempt.second("step"))
    seconds: dict[TimeClass, float] = {**attempt.seconds}
    seconds["step"], seconds["lost"] = attempt.second("step") - lost, attempt.second("lost") + lost
    return replace(attempt, seconds=seconds, uncommitted_s=0.0)


def with_commit(attempt: Attempt, now_s: float, iteration: int) -> Attempt:
    commits = (*attempt.commits, (round(now_s, 1), iteration))
    return replace(attempt, commits=commits if len(commits) <= _MOST_COMMITS else commits[1::2])


def to_json(attempt: Attempt) -> str:
    record = asdict(attempt)
    record["seconds"] = {name: round(attempt.second(name), 3) for name in TIME_CLASSES}
    record |= {name: round(record[name], 3) for name in ("start", "end", "uncommitted_s", "dropped_s")}
    return json.dumps(record, allow_nan=False)


def from_json(text: str) -> Attempt | None:
    """The attempt of a line; None for a damaged one. Unknown fields are dropped."""
    try:
        found = json.loads(text)
        known = {item.name: found[item.name] for item in fields(Attempt) if item.name in found}
        known["seconds"] = {name: float(found["seconds"][name]) for name in TIME_CLASSES if name in found["seconds"]}
        known["hosts"] = tuple(str(host) for host in known.get("hosts", ()))
        known["commits"] = tuple((float(moment), int(iteration)) for moment, iteration in known.get("commits", ()))
        one = Attempt(**known)
        numbers = (one.attempt, one.start, one.end, one.world_size, one.saves, one.uncommitted_s)
        iterations = (one.first_iteration, one.last_iteration, one.committed_iteration, one.counts_from)
        is_valid = all(isinstance(number, int | float) for number in numbers) and one.outcome in get_args(Outcome)
        return one if is_valid and all(isinstance(number, int | None) for number in iterations) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_attempts(directory: Path) -> list[Attempt]:
    """The finished attempts, by their start; damaged lines (a torn last one) are left out."""
    try:
        lines = (directory / ATTEMPTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = [attempt for line in lines if (attempt := from_json(line)) is not None]
    return sorted(found, key=lambda attempt: attempt.start)


def read_current(directory: Path) -> Attempt | None:
    """The attempt under way, or one whose end nothing has recorded."""
    try:
        return from_json((directory / CURRENT).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def append_attempt(directory: Path, attempt: Attempt) -> None:
    """Append a line to attempts.jsonl; raises :class:`OSError`."""
    append_line(directory / ATTEMPTS, to_json(attempt))


def append_line(path: Path, text: str) -> None:
    """Append a line with one write, because several processes may share the file, and wait until it is on the disk;
    raises :class:`OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        # A line that a crash has torn must not swallow this one.
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, ("\n" * is_torn + text + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_current(directory: Path, attempt: Attempt) -> None:
    """Replace current_attempt.json; raises :class:`OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / CURRENT, to_json(attempt) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step: a reader finds the old text or the new one. Raises :class:`OSError`."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def remove_current(directory: Path) -> None:
    with suppress(OSError):
        (directory / CURRENT).unlink(missing_ok=True)


def close_lost_attempt(directory: Path) -> None:
    """Close the record under way that an earlier attempt has left, as lost. Raises :class:`OSError`."""
    left = read_current(directory)  # None: damaged
    if left is not None and left.attempt not in {attempt.attempt for attempt in read_attempts(directory)}:
        append_attempt(directory, lose_uncommitted(replace(left, outcome="lost")))
    remove_current(directory)


def newest_run(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts of the newest run in a directory: a run from the start after a complete one is another run."""
    begin = after_complete = 0
    for index, attempt in enumerate(attempts):
        if attempt.first_iteration == 0:
            begin = after_complete
        if attempt.outcome == "complete":
            after_complete = index + 1
    return list(attempts[begin:])


def history(directory: Path, before: float) -> list[Attempt]:
    """All attempts of the run that ended before ``before`` (seconds since the epoch), also one that is not closed."""
    current, finished = read_current(directory), read_attempts(directory)  # in this order: it may be closed meanwhile
    is_left = current is not None and current.end < before and all(current.attempt != one.attempt for one in finished)
    if current is not None and is_left:
        finished.append(lose_uncommitted(replace(current, outcome="lost")))
    return finished


def failures_without_progress(attempts: Iterable[Attempt], newest_iteration: int) -> int:
    """The newest consecutive attempts that began at the checkpoint of ``newest_iteration`` (0: none) and failed.

    A complete or stopped attempt is not counted and, without a new checkpoint, does not reset the count.
    """
    failed = 0
    for attempt in sorted(attempts, key=lambda one: -one.attempt):
        if attempt.saves or attempt.counts_from not in (None, newest_iteration):
            break
        failed += attempt.is_without_progress
    return failed


def check_progress(directory: Path, before: float, newest_iteration: int, limit: int) -> None:
    """Raise :class:`NoProgressError` if ``limit`` attempts in a row, which ended ``before`` now, brought nothing."""
    failed = failures_without_progress(history(directory, before), newest_iteration)
    if failed >= limit:
        where = f"at iteration {newest_iteration}" if newest_iteration else "without a checkpoint"
        raise NoProgressError(
            f"{failed} consecutive attempts started {where} and ended without a new checkpoint (--max-failed-attempts "
            f"{limit}): find the cause in their logs, then start once with a larger --max-failed-attempts, or with 0."
        )


def settle(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts, with their steps in ``step`` or ``lost`` by where later attempts began.

    A later attempt can begin elsewhere than at the newest checkpoint that the record of an attempt knows: a save was
    completed by the background writer after the crash; the newest checkpoint was damaged; the user or a rollback went
    back to an older one. Seconds are then divided in proportion to iterations.
    """
    settled: list[Attempt] = []
    first_later: int | None = None
    for attempt in reversed(attempts):
        settled.append(attempt if first_later is None else _kept_until(attempt, first_later))
        begun = [number for number in (attempt.first_iteration, first_later) if number is not None]
        first_later = min(begun, default=None)
    return settled[::-1]


def _kept_until(attempt: Attempt, iteration: int) -> Attempt:
    """The attempt when the iterations after ``iteration`` were repeated."""
    first, last = attempt.first_iteration, attempt.last_iteration
    if first is None or last is None or last <= first or iteration == attempt.committed_iteration:
        return attempt
    if attempt.committed_iteration is None and iteration == first:
        return attempt
    trained = attempt.second("step") + attempt.second("lost") - attempt.dropped_s
    kept = trained * max(0, min(iteration, last) - first) / (last - first)
    seconds: dict[TimeClass, float] = {**attempt.seconds}
    seconds["step"], seconds["lost"] = kept, trained - kept + attempt.dropped_s
    return replace(attempt, seconds=seconds)


def gaps(attempts: Iterable[Attempt]) -> list[float]:
    """Idle seconds between each attempt and the next one; a run that was complete was not interrupted."""
    return [
        0.0 if before.outcome == "complete" else max(0.0, after.start - before.end)
        for before, after in pairwise(attempts)
    ]


@dataclass(frozen=True)
class RunTime:
    """The time of a run so far."""

    seconds: Mapping[TimeClass, float]
    """Over all attempts; ``idle`` includes the gaps between them."""

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def effective_time(self) -> float | None:
        """The share of the wall time in iterations that were kept; None before the first second."""
        return self.seconds["step"] / self.wall_s if self.wall_s > 0 else None


def account(attempts: Sequence[Attempt]) -> RunTime:
    """Seconds by class of the whole run."""
    settled = settle(attempts)
    seconds: dict[TimeClass, float] = {name: sum(attempt.second(name) for attempt in settled) for name in TIME_CLASSES}
    seconds["idle"] += sum(gaps(settled))
    return RunTime(seconds)


class EffectiveTimeMeter:
    """The effective time of a run so far, on rank 0 of the attempt under way; steps that no checkpoint holds yet count.

    ``start`` (seconds since the epoch) and ``start_ns`` (monotonic clock) are the start of this process.
    """

    def __init__(self, directory: Path, start: float, start_ns: int) -> None:
        self._directory, self._start_ns = directory, start_ns
        self._attempt = Attempt(attempt=0, start=start, end=start, outcome="running")
        # First iteration of this attempt, on which it depends what earlier ones kept; their seconds of wall time, with
        # the gap before this attempt, and in kept steps.
        self._earlier: tuple[int | None, float, float] | None = None

    def read(self, snapshot: Snapshot, now_ns: int) -> float | None:
        """The effective time at ``now_ns``, of which ``snapshot`` is."""
        wall_s, step_s = self.seconds(snapshot, now_ns)
        return step_s / wall_s if wall_s > 0 else None

    def seconds(self, snapshot: Snapshot, now_ns: int) -> tuple[float, float]:
        """Wall time of all attempts so far with the gaps between them, and the part of it in kept steps."""
        own = measured(self._attempt, snapshot, self._start_ns, now_ns)
        if self._earlier is None or self._earlier[0] != own.first_iteration:
            total = account(newest_run([*history(self._directory, before=own.start), own]))
            self._earlier = (own.first_iteration, total.wall_s - own.wall_s, total.seconds["step"] - own.second("step"))
        _, wall_s, step_s = self._earlier
        return wall_s + own.wall_s, step_s + own.second("step")
