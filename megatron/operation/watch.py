"""The launcher's view of its ranks: it decides that they hang, and records why an attempt failed.

Several nodes: the launcher that decides first asks the others for what they know of their ranks, through the shared
store, and waits for them for a limited time.
"""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.config.operation import OperationConfig
from megatron.operation.causes import Cause, OutOfMemoryKills
from megatron.operation.culprit import Evidence, failure_of_hang, find_culprit
from megatron.operation.evidence import (
    BACKGROUND_WRITER,
    ENDED,
    HELPER,
    STOPPED,
    UNINTERRUPTIBLE,
    child_processes,
    context_switches,
    main_stack,
    num_threads,
    parse_stacks,
    process_state,
    request_stacks,
    transferred_bytes,
)
from megatron.operation.failure import (
    FILE,
    Failure,
    RankEnd,
    attempt_number,
    failure_of_ends,
    failure_of_lost_link,
    failure_of_lost_nodes,
    failure_of_lost_rendezvous,
    position,
    read_failure,
    write_failure,
)
from megatron.operation.hang import command_key, longest_stays, write_stays
from megatron.operation.heartbeat import HeartbeatMemory, RunSettings, run_directory_in
from megatron.operation.nodes import Nodes
from megatron.operation.watchdog import Limits, Overrun, Processes, Watchdog

SCRIPTS = ("pretrain_llama.py", "megatron.commands.pretrain_llama")
"""A script, or a module after ``-m``, whose ranks have heartbeats."""
NODES_SECONDS = 5.0
"""Time for the other launchers to say what they know of their ranks."""
_DECISION_SECONDS = 15.0
"""Time for the first launcher to decide, after which another one decides alone."""
BEAT_SECONDS = 5.0
"""Between two signs of life of a launcher, which the launcher of the first node reads."""
LOST_SECONDS = 45.0
"""A launcher without a sign of life for so long is gone."""
_STAYS_SECONDS = 30.0
"""Between two writes of what the ranks' stays teach."""
_OVER = "over"
"""Last sign of life of a launcher, in an attempt that ends."""
_LEAST_SILENCE = 15.0
"""Seconds of silence of the store that mean nothing: torch needs as long to notice a lost node."""
_LOCK_SECONDS = 0.3
"""For so long the wait for the interpreter's lock is observed."""
_LOCK_RATES = 20.0, 400.0
"""Context switches per second of a thread that waits for the lock: it wakes up every 5 ms."""


@dataclass
class _Attempt:
    """One start of the ranks of this node."""

    ranks: Mapping[int, int]
    """Global rank by local rank."""
    pids: Mapping[int, int]
    """Process by local rank."""
    watchdog: Watchdog
    nodes: Nodes | None
    node: int
    restarts: int
    key: str
    """Of the command, for :mod:`megatron.operation.hang`."""
    stays_at: float
    """When :attr:`stays` were written last; before that, when the attempt began."""
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    number: int | None = None
    """In the run directory, from the first report."""
    settings: dict[int, RunSettings] = field(default_factory=dict)
    """By local rank, of the ranks that have written them."""
    sample_at: float = 0.0
    exceeded_at: float | None = None
    """When a rank of this node exceeded its limit, while another launcher decides."""
    has_published: bool = False
    reported_at: float | None = None
    """When a hang was reported that lasts, with ``--on-hang report``."""
    hangs: int = 0
    """Hangs that are over."""
    beat_at: float = 0.0
    beats: dict[int, tuple[str, float]] = field(default_factory=dict)
    """By node: its last sign of life, and when it was first read."""
    others_wait: bool = False
    """Whether a rank of any node waited for storage at the last sign of life."""
    stays: Mapping[str, float] = field(default_factory=dict)
    """As written last."""

    @property
    def topic(self) -> str:
        """Of the hang that may come, between launchers."""
        return f"hang{self.hangs or ''}"


class RankWatch:
    """Watches the ranks of a node, whose script has the arguments ``words``."""

    def __init__(
        self,
        heartbeats: HeartbeatMemory,
        words: Sequence[str],
        now_ns: Callable[[], int] = time.monotonic_ns,
        nodes_seconds: float = NODES_SECONDS,
    ) -> None:
        """``now_ns`` reads the monotonic clock; ``nodes_seconds`` is the time for the other launchers to say what they
        know of their ranks."""
        self._heartbeats = heartbeats
        self._now_ns = now_ns
        self._nodes_seconds = nodes_seconds
        self._words = words
        self._has_heartbeats = any(os.path.basename(word) in SCRIPTS for word in words)
        self._host = socket.gethostname()
        self._out_of_memory = OutOfMemoryKills()
        self._attempt: _Attempt | None = None
        self._run_dir = run_directory_in(words)
        """As far as the launcher knows it before the ranks write their settings."""
        self.failure: Failure | None = None
        """Why the last attempt failed; None if it did not, or if another launcher records it."""

    def start(
        self,
        ranks: Sequence[int],
        world_size: int,
        pids: Mapping[int, int],
        nodes: Nodes | None,
        node: int,
        restarts: int,
    ) -> None:
        """The ``ranks`` of a new attempt have started, here by local rank, with these processes."""
        limits = Limits.of_flags(OperationConfig(), None)
        start = _number_after("--hang-limit-start-s", self._words)
        limits = limits if start is None else Limits(start=start)
        key = command_key(self._words, world_size)
        watchdog = Watchdog(len(ranks), self._now_ns(), limits, longest_stays(self._run_dir, key))
        self._attempt = _Attempt(dict(enumerate(ranks)), pids, watchdog, nodes, node, restarts, key, self._now())
        self._out_of_memory.rose()  # since now
        self.failure = None
        if nodes is not None:
            nodes.publish("host", restarts, node, {"host": self._host, "ranks": list(ranks)})

    def _now(self) -> float:
        return self._now_ns() * 1e-9

    # --- ranks that hang -------------------------------------------------------------------------------------

    def find_hang(self, ended: Collection[int]) -> Failure | None:
        """The failure, if a rank hangs; call it often. ``ended`` are the local ranks that no longer run."""
        attempt, now = self._attempt, self._now()
        if attempt is None or now < attempt.sample_at:
            return None
        self._read_settings(attempt)
        overruns = self._sample(attempt, ended)
        attempt.sample_at = now + attempt.watchdog.period()
        if overruns or now - attempt.stays_at > _STAYS_SECONDS:
            attempt.stays_at = now
            self._write_stays(attempt)
        if not self._reports_only:
            return self._hang_among(attempt, overruns, ended, now)
        if not overruns and not attempt.watchdog.stuck(self._now_ns()):
            self._end_hang(attempt, now)
        if attempt.reported_at is None:
            attempt.reported_at = None if self._hang_among(attempt, overruns, ended, now) is None else now
        elif attempt.nodes is not None:
            self._find_lost_nodes(attempt, attempt.nodes, now)  # this launcher still gives signs of life
        return None

    @property
    def _reports_only(self) -> bool:
        """Whether a hang is reported, and nothing is ended (``--on-hang report``)."""
        settings = self._attempt.settings if self._attempt is not None else {}
        given = next((one.operation.on_hang for one in settings.values()), None)
        return (given or _word_after("--on-hang", self._words)) == "report"

    def _end_hang(self, attempt: _Attempt, now: float) -> None:
        """All ranks of this node make progress: a hang that was reported is over, and the next one is another."""
        if attempt.reported_at is not None:
            seconds = now - attempt.reported_at
            print(f"The ranks go on, {seconds:.0f} s after the report of a hang.", file=sys.stderr, flush=True)
        if attempt.reported_at is not None or attempt.has_published:
            attempt.hangs += 1
            attempt.reported_at = attempt.exceeded_at = self.failure = None
            attempt.has_published = False

    def _hang_among(
        self, attempt: _Attempt, overruns: Sequence[Overrun], ended: Collection[int], now: float
    ) -> Failure | None:
        """The hang that this launcher reports, if there is one."""
        if attempt.nodes is not None:
            lost = self._find_lost_nodes(attempt, attempt.nodes, now)
            return lost or self._find_hang_with_others(attempt, attempt.nodes, overruns, ended)
        return self._decide(overruns[0], self._evidence(attempt, ended)) if overruns else None

    def _find_hang_with_others(
        self, attempt: _Attempt, nodes: Nodes, overruns: Sequence[Overrun], ended: Collection[int]
    ) -> Failure | None:
        """The first launcher whose rank exceeds its limit decides; the others publish what they know."""
        if overruns and attempt.exceeded_at is None:
            attempt.exceeded_at = self._now()
        if attempt.has_published:
            # The ranks are ended when the first launcher requests a restart. Unless it does not:
            is_late = attempt.exceeded_at is not None and self._now() - attempt.exceeded_at > _DECISION_SECONDS
            return self._decide(overruns[0], self._evidence(attempt, ended)) if overruns and is_late else None
        if overruns and nodes.is_first(attempt.topic, attempt.restarts):
            return self._decide(overruns[0], self._evidence_of_all(attempt, ended, nodes))
        if overruns or nodes.has_started(attempt.topic, attempt.restarts):
            self._publish_evidence(attempt, ended, nodes)
        return None

    def _find_lost_nodes(self, attempt: _Attempt, nodes: Nodes, now: float) -> Failure | None:
        """Give a sign of life. The first launcher reads those of the others, and decides that one is gone."""
        if now < attempt.beat_at or not attempt.watchdog.limits.step:
            return None
        period = min(BEAT_SECONDS, 5.0 * attempt.watchdog.period())
        # After a pause of this launcher, the others have as long as at the start.
        was_paused = now - attempt.beat_at > BEAT_SECONDS
        attempt.beat_at = now + period
        nodes.beat(attempt.restarts, attempt.node, f"{now} {int(attempt.watchdog.waits_for_storage)}")
        attempt.others_wait = nodes.is_waiting(attempt.restarts)
        if attempt.node:
            return None
        beats = nodes.beats(attempt.restarts)
        nodes.set_waiting(attempt.restarts, any(text.endswith(" 1") for text in beats.values()))
        if was_paused:
            attempt.beats = {}
        silent = []
        for node in range(nodes.count):
            text, since = beats.get(node, ""), attempt.beats.get(node)
            if since is None or since[0] != text:
                attempt.beats[node] = text, now
            elif text != _OVER and now - since[1] > LOST_SECONDS:
                silent.append(node)
        if not silent or not nodes.is_first(attempt.topic, attempt.restarts):
            return None
        return self._record_lost_nodes(attempt, nodes, set(range(nodes.count)) - set(silent), is_hang=True)

    def have_nodes_left(self, members: Collection[int] | None) -> bool:
        """Whether a node is not among the ``members`` of the rendezvous any more, and no launcher has said why: it is
        lost. The first launcher that notices it records it, and requests a restart."""
        attempt = self._attempt
        if attempt is None or attempt.nodes is None or members is None or attempt.nodes.count == len(members):
            return False
        nodes = attempt.nodes
        if nodes.stops_for_join() or nodes.must_restart(attempt.restarts):
            return False  # said before it left
        if nodes.is_first("report", attempt.restarts):
            self._record_lost_nodes(attempt, nodes, members)
        nodes.restart(attempt.restarts)
        return True

    def leave(self) -> None:
        """This launcher ends its ranks, or waits for their end: it gives no further signs of life."""
        attempt = self._attempt
        if attempt is None:
            return
        self._write_stays(attempt)
        if attempt.nodes is not None:
            attempt.nodes.beat(attempt.restarts, attempt.node, _OVER)

    def _publish_evidence(self, attempt: _Attempt, ended: Collection[int], nodes: Nodes) -> list[Evidence]:
        attempt.has_published = True
        own = self._evidence(attempt, ended)
        nodes.publish(attempt.topic, attempt.restarts, attempt.node, [one.to_json() for one in own])
        return own

    def _read_settings(self, attempt: _Attempt) -> None:
        for local_rank in attempt.ranks:
            if local_rank not in attempt.settings:
                found = RunSettings.from_json(self._heartbeats.settings(local_rank))
                if found is not None:
                    attempt.settings[local_rank] = found
                    attempt.watchdog.limits = Limits.of_flags(found.operation, found.dataloader_timeout)

    def _sample(self, attempt: _Attempt, ended: Collection[int]) -> list[Overrun]:
        snapshots = [self._heartbeats.read(local_rank) for local_rank in sorted(attempt.ranks)]
        now_ns, watchdog = self._now_ns(), attempt.watchdog
        processes = {rank: _processes(attempt.pids[rank]) for rank in watchdog.stuck(now_ns) if rank not in ended}
        overruns = watchdog.sample(now_ns, snapshots, processes, attempt.others_wait)
        return [
            one
            for one in overruns
            if one.local_rank not in ended and (self._has_heartbeats or snapshots[one.local_rank] is not None)
        ]

    def _write_stays(self, attempt: _Attempt) -> None:
        """The launcher of rank 0 writes what its ranks teach the next attempt."""
        directory, stays = self._directory(), attempt.watchdog.stays(self._now_ns())
        if directory is None or 0 not in attempt.ranks.values() or not stays:
            return
        if any(seconds > 1.1 * attempt.stays.get(label, -1.0) for label, seconds in stays.items()):
            attempt.stays = stays
            with suppress(OSError):  # nothing is learned
                write_stays(directory, attempt.key, attempt.name, stays)

    def _decide(self, overrun: Overrun, evidence: Sequence[Evidence]) -> Failure:
        failure = failure_of_hang(find_culprit(evidence), evidence, overrun.seconds, overrun.limit)
        self._record(failure, is_hang=True)
        return failure

    def _evidence_of_all(self, attempt: _Attempt, ended: Collection[int], nodes: Nodes) -> list[Evidence]:
        own = self._publish_evidence(attempt, ended, nodes)
        found = nodes.collect(attempt.topic, attempt.restarts, self._nodes_seconds)
        others = [Evidence.from_json(one) for node, content in found.items() if node != attempt.node for one in content]
        # A launcher that already ends its ranks says no more.
        ending = {node for node, text in nodes.beats(attempt.restarts).items() if text == _OVER}
        for node, (host, ranks) in self._missing_nodes(attempt, nodes, found.keys() | ending).items():
            print(f"The launcher of node {node} ({host}) does not answer.", file=sys.stderr, flush=True)
            others += [_evidence_of_lost(rank, host) for rank in ranks]
        return sorted([*own, *others], key=lambda one: one.rank)

    def _evidence(self, attempt: _Attempt, ended: Collection[int]) -> list[Evidence]:
        """What is known of the ranks of this node that still run."""
        pids = {rank: pid for rank, pid in attempt.pids.items() if rank not in ended}
        before = {rank: (process_state(pid), context_switches(pid)) for rank, pid in pids.items()}
        began = time.monotonic()
        files = {}
        for rank in pids:
            path = self._heartbeats.settings(rank).get("stacks")
            if path is not None and (before[rank][0] or "Z") not in STOPPED + ENDED:
                files[rank] = path
        texts = request_stacks(files, pids)
        time.sleep(max(0.0, _LOCK_SECONDS - (time.monotonic() - began)))
        seconds = time.monotonic() - began
        evidence = []
        for rank, pid in pids.items():
            state, (state_before, switches) = process_state(pid), before[rank]
            if state == UNINTERRUPTIBLE and state_before != UNINTERRUPTIBLE:
                state = state_before  # a short wait for a disk is no evidence
            rate = (context_switches(pid) - switches) / seconds
            stacks = parse_stacks(texts.get(rank, ""))
            snapshot = self._heartbeats.read(rank)
            evidence.append(
                Evidence(
                    rank=attempt.ranks[rank],
                    local_rank=rank,
                    host=self._host,
                    pid=pid,
                    seconds=0.0 if snapshot is None else (self._now_ns() - snapshot.entered_ns) * 1e-9,
                    collectives=None if snapshot is None else snapshot.collectives,
                    state=state,
                    children=tuple(one for one in child_processes(pid) if one.state in STOPPED + UNINTERRUPTIBLE),
                    stack=main_stack(stacks),
                    waits_for_lock=_LOCK_RATES[0] <= rate <= _LOCK_RATES[1] and num_threads(pid) > 1,
                    **({"section": "start"} if snapshot is None else position(snapshot)),
                )
            )
        return evidence

    # --- ranks that ended ------------------------------------------------------------------------------------

    def record_ends(
        self, failures: Mapping[int, Any], first: Collection[int], exit_code: int, endpoint: str | None = None
    ) -> None:
        """Record an attempt in which ranks failed.

        ``failures`` are torch's, by local rank; ``first`` the local ranks that had failed when the launcher noticed it,
        before it ended the others. ``endpoint`` is the rendezvous host with its port.
        """
        attempt = self._attempt
        if attempt is None:
            return
        ends = [self._end(attempt, rank, failure) for rank, failure in failures.items()]
        ends = [end for end in ends if end.local_rank in first or end.text is not None] or ends
        nodes = attempt.nodes
        if nodes is None:
            if ends:
                self._record(failure_of_ends(ends, exit_code, self._out_of_memory.rose()))
            return
        nodes.publish("ends", attempt.restarts, attempt.node, [asdict(end) for end in ends])
        if not ends or not nodes.is_first("report", attempt.restarts):
            return
        are_consequences = all(end.is_consequence for end in ends)
        found = nodes.collect("ends", attempt.restarts, self._nodes_seconds if are_consequences else 0.0)
        if are_consequences and attempt.node not in found and endpoint is not None:
            self.record_lost_rendezvous(endpoint)  # the store does not even have what this launcher has published
            return
        every = [RankEnd.from_json(end) for content in found.values() for end in content] or ends
        lost = self._missing_nodes(attempt, nodes, found) if are_consequences else {}
        if lost and all(end.is_consequence for end in every):
            self._record(failure_of_lost_nodes(dict(lost.values())))
        else:
            self._record(failure_of_ends(every, exit_code, self._out_of_memory.rose()))

    def record_lost_rendezvous(self, endpoint: str) -> None:
        """Record that the launcher with the store of all launchers has ended."""
        failure = failure_of_lost_rendezvous(self._host, endpoint)
        if self.failure is None or self.failure.message != failure.message:
            self._record(failure, replace=False)

    def record_lost_link(self, endpoint: str, seconds: float, limit: float) -> None:
        """Record that the store does not answer this launcher; a report of the other launchers is kept."""
        self._record(failure_of_lost_link(self._host, endpoint, seconds, limit), replace=False)

    def silence_limit(self) -> float:
        """Seconds for which the store of the launchers may be silent: as long as a rank in a step. 0: no limit."""
        if self._reports_only:
            return 0.0
        settings = self._attempt.settings if self._attempt is not None else {}
        known = [float(one.operation.hang_limit_s) for one in settings.values()]
        given = _number_after("--hang-limit-s", self._words)
        limit = known[0] if known else OperationConfig().hang_limit_s if given is None else given
        return max(limit, _LEAST_SILENCE) if limit else 0.0

    def publish_health(self) -> None:
        """Tell the other launchers that no rank of this node has failed."""
        attempt = self._attempt
        if attempt is not None and attempt.nodes is not None:
            attempt.nodes.publish("ends", attempt.restarts, attempt.node, [])

    def _end(self, attempt: _Attempt, local_rank: int, failure: Any) -> RankEnd:
        message = failure.message
        info = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        moment = float(failure.timestamp)
        with suppress(OSError):
            moment = os.stat(failure.error_file).st_mtime_ns * 1e-9
        snapshot = self._heartbeats.read(local_rank)
        return RankEnd(
            rank=attempt.ranks[local_rank],
            local_rank=local_rank,
            host=self._host,
            exit_code=failure.exitcode,
            text=message.get("message") if isinstance(message, dict) else None,
            cause=info.get("cause"),
            is_local=info.get("is_local", True),
            time=moment,
            **({} if snapshot is None else position(snapshot)),
        )

    def _missing_nodes(
        self, attempt: _Attempt, nodes: Nodes, found: Collection[int]
    ) -> dict[int, tuple[str, list[int]]]:
        """Host and ranks of the nodes that have not answered."""
        hosts = nodes.collect("host", attempt.restarts, 0.0)
        missing = sorted(set(range(nodes.count)) - set(found))
        return {
            node: (hosts[node]["host"], hosts[node]["ranks"]) if node in hosts else (f"node {node}", [])
            for node in missing
        }

    # --- records ---------------------------------------------------------------------------------------------

    def _record_lost_nodes(
        self, attempt: _Attempt, nodes: Nodes, present: Collection[int], is_hang: bool = False
    ) -> Failure:
        """Record that the other nodes are lost."""
        failure = failure_of_lost_nodes(dict(self._missing_nodes(attempt, nodes, present).values()))
        self._record(failure, is_hang=is_hang)
        return failure

    def record_survivor(self, local_rank: int) -> None:
        """Record that a process does not end although it was killed."""
        attempt = self._attempt
        assert attempt is not None
        snapshot = self._heartbeats.read(local_rank)
        failure = failure_of_ends(
            [
                RankEnd(
                    rank=attempt.ranks[local_rank],
                    local_rank=local_rank,
                    host=self._host,
                    exit_code=1,
                    text=f"process {attempt.pids[local_rank]} does not end after SIGKILL (state "
                    f"{process_state(attempt.pids[local_rank])}): a driver or a file system does not answer",
                    cause="hang",
                    **({} if snapshot is None else position(snapshot)),
                )
            ],
            exit_code=1,
            out_of_memory=False,
        )
        self._record(failure)

    def _record(self, failure: Failure, replace: bool = True, is_hang: bool = False) -> None:
        """Print and write a report; without ``replace``, a report of this attempt by another launcher is kept."""
        reported, self.failure = self.failure, failure
        directory = self._directory()
        note, attempt = "", self._attempt
        if attempt is not None and attempt.reported_at is not None:
            self.failure, replace = reported, False  # the hang is the cause of what comes after it
        if directory is not None and failure.cause != Cause.IN_USE:
            try:
                assert attempt is not None
                newest = read_failure(directory / FILE) if not replace else None
                if newest is None or newest.get("time", 0.0) < attempt.started:
                    if attempt.number is None:
                        attempt.number = attempt_number(directory, attempt.started)
                    write_failure(directory, failure, attempt.number)
                note = f" See {directory / FILE}."
            except OSError as error:
                note = f" {directory / FILE} cannot be written ({error.strerror})."
        what = "A hang was found, and nothing is ended" if is_hang and self._reports_only else "The attempt failed"
        print(f"{what} ({failure.cause}). {failure.message}{note}", file=sys.stderr, flush=True)

    def _directory(self) -> Path | None:
        """The run directory; None if the ranks have none."""
        settings = self._attempt.settings if self._attempt is not None else {}
        if self._attempt is not None:
            self._read_settings(self._attempt)
        return next((Path(one.run_dir) for one in settings.values() if one.run_dir is not None), None)


def _evidence_of_lost(rank: int, host: str) -> Evidence:
    """Of a rank whose launcher does not answer."""
    return Evidence(rank=rank, local_rank=0, host=host, pid=None, section="start", seconds=0.0, is_lost=True)


def _processes(pid: int) -> Processes:
    """What the kernel says of a rank that makes no progress."""
    state = process_state(pid) or "Z"
    children = [child for child in child_processes(pid) if child.role != HELPER]
    states = [state, *(child.state for child in children)]
    writers = [child.pid for child in children if child.role == BACKGROUND_WRITER]
    return Processes(
        # Not of a child that has ended: what the rank does with it is its own matter.
        is_stopped=state in ENDED or any(one in STOPPED for one in states),
        waits_for_storage=any(one in UNINTERRUPTIBLE for one in states),
        transferred=sum(map(transferred_bytes, [pid, *writers])),
    )


def _word_after(flag: str, words: Sequence[str]) -> str | None:
    """The value of a flag on a command line; None if it is not there."""
    pairs = [tuple(word.split("=", 1)) for word in words if "=" in word] + list(pairwise(words))
    return next((value for name, value in pairs if name.replace("_", "-") == flag), None)


def _number_after(flag: str, words: Sequence[str]) -> float | None:
    """The same as a number; None if it is none."""
    with suppress(ValueError, TypeError):
        return float(_word_after(flag, words) or "")
    return None
