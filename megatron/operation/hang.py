"""The launcher's view of its ranks: it decides that they hang, and that a node is lost.

    heartbeats ─> Watchdog ─> gather_evidence ─> find_culprit ─> FailureReports.record ─> the agent ends the ranks
    (each second)  (overrun)   (stacks, states)   (rank, cause)   (failure.json)

Several nodes agree through the store that they share (megatron/operation/nodes.py):

    launcher A                                       launcher B
    a rank exceeds its limit                         a rank exceeds its limit, or it sees that A has begun
    is_first("hang"): yes                            is_first("hang"): no
    publish, collect for 5 s  <──────── store ────── publish what it knows of its ranks
    decide, report, request a restart ── store ────> ends its ranks; without a request in 15 s it decides alone

    every 5 s each launcher writes a sign of life; that of the first node reads them: 45 s without one is a lost node

``RUN_DIR/stays.json`` has the longest stays in each section of the last attempts, from which the watchdog of the next
attempt learns its limits.
"""

import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.operation import OperationConfig
from megatron.operation.attempts import replace_file
from megatron.operation.culprit import failure_of_hang, find_culprit
from megatron.operation.evidence import Evidence, gather_evidence, observe_processes
from megatron.operation.failure import Failure, FailureReports, RankStart, failure_of_lost_nodes
from megatron.operation.heartbeat import HeartbeatMemory, run_directory_in, value_in
from megatron.operation.nodes import Nodes
from megatron.operation.watchdog import Limits, Overrun, Watchdog

# A script, or a module after -m, whose ranks have heartbeats.
SCRIPTS = ("pretrain_llama.py", "megatron.commands.pretrain_llama")
# Time for the other launchers to say what they know of their ranks.
NODES_SECONDS = 5.0
# Time for the first launcher to decide, after which another one decides alone.
_DECISION_SECONDS = 15.0
# Seconds between two signs of life of a launcher, which the launcher of the first node reads.
BEAT_SECONDS = 5.0
# A launcher without a sign of life for so long is gone.
LOST_SECONDS = 45.0
# Between two writes of what the ranks' stays teach.
_STAYS_SECONDS = 30.0
# Last sign of life of a launcher, in an attempt that ends.
_OVER = "over"
# Seconds of silence of the store that mean nothing: torch needs as long to notice a lost node.
_LEAST_SILENCE = 15.0


@dataclass(kw_only=True)
class _Attempt(RankStart):
    """One start of the ranks of this node, and what was seen of them."""

    watchdog: Watchdog
    # Of the command, for stays.json.
    key: str
    # When stays were written last; before that, when the attempt began.
    stays_at: float
    # As written last.
    stays: Mapping[str, float] = field(default_factory=dict)
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    sample_at: float = 0.0
    # When a rank of this node exceeded its limit, while another launcher decides.
    exceeded_at: float | None = None
    has_published: bool = False
    # When a hang was reported that lasts, with --on-hang report.
    hang_at: float | None = None
    # Hangs that are over.
    hangs: int = 0
    beat_at: float = 0.0
    # By node: its last sign of life, and when it was first read.
    beats: dict[int, tuple[str, float]] = field(default_factory=dict)
    # Whether a rank of any node waited for storage at the last sign of life.
    others_wait: bool = False

    @property
    def topic(self) -> str:
        """Topic of the next hang in the store of the launchers."""
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
        self.reports = FailureReports(heartbeats, nodes_seconds)
        self._heartbeats, self._words, self._now_ns = heartbeats, words, now_ns
        self._has_heartbeats = any(os.path.basename(word) in SCRIPTS for word in words)
        self._attempt: _Attempt | None = None

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
        start = _number_in(self._words, "--hang-limit-start-s")
        limits = Limits.of_flags(OperationConfig(hang_limit_start_s=start), None)
        key = command_key(self._words, world_size)
        # The ranks have not written their settings yet: the command line says where earlier attempts are.
        earlier = longest_stays(run_directory_in(self._words), key)
        self._attempt = _Attempt(
            dict(enumerate(ranks)),
            pids,
            nodes,
            node,
            restarts,
            watchdog=Watchdog(len(ranks), self._now_ns(), limits, earlier),
            key=key,
            stays_at=self._now(),
        )
        self.reports.begin(self._attempt)

    def _now(self) -> float:
        return self._now_ns() * 1e-9

    def find_hang(self, ended: Collection[int]) -> Failure | None:
        """The failure, if a rank hangs; call it often. ``ended`` are the local ranks that no longer run.

        With ``--on-hang report`` it reports a hang, and returns None, so that nothing is ended.
        """
        attempt, now = self._attempt, self._now()
        if attempt is None or now < attempt.sample_at:
            return None
        settings = self.reports.settings()
        if settings is not None:
            attempt.watchdog.limits = Limits.of_flags(settings.operation, settings.dataloader_timeout)
        overruns = self._sample(attempt, ended)
        attempt.sample_at = now + attempt.watchdog.period()
        if overruns or now - attempt.stays_at > _STAYS_SECONDS:
            attempt.stays_at = now
            self._write_stays(attempt)
        if not self._reports_only:
            return self._hang_among(attempt, overruns, ended, now)
        if not overruns and not attempt.watchdog.stuck(self._now_ns()):
            self._end_hang(attempt, now)
        if attempt.hang_at is None:
            attempt.hang_at = None if self._hang_among(attempt, overruns, ended, now) is None else now
            self.reports.hang_lasts = attempt.hang_at is not None
        elif attempt.nodes is not None:
            self._find_lost_nodes(attempt, attempt.nodes, now)  # this launcher still gives signs of life
        return None

    @property
    def _reports_only(self) -> bool:
        """Whether a hang is reported, and nothing is ended (``--on-hang report``)."""
        settings = self.reports.settings()
        return (settings.operation.on_hang if settings else value_in(self._words, "--on-hang")) == "report"

    def _sample(self, attempt: _Attempt, ended: Collection[int]) -> list[Overrun]:
        """Read the heartbeats; the ranks of this node that run and have exceeded their limits."""
        snapshots, now_ns, watchdog = self._heartbeats.snapshots(), self._now_ns(), attempt.watchdog
        # A look at all processes takes milliseconds: only of ranks that have made no progress for a while.
        processes = {
            rank: observe_processes(attempt.pids[rank]) for rank in watchdog.stuck(now_ns) if rank not in ended
        }
        overruns = watchdog.sample(now_ns, snapshots, processes, attempt.others_wait)
        return [
            one
            for one in overruns
            if one.local_rank not in ended and (self._has_heartbeats or snapshots[one.local_rank] is not None)
        ]

    def _end_hang(self, attempt: _Attempt, now: float) -> None:
        """All ranks of this node make progress: a hang that was reported is over, and the next one is another."""
        if attempt.hang_at is not None:
            seconds = now - attempt.hang_at
            print(f"The ranks go on, {seconds:.0f} s after the report of a hang.", file=sys.stderr, flush=True)
        if attempt.hang_at is not None or attempt.has_published:
            attempt.hangs += 1
            attempt.hang_at = attempt.exceeded_at = self.reports.failure = None
            attempt.has_published = self.reports.hang_lasts = False

    # --- the decision ----------------------------------------------------------------------------------------

    def _hang_among(
        self, attempt: _Attempt, overruns: Sequence[Overrun], ended: Collection[int], now: float
    ) -> Failure | None:
        """The hang that this launcher reports, if there is one."""
        nodes = attempt.nodes
        if nodes is None:
            return self._decide(overruns[0], self._evidence(attempt, ended)) if overruns else None
        lost = self._find_lost_nodes(attempt, nodes, now)
        if lost is not None:
            return lost
        if overruns and attempt.exceeded_at is None:
            attempt.exceeded_at = now
        if attempt.has_published:
            # The ranks are ended when the first launcher requests a restart. Unless it does not:
            is_late = attempt.exceeded_at is not None and self._now() - attempt.exceeded_at > _DECISION_SECONDS
            return self._decide(overruns[0], self._evidence(attempt, ended)) if overruns and is_late else None
        if overruns and nodes.is_first(attempt.topic, attempt.restarts):
            return self._decide(overruns[0], self._evidence_of_all(attempt, ended, nodes))
        if overruns or nodes.has_started(attempt.topic, attempt.restarts):
            self._publish_evidence(attempt, ended, nodes)
        return None

    def _decide(self, overrun: Overrun, evidence: Sequence[Evidence]) -> Failure:
        failure = failure_of_hang(find_culprit(evidence), evidence, overrun.seconds, overrun.limit)
        self._report(failure)
        return failure

    def _report(self, failure: Failure) -> None:
        what = "A hang was found, and nothing is ended" if self._reports_only else "The attempt failed"
        self.reports.record(failure, what=what)

    def _evidence(self, attempt: _Attempt, ended: Collection[int]) -> list[Evidence]:
        pids = {rank: pid for rank, pid in attempt.pids.items() if rank not in ended}
        return gather_evidence(self._heartbeats, attempt.ranks, pids, self.reports.host, self._now_ns)

    def _publish_evidence(self, attempt: _Attempt, ended: Collection[int], nodes: Nodes) -> list[Evidence]:
        attempt.has_published = True
        own = self._evidence(attempt, ended)
        nodes.publish(attempt.topic, attempt.restarts, attempt.node, [asdict(one) for one in own])
        return own

    def _evidence_of_all(self, attempt: _Attempt, ended: Collection[int], nodes: Nodes) -> list[Evidence]:
        own = self._publish_evidence(attempt, ended, nodes)
        found = nodes.collect(attempt.topic, attempt.restarts, self.reports.nodes_seconds)
        others = [Evidence.from_json(one) for node, content in found.items() if node != attempt.node for one in content]
        # A launcher that already ends its ranks says no more.
        ending = {node for node, text in nodes.beats(attempt.restarts).items() if text == _OVER}
        for node, (host, ranks) in self.reports.missing_nodes(found.keys() | ending).items():
            print(f"The launcher of node {node} ({host}) does not answer.", file=sys.stderr, flush=True)
            others += [
                Evidence(rank=rank, local_rank=0, host=host, pid=None, section="start", seconds=0.0, is_lost=True)
                for rank in ranks
            ]
        return sorted([*own, *others], key=lambda one: one.rank)

    # --- nodes that are lost ---------------------------------------------------------------------------------

    def _find_lost_nodes(self, attempt: _Attempt, nodes: Nodes, now: float) -> Failure | None:
        """Give a sign of life. The first launcher reads those of the others, and decides that one is gone."""
        if now < attempt.beat_at or not attempt.watchdog.limits.step:
            return None
        # After a pause of this launcher, the others have as long as at the start.
        was_paused = now - attempt.beat_at > BEAT_SECONDS
        attempt.beat_at = now + min(BEAT_SECONDS, 5.0 * attempt.watchdog.period())
        nodes.beat(attempt.restarts, attempt.node, f"{now} {int(attempt.watchdog.waits_for_storage)}")
        attempt.others_wait = nodes.is_waiting(attempt.restarts)
        if attempt.node:
            return None
        beats = nodes.beats(attempt.restarts)
        nodes.set_waiting(attempt.restarts, any(text.endswith(" 1") for text in beats.values()))
        if was_paused:
            attempt.beats = {}
        silent = set()
        for node in range(nodes.count):
            text, since = beats.get(node, ""), attempt.beats.get(node)
            if since is None or since[0] != text:
                attempt.beats[node] = text, now
            elif text != _OVER and now - since[1] > LOST_SECONDS:
                silent.add(node)
        if not silent or not nodes.is_first(attempt.topic, attempt.restarts):
            return None
        failure = failure_of_lost_nodes(dict(self.reports.missing_nodes(set(range(nodes.count)) - silent).values()))
        self._report(failure)
        return failure

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
            self.reports.record(failure_of_lost_nodes(dict(self.reports.missing_nodes(members).values())))
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

    def silence_limit(self) -> float:
        """Seconds for which the store of the launchers may be silent: as long as a rank in a step. 0: no limit."""
        if self._reports_only:
            return 0.0
        settings, given = self.reports.settings(), _number_in(self._words, "--hang-limit-s")
        limit = OperationConfig().hang_limit_s if given is None else given
        if settings is not None:
            limit = float(settings.operation.hang_limit_s)
        return max(limit, _LEAST_SILENCE) if limit else 0.0

    def _write_stays(self, attempt: _Attempt) -> None:
        """The launcher of rank 0 writes what its ranks teach the next attempt."""
        directory, stays = self.reports.directory(), attempt.watchdog.stays(self._now_ns())
        if directory is None or 0 not in attempt.ranks.values() or not stays:
            return
        if any(seconds > 1.1 * attempt.stays.get(label, -1.0) for label, seconds in stays.items()):
            attempt.stays = stays
            with suppress(OSError):  # nothing is learned
                write_stays(directory, attempt.key, attempt.name, stays)


def _number_in(words: Sequence[str], flag: str) -> float | None:
    with suppress(ValueError):
        return float(value_in(words, flag) or "")
    return None


# --- stays ---------------------------------------------------------------------------------------------------

STAYS = "stays.json"
_STAYS_SCHEMA = 1
# Attempts that are kept.
_MOST_ATTEMPTS = 20
_COMMAND = "command"


def command_key(words: Sequence[str], world_size: int) -> str:
    """A digest of the command: nothing is learned from attempts of another model, batch or number of ranks."""
    return hashlib.sha256("\0".join([str(world_size), *words]).encode(errors="surrogateescape")).hexdigest()[:16]


def longest_stays(directory: Path | None, key: str) -> dict[str, float]:
    """The longest stay by section in the attempts of the command ``key``; empty without a file."""
    longest: dict[str, float] = {}
    for attempt in _read_stays(directory):
        if attempt.get(_COMMAND) == key:
            for label, seconds in attempt.items():
                if isinstance(seconds, int | float) and seconds >= 0:
                    longest[label] = max(float(seconds), longest.get(label, 0.0))
    return longest


def write_stays(directory: Path, key: str, attempt: str, stays: Mapping[str, float]) -> None:
    """Write the ``stays`` of the attempt under way, which has the name ``attempt``; raises :class:`OSError`."""
    others = [one for one in _read_stays(directory) if one.get("attempt") != attempt]
    own = {"attempt": attempt, _COMMAND: key, **{label: round(seconds, 3) for label, seconds in stays.items()}}
    text = json.dumps({"schema": _STAYS_SCHEMA, "attempts": [*others, own][-_MOST_ATTEMPTS:]})
    replace_file(directory / STAYS, text + "\n")


def _read_stays(directory: Path | None) -> list[dict[str, Any]]:
    """What the file has of each attempt; a damaged file teaches nothing."""
    if directory is not None:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            found = json.loads((directory / STAYS).read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.get("schema") == _STAYS_SCHEMA:
                return [one for one in found.get("attempts", ()) if isinstance(one, dict)]
    return []
