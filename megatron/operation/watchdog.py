"""Decides from samples of the heartbeats of a node's ranks which of them have stayed in a section for too long.

The limit of a section is learned: 5 times the longest of its last 20 spans, and at least the limit of the flags. The
first iterations, which may compile kernels, have the limit of the start. Pure logic: the caller reads the clock and the
heartbeats.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.config.operation import OperationConfig
from megatron.operation.heartbeat import STEP_SECTIONS, Section, Snapshot

FACTOR = 5.0
"""Limit of a section relative to the longest of its last spans."""
SPANS = 20
"""Number of spans from which a limit is learned."""
FIRST_ITERATIONS = 3
"""Number of iterations from which nothing is learned, because they may compile kernels. The limit of the start applies
to them and to as many after them."""
LONGEST_PERIOD = 1.0
"""Seconds between two samples, unless a limit is short."""
_SAMPLES_PER_LIMIT = 10
_LONGEST_GAP = 10.0
"""Seconds between two samples that count: after a longer gap this process, and so possibly the whole job, was stopped
or had no processor."""
_LEARNED = frozenset({*STEP_SECTIONS, Section.DATA})
_NS = 1e-9


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank may stay in a section."""

    step: float = 60.0
    """For every section of an iteration; 0 disables the watchdog."""
    start: float = 1800.0
    load: float = 1800.0
    save: float = 1800.0
    evaluation: float = 1800.0

    @staticmethod
    def of_flags(operation: OperationConfig, dataloader_timeout: float | None) -> "Limits":
        """The limits of the flags. Where ``--dataloader-timeout`` is given, a rank may wait so long for its data, and
        the other ranks for that rank."""
        step = float(operation.hang_limit_s)
        if step and dataloader_timeout is not None:
            # Without a limit for the loader, the first wait for data may be as long as the start.
            step = max(step, 1.1 * dataloader_timeout if dataloader_timeout else operation.hang_limit_start_s)
        return Limits(
            step,
            operation.hang_limit_start_s,
            operation.hang_limit_load_s,
            operation.hang_limit_save_s,
            operation.hang_limit_evaluation_s,
        )

    def of(self, section: Section) -> float | None:
        """The limit of ``section`` before anything is learned; None for a section without a limit."""
        match section:
            case Section.SPARE:
                return None  # waits until the job restarts
            case Section.START:
                return self.start
            case Section.LOAD:
                return self.load
            case Section.SAVE:
                return self.save
            case Section.END:
                return max(self.start, self.save)  # waits for background saves
            case Section.EVALUATION:
                return self.evaluation
            case _:
                return self.step


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
    is_confirmed: bool = False
    """Whether the last two samples agree: the words of a heartbeat are read one after the other."""


class Watchdog:
    """The ranks of a node during one attempt, which began at ``started_ns`` of the monotonic clock."""

    def __init__(self, num_ranks: int, started_ns: int, limits: Limits) -> None:
        self.limits = limits
        self._ranks = [_Rank(started_ns) for _ in range(num_ranks)]
        self._sampled_ns = started_ns
        self._gaps: list[tuple[int, int]] = []
        """(end, nanoseconds that do not count) of long gaps between samples."""

    def period(self) -> float:
        """Seconds until the next sample."""
        current = [limit for rank in self._ranks if (limit := self._limit(rank)) is not None]
        shortest = [*current, self.limits.step] if self.limits.step else current
        return min([LONGEST_PERIOD, *(limit / _SAMPLES_PER_LIMIT for limit in shortest)])

    def sample(self, now_ns: int, snapshots: Sequence[Snapshot | None]) -> list[Overrun]:
        """Record one sample of all ranks (None: not attached); the ranks beyond their limit, the longest first."""
        excess = now_ns - self._sampled_ns - int(_LONGEST_GAP / _NS)
        if excess > 0:
            self._gaps.append((now_ns, excess))
        self._sampled_ns = now_ns
        for rank, snapshot in zip(self._ranks, snapshots, strict=True):
            if snapshot is not None:
                self._observe(rank, snapshot, now_ns)
        if self.limits.step == 0:
            return []
        found = [self._overrun(number, rank, now_ns) for number, rank in enumerate(self._ranks)]
        return sorted((one for one in found if one is not None), key=lambda one: -one.seconds)

    def _observe(self, rank: _Rank, snapshot: Snapshot, now_ns: int) -> None:
        before, rank.last = rank.last, snapshot
        rank.is_confirmed = before is not None and _position(before) == _position(snapshot)
        if rank.is_confirmed:
            return
        is_same_span = before is not None and before.entered_ns == snapshot.entered_ns
        # A microbatch or a collective within a span is seen only now.
        rank.progress_ns = now_ns if is_same_span else snapshot.entered_ns
        # Also at the first sample: a rank may attach, train and hang between two of them.
        first = snapshot.first_iteration
        rank.iterations = 0 if first is None else max(0, snapshot.iteration - 1 - first)
        if before is None or snapshot.section in (Section.START, Section.LOAD):
            rank.spans.clear()
            return
        if rank.iterations >= FIRST_ITERATIONS:
            for section, time_ns in snapshot.section_ns.items():
                if (span_ns := time_ns - before.section_ns[section]) > 0:
                    rank.spans[section].append((span_ns - self._missed_since(now_ns - span_ns)) * _NS)

    def _limit(self, rank: _Rank) -> float | None:
        section = Section.START if rank.last is None else rank.last.section
        limit, spans = self.limits.of(section), rank.spans.get(section, ())
        if limit is None or self.limits.step == 0:
            return None
        if section in _LEARNED and rank.iterations < 2 * FIRST_ITERATIONS:
            return max(limit, self.limits.start)
        return max(limit, FACTOR * max(spans, default=0.0))

    def _overrun(self, number: int, rank: _Rank, now_ns: int) -> Overrun | None:
        limit = self._limit(rank)
        if limit is None or not (rank.is_confirmed or rank.last is None):
            return None
        seconds = (now_ns - rank.progress_ns - self._missed_since(rank.progress_ns)) * _NS
        section = Section.START if rank.last is None else rank.last.section
        return Overrun(number, section, seconds, limit) if seconds > limit else None

    def _missed_since(self, moment_ns: int) -> int:
        """Nanoseconds since ``moment_ns`` that do not count."""
        return sum(excess for end, excess in self._gaps if end > moment_ns)


def _position(snapshot: Snapshot) -> tuple[int, ...]:
    """Changes with every progress of a rank."""
    return snapshot.section, snapshot.entered_ns, snapshot.iteration, snapshot.microbatch, snapshot.collectives
