"""Decides from samples of the heartbeats of a node's ranks which of them have stayed in a section for too long.

Limits are learned. The limit of a section of an iteration is 5 times the longest of its last 20 stays, and at least the
limit of the flags. The other sections, and the first iterations, which may compile kernels, have a long limit until a
few stays are known, of this attempt or of earlier ones (megatron/operation/hang.py), and then 10 times the longest.
What cannot be slow has one short limit: a process that is stopped. A rank that has not attached has no other limit:
perhaps it cannot, and those that have wait for it in a section with a limit. Waiting for storage is no hang for a
while, for the rank that waits and for the others, which wait for it.

Pure logic: the caller reads the clock, the heartbeats, and what the kernel says of the processes.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.config.operation import OperationConfig
from megatron.operation.heartbeat import STEP_SECTIONS, Section, Snapshot

FACTOR = 5.0
"""Limit of a section relative to the longest of its last stays."""
LEARNED_FACTOR = 10.0
"""The same outside of iterations, where it replaces a long limit and not a short one."""
AGAIN_FACTOR, COMPILE_FACTOR = 2.0, 5.0
"""The same for a stay that has not ended: if that was no hang, the next limit is longer. In the first iterations, where
another node may compile everything anew, by more; but collectives time out after ten minutes."""
LEARNED_SECONDS = 60.0
"""Smallest limit that replaces a long one."""
FEW = 3
"""Number of stays in an attempt from which the limits of saves and evaluations are learned."""
STOPPED_SECONDS = 30.0
"""Limit of a process that is stopped, in every section: a debugger that attaches stops it for less."""
SPANS = 20
"""Number of stays from which a limit is learned."""
FIRST_ITERATIONS = 3
"""Number of iterations from which nothing is learned, because they may compile kernels. They and as many after them
have a limit of their own."""
LONGEST_PERIOD = 1.0
"""Seconds between two samples, unless a limit is short."""
_SAMPLES_PER_LIMIT = 10
_STUCK_PERIODS = 5
"""A rank without progress for so many periods is looked at more closely."""
_LONGEST_GAP = 10.0
"""Seconds between two samples that count: after a longer gap this process, and so possibly the whole job, was stopped
or had no processor."""
_LEAST_BYTES = 2**20
"""Bytes to and from files that are progress: the thread that renews a lock writes some hundred in a minute."""
_LEARNED = frozenset({*STEP_SECTIONS, Section.DATA})
_READS_AND_WRITES = frozenset(set(Section) - {*STEP_SECTIONS, Section.DATA, Section.SPARE} | {Section.STEP})
"""Sections that read or write files. In the others a process that waits in the kernel waits for a device."""
_FIRST = "first-iterations"
_UNLEARNED = 1800.0
_NS = 1e-9


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank may stay in a section. None: not given, so that a limit may be learned that is shorter than
    half an hour."""

    step: float = 60.0
    """For every section of an iteration; 0 disables the watchdog."""
    start: float | None = None
    load: float | None = None
    save: float | None = None
    evaluation: float | None = None
    data: float = 600.0
    """For waiting for data, and for the time for which waiting for storage is no hang."""

    @staticmethod
    def of_flags(operation: OperationConfig, dataloader_timeout: float | None) -> "Limits":
        """The limits of the flags. A rank may wait for its data for as long as ``--dataloader-timeout``."""
        start = operation.hang_limit_start_s
        data = max(operation.hang_limit_data_s, operation.hang_limit_s)
        if dataloader_timeout is not None:
            # Without a limit for the loader, the first wait for data may be as long as the start.
            data = max(data, 1.1 * dataloader_timeout if dataloader_timeout else start or _UNLEARNED)
        return Limits(
            float(operation.hang_limit_s),
            start,
            operation.hang_limit_load_s,
            operation.hang_limit_save_s,
            operation.hang_limit_evaluation_s,
            data,
        )

    def given(self, section: Section) -> float | None:
        """The flag's limit of a section outside of iterations, if it is given."""
        match section:
            case Section.START:
                return self.start
            case Section.LOAD:
                return self.load
            case Section.SAVE:
                return self.save
            case Section.EVALUATION:
                return self.evaluation
            case _:
                return None

    def of(self, section: Section) -> float | None:
        """The limit of ``section`` before anything is learned; None for a section without a limit."""
        match section:
            case Section.SPARE:
                return None  # waits until the job restarts
            case Section.END:
                return max(self.start or _UNLEARNED, self.save or _UNLEARNED)  # waits for background saves
            case Section.DATA:
                return self.data
            case Section.START | Section.LOAD | Section.SAVE | Section.EVALUATION:
                return self.given(section) or _UNLEARNED
            case _:
                return self.step


@dataclass(frozen=True)
class Processes:
    """What the kernel says of the process of a rank and of those that it has started."""

    is_stopped: bool = False
    """Whether one of them is stopped, or has ended and its parent does not notice it."""
    waits_for_storage: bool = False
    """Whether one of them waits in the kernel."""
    transferred: int = 0
    """Bytes that they have read and written."""


@dataclass(frozen=True)
class Overrun:
    """A rank that has stayed in a section for longer than its limit."""

    local_rank: int
    section: Section
    seconds: float
    limit: float


@dataclass
class _Rank:
    """What the samples of a rank have shown."""

    progress_ns: int
    """Time of the last progress that was seen."""
    last: Snapshot | None = None
    iterations: int = 0
    """Iterations that the rank has done in this attempt."""
    spans: dict[Section, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=SPANS)))
    first_span: float = 0.0
    """The longest stay in a section of the first iterations."""
    unattached_ns: int = 0
    """From the start of the attempt until the rank attached."""
    is_confirmed: bool = False
    """Whether the last two samples agree: the words of a heartbeat are read one after the other."""
    stopped_ns: int | None = None
    """When its process was first seen stopped."""
    storage_ns: int | None = None
    """When it was last seen to wait for storage, or to read or write."""
    transferred: int | None = None
    """Bytes that it had transferred at the last progress."""
    excused_ns: int = 0
    """Time since the last progress in which a rank of the job waited for storage."""
    slow_ns: int = 0
    """Time of the stay under way in which storage was waited for, or read and written: it teaches nothing."""

    @property
    def section(self) -> Section:
        return Section.START if self.last is None else self.last.section

    @property
    def is_in_first_iterations(self) -> bool:
        return self.section in _LEARNED and self.iterations < 2 * FIRST_ITERATIONS

    def has_progressed(self, now_ns: int) -> None:
        self.progress_ns, self.excused_ns = now_ns, 0
        self.stopped_ns = self.transferred = None


class Watchdog:
    """The ranks of a node during one attempt, which began at ``started_ns`` of the monotonic clock.

    ``earlier`` are the longest stays of earlier attempts, as of :meth:`stays`.
    """

    def __init__(
        self, num_ranks: int, started_ns: int, limits: Limits, earlier: Mapping[str, float] | None = None
    ) -> None:
        self.limits = limits
        self.waits_for_storage = False
        """Whether a rank of this node waits for storage, or reads and writes, as of the last sample."""
        self._earlier = {} if earlier is None else earlier
        self._ranks = [_Rank(started_ns) for _ in range(num_ranks)]
        self._started_ns = self._sampled_ns = started_ns
        self._gaps: list[tuple[int, int]] = []
        """(end, nanoseconds that do not count) of long gaps between samples."""

    def period(self) -> float:
        """Seconds until the next sample."""
        current = [limit for rank in self._ranks if (limit := self._limit(rank)) is not None]
        shortest = [*current, self.limits.step] if self.limits.step else current
        return min([LONGEST_PERIOD, *(limit / _SAMPLES_PER_LIMIT for limit in shortest)])

    def stuck(self, now_ns: int) -> list[int]:
        """Local ranks without progress for a while: the next sample needs what the kernel says of their processes."""
        since_ns = now_ns - self._stuck_ns()
        return [
            number
            for number, rank in enumerate(self._ranks)
            if rank.progress_ns <= since_ns and rank.section != Section.SPARE and self.limits.step
        ]

    def _stuck_ns(self) -> int:
        return int(_STUCK_PERIODS * self.period() / _NS)

    def sample(
        self,
        now_ns: int,
        snapshots: Sequence[Snapshot | None],
        processes: Mapping[int, Processes] | None = None,
        others_wait: bool = False,
    ) -> list[Overrun]:
        """Record one sample of all ranks (None: not attached); the ranks beyond their limit, the longest first.

        ``processes`` are those of :meth:`stuck` ranks. ``others_wait``: a rank of another node waits for storage.
        """
        before_ns, self._sampled_ns = self._sampled_ns, now_ns
        excess = now_ns - before_ns - int(_LONGEST_GAP / _NS)
        if excess > 0:
            self._gaps.append((now_ns, excess))
        for rank, snapshot in zip(self._ranks, snapshots, strict=True):
            if snapshot is not None:
                self._observe(rank, snapshot, now_ns)
        for number, found in (processes or {}).items():
            self._look_at(self._ranks[number], found, now_ns)
        recently_ns = now_ns - 3 * self._stuck_ns()
        self.waits_for_storage = any(
            (rank.storage_ns is not None and rank.storage_ns > recently_ns)
            or (rank.section == Section.DATA and now_ns - rank.progress_ns > self._stuck_ns())
            for rank in self._ranks
        )
        if self.waits_for_storage or others_wait:
            for rank in self._ranks:
                rank.excused_ns += now_ns - before_ns - max(0, excess)
                rank.slow_ns += now_ns - before_ns - max(0, excess)
        if self.limits.step == 0:
            return []
        overruns = [self._overrun(number, rank, now_ns) for number, rank in enumerate(self._ranks)]
        return sorted((one for one in overruns if one is not None), key=lambda one: -one.seconds)

    def stays(self, now_ns: int) -> dict[str, float]:
        """The longest stay of a rank by label of the section, where a later attempt may learn from it.

        A stay that has not ended counts as one that makes the next limit :data:`AGAIN_FACTOR` times as long as itself,
        in the first iterations :data:`COMPILE_FACTOR` times: after a wrong decision the limit is larger.
        """
        longest: dict[str, float] = {}

        def add(label: str, seconds: float) -> None:
            longest[label] = max(seconds, longest.get(label, 0.0))

        for rank in self._ranks:
            if rank.iterations:
                assert rank.last is not None
                add(Section.START.label, (rank.unattached_ns + rank.last.section_ns[Section.START]) * _NS)
                add(Section.LOAD.label, rank.last.section_ns[Section.LOAD] * _NS)
            if rank.iterations >= 2 * FIRST_ITERATIONS:
                add(_FIRST, rank.first_span)
            for section in (Section.SAVE, Section.EVALUATION):
                if len(spans := rank.spans.get(section, ())) >= FEW:
                    add(section.label, max(spans))
        for rank in self._ranks:
            label = _FIRST if rank.is_in_first_iterations else rank.section.label
            if label in longest or label in self._earlier:
                factor = COMPILE_FACTOR if label == _FIRST else AGAIN_FACTOR
                add(label, self._since(rank.progress_ns, now_ns) * factor / LEARNED_FACTOR)
        return longest

    def _observe(self, rank: _Rank, snapshot: Snapshot, now_ns: int) -> None:
        before, rank.last = rank.last, snapshot
        rank.is_confirmed = before is not None and _position(before) == _position(snapshot)
        if rank.is_confirmed:
            return
        is_same_span = before is not None and before.entered_ns == snapshot.entered_ns
        # A microbatch or a collective within a span is seen only now.
        rank.has_progressed(now_ns if is_same_span else snapshot.entered_ns)
        # Also at the first sample: a rank may attach, train and hang between two of them.
        first, was_first = snapshot.first_iteration, rank.iterations < 2 * FIRST_ITERATIONS
        rank.iterations = 0 if first is None else max(0, snapshot.iteration - 1 - first)
        if before is None:
            rank.unattached_ns = max(0, snapshot.attached_ns - self._started_ns)
        elif before.attached_ns != snapshot.attached_ns:
            rank.unattached_ns = 0  # the rank has restarted in its process
        if before is None or snapshot.section in (Section.START, Section.LOAD):
            rank.spans.clear()
            return
        slow_ns, rank.slow_ns = rank.slow_ns, 0
        for section, time_ns in snapshot.section_ns.items():
            if (span_ns := time_ns - before.section_ns[section]) > 0:
                if section == before.section and section in _READS_AND_WRITES:
                    span_ns = max(0, span_ns - slow_ns)
                span = (span_ns - self._missed_since(now_ns - span_ns)) * _NS
                if rank.iterations >= FIRST_ITERATIONS:
                    rank.spans[section].append(span)
                if was_first and section in _LEARNED:
                    rank.first_span = max(rank.first_span, span)

    def _look_at(self, rank: _Rank, found: Processes, now_ns: int) -> None:
        """Record what the kernel says of a rank without progress."""
        if not found.is_stopped:
            rank.stopped_ns = None
        elif rank.stopped_ns is None:
            rank.stopped_ns = now_ns
        if rank.section not in _READS_AND_WRITES:
            return
        if found.waits_for_storage:
            rank.storage_ns = now_ns
        if rank.transferred is None:
            rank.transferred = found.transferred
        elif found.transferred - rank.transferred >= _LEAST_BYTES:
            rank.storage_ns = now_ns
            if rank.last is not None:
                rank.slow_ns = max(rank.slow_ns, now_ns - rank.last.entered_ns)
            rank.has_progressed(now_ns)

    def _limit(self, rank: _Rank) -> float | None:
        section, is_first = rank.section, rank.is_in_first_iterations
        if rank.last is None:
            return None
        limit, spans = self.limits.of(section), rank.spans.get(section, ())
        if limit is None or self.limits.step == 0:
            return None
        if is_first:
            return max(limit, self._long_limit(Section.START, _FIRST, 0.0, 0))
        longest = max(spans, default=0.0)
        if section in _LEARNED or section == Section.END:
            return max(limit, FACTOR * longest)
        return self._long_limit(section, section.label, longest, len(spans))

    def _long_limit(self, section: Section, label: str, longest: float, count: int) -> float:
        """The limit of ``section``, or one that is learned from the stays under ``label``, of which this attempt has
        ``count``."""
        longest = max(longest, self._earlier.get(label, 0.0))
        limit = self.limits.of(section)
        assert limit is not None
        long = max(limit, FACTOR * longest)
        is_known = count >= FEW or label in self._earlier
        if self.limits.given(section) is not None or not is_known:
            return long
        return min(long, max(LEARNED_SECONDS, self.limits.step, LEARNED_FACTOR * longest))

    def _overrun(self, number: int, rank: _Rank, now_ns: int) -> Overrun | None:
        limit = self._limit(rank)
        if rank.stopped_ns is not None and (limit is not None or rank.last is None):
            seconds = self._since(rank.stopped_ns, now_ns)
            shorter = STOPPED_SECONDS if limit is None else min(limit, STOPPED_SECONDS)
            if seconds > shorter:
                return Overrun(number, rank.section, seconds, shorter)
        if limit is None or not rank.is_confirmed:
            return None
        seconds = self._since(rank.progress_ns, now_ns)
        if rank.section != Section.DATA:
            seconds -= min(rank.excused_ns * _NS, self._longest_excuse(rank.section))
        return Overrun(number, rank.section, seconds, limit) if seconds > limit else None

    def _longest_excuse(self, section: Section) -> float:
        """Seconds for which a rank in ``section`` may wait for another that waits for storage."""
        return max(self.limits.data, (0.0 if section in _LEARNED else self.limits.of(section)) or 0.0)

    def _since(self, moment_ns: int, now_ns: int) -> float:
        return (now_ns - moment_ns - self._missed_since(moment_ns)) * _NS

    def _missed_since(self, moment_ns: int) -> int:
        """Nanoseconds since ``moment_ns`` that do not count."""
        return sum(excess for end, excess in self._gaps if end > moment_ns)


def _position(snapshot: Snapshot) -> tuple[int, ...]:
    """Changes with every progress of a rank."""
    return snapshot.section, snapshot.entered_ns, snapshot.iteration, snapshot.microbatch, snapshot.collectives
