"""Which rank the others wait for, from the evidence of all ranks; pure logic.

Criteria are applied in order of their strength. Each keeps only the ranks that it holds for, if it holds for some and
not for all. The first that keeps a part of the ranks is the reason in the report.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.operation.causes import Cause
from megatron.operation.evidence import (
    ENDED,
    STOPPED,
    UNINTERRUPTIBLE,
    ChildProcess,
    Frame,
    Stack,
    is_waiting_for_ranks,
)
from megatron.operation.heartbeat import Section

_OLDER_SECONDS = 1.0
"""A heartbeat that is older by less proves nothing: ranks of one step stop within it."""
_MOST_BEHIND = 2
"""Ranks of the same role have started equal numbers of collectives, except for the last. Other ranks differ by more."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a rank when one of the ranks has exceeded its limit."""

    rank: int
    local_rank: int
    host: str
    pid: int | None
    section: str
    """Label of the section; ``start`` before the rank has attached."""
    seconds: float
    """Time since the last progress."""
    iteration: int | None = None
    microbatch: int | None = None
    collectives: int | None = None
    state: str | None = None
    """Letter of the process's state; None if there is no such process."""
    children: tuple[ChildProcess, ...] = ()
    """Stopped children, or children that wait in the kernel."""
    stack: Stack | None = None
    """Of the main thread; None if the rank has given none."""
    waits_for_lock: bool = False
    """Whether the main thread tries all the time to get the interpreter's lock."""
    committed_iteration: int | None = None
    is_lost: bool = False
    """Whether the launcher of the rank does not answer, so that nothing else is known."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Evidence":
        """The inverse of :meth:`to_json`."""
        children = tuple(ChildProcess(**child) for child in values["children"])
        stack = None if values["stack"] is None else tuple(Frame(**frame) for frame in values["stack"])
        return Evidence(**{**values, "children": children, "stack": stack})


@dataclass(frozen=True)
class Verdict:
    """The rank that the others wait for (None if nothing distinguishes one), and why."""

    rank: int | None
    cause: Cause
    reason: str


Test = Callable[[Evidence, Sequence[Evidence]], bool]


def find_culprit(evidence: Sequence[Evidence]) -> Verdict:
    """The verdict on one or more ranks. Nobody waits for spare ranks."""
    candidates = [one for one in evidence if one.section != Section.SPARE.label] or list(evidence)
    cause, reason = Cause.HANG, ""
    for test, criterion_cause, sentence in _CRITERIA:
        kept = [one for one in candidates if test(one, candidates)]
        is_proof = criterion_cause is not None  # also of all ranks, and of the only one
        if kept and (len(kept) < len(candidates) or (is_proof and not reason)):
            if not reason:
                cause, reason = criterion_cause or Cause.HANG, sentence(kept[0])
            candidates = kept
        if len(candidates) == 1 and reason:
            break
    if len(candidates) == 1:
        return Verdict(candidates[0].rank, cause, reason or "there is no other rank")
    if reason:
        return Verdict(candidates[0].rank, cause, reason)
    return Verdict(None, Cause.HANG, "nothing distinguishes one of them")


def _is_stopped(one: Evidence, others: Sequence[Evidence]) -> bool:
    return one.state is not None and one.state in STOPPED


def _is_lost(one: Evidence, others: Sequence[Evidence]) -> bool:
    return one.is_lost


def _is_gone(one: Evidence, others: Sequence[Evidence]) -> bool:
    return one.state is None or one.state in ENDED


def _is_uninterruptible(one: Evidence, others: Sequence[Evidence]) -> bool:
    return one.state is not None and one.state in UNINTERRUPTIBLE and one.stack is None


def _has_stopped_child(one: Evidence, others: Sequence[Evidence]) -> bool:
    return any(child.state in STOPPED for child in one.children)


def _has_uninterruptible_child(one: Evidence, others: Sequence[Evidence]) -> bool:
    return any(child.state in UNINTERRUPTIBLE for child in one.children) and one.section == "data"


def _waits_for_lock(one: Evidence, others: Sequence[Evidence]) -> bool:
    return one.waits_for_lock


def _waits_for_nobody(one: Evidence, others: Sequence[Evidence]) -> bool:
    return one.stack is not None and not is_waiting_for_ranks(one.stack)


def _is_behind(one: Evidence, others: Sequence[Evidence]) -> bool:
    iterations = [other.iteration or 0 for other in others]
    return (one.iteration or 0) == min(iterations) < max(iterations)


def _is_in_another_section(one: Evidence, others: Sequence[Evidence]) -> bool:
    (common, count), *_ = Counter(other.section for other in others).most_common()
    return 2 * count > len(others) and one.section != common


def _has_other_collectives(one: Evidence, others: Sequence[Evidence]) -> bool:
    """The odd one, which has left a collective out or started one too many; without a majority, the one behind."""
    counts = [other.collectives or 0 for other in others]
    if not 0 < max(counts) - min(counts) <= _MOST_BEHIND:
        return False
    (common, number), *_ = Counter(counts).most_common()
    own = one.collectives or 0
    return own != common if 2 * number > len(counts) else own == min(counts)


def _has_another_stack(one: Evidence, others: Sequence[Evidence]) -> bool:
    (common, count), *_ = Counter(other.stack for other in others).most_common()
    return 2 * count > len(others) and one.stack != common


def _is_oldest(one: Evidence, others: Sequence[Evidence]) -> bool:
    times = sorted((other.seconds for other in others), reverse=True)
    return len(times) > 1 and one.seconds == times[0] and times[0] - times[1] > _OLDER_SECONDS


def _child(one: Evidence, states: str) -> str:
    child = next(child for child in one.children if child.state in states)
    return f"its {child.role} {child.pid}"


_CRITERIA: Sequence[tuple[Test, Cause | None, Callable[[Evidence], str]]] = (
    (_is_lost, Cause.NODE_LOST, lambda one: "the launcher of its node does not answer: the node or its link is lost"),
    (_is_gone, Cause.KILLED, lambda one: "its process has ended"),
    (_is_stopped, Cause.STOPPED_PROCESS, lambda one: f"its process is stopped (state {one.state})"),
    (
        _has_stopped_child,
        Cause.STOPPED_PROCESS,
        lambda one: f"{_child(one, STOPPED)} is stopped",
    ),
    (
        _is_uninterruptible,
        Cause.HANG,
        lambda one: "its process waits in the kernel (state D): a file system or a driver does not answer",
    ),
    (
        _has_uninterruptible_child,
        Cause.HANG,
        lambda one: f"{_child(one, UNINTERRUPTIBLE)} waits in the kernel (state D)",
    ),
    (_waits_for_lock, Cause.HANG, lambda one: "another of its threads holds the interpreter's lock"),
    (_waits_for_nobody, None, lambda one: "it does not wait for other ranks, as the others do"),
    (_is_behind, None, lambda one: f"it is still in iteration {one.iteration}"),
    (_is_in_another_section, None, lambda one: "it is in another section than the others"),
    (_has_other_collectives, None, lambda one: "its number of collectives differs from the others'"),
    (_has_another_stack, None, lambda one: "its stack differs from the others'"),
    (_is_oldest, None, lambda one: "its last progress is the oldest"),
)
"""Test, cause (if the test alone is proof, also where it holds for all ranks), and reason."""
