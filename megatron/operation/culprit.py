"""Which rank the others wait for, from the evidence of all ranks; pure logic.

Criteria are applied in order of their strength. Each keeps only the ranks that it holds for, if it holds for some and
not for all. The first that keeps a part of the ranks is the reason in the report:

    rank   section           stack        collectives     criterion            keeps
    0      grads-reduce      all_reduce   501        ─┐
    1      forward-backward  matmul       500         ├─> waits for nobody ──> 1   "it does not wait for other ranks"
    2      grads-reduce      all_reduce   501        ─┘
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megatron.errors import ExitCode
from megatron.operation.causes import Cause
from megatron.operation.evidence import (
    ENDED,
    STOPPED,
    UNINTERRUPTIBLE,
    Evidence,
    excerpt,
    group_by_stack,
    is_waiting_for_ranks,
)
from megatron.operation.failure import MOST_LISTED, Failure, list_ranks
from megatron.operation.heartbeat import Section

# A heartbeat that is older by less proves nothing: ranks of one step stop within it.
_OLDER_SECONDS = 1.0
# Ranks of the same role have started equal numbers of collectives, except for the last. Other ranks differ by more.
_MOST_BEHIND = 2


@dataclass(frozen=True)
class Verdict:
    """The rank that the others wait for (None if nothing distinguishes one), and why."""

    rank: int | None
    cause: Cause
    reason: str


def find_culprit(evidence: Sequence[Evidence]) -> Verdict:
    """The verdict on one or more ranks. No rank waits for spare ranks."""
    candidates = [one for one in evidence if one.section != Section.SPARE.label] or list(evidence)
    cause, reason = Cause.HANG, ""
    for criterion in _CRITERIA:
        kept = [one for one in candidates if criterion.holds(one, candidates)]
        is_proof = criterion.cause is not None  # also of all ranks, and of the only one
        if kept and (len(kept) < len(candidates) or (is_proof and not reason)):
            if not reason:
                cause, reason = criterion.cause or Cause.HANG, criterion.reason(kept[0])
            candidates = kept
        if len(candidates) == 1 and reason:
            break
    if reason or len(candidates) == 1:
        return Verdict(candidates[0].rank, cause, reason or "there is no other rank")
    return Verdict(None, Cause.HANG, "nothing distinguishes one of them")


class _Criterion(NamedTuple):
    # Whether it holds for a rank, among all candidates.
    holds: Callable[[Evidence, Sequence[Evidence]], bool]
    reason: Callable[[Evidence], str]
    # Of a criterion that alone is proof, also where it holds for all ranks.
    cause: Cause | None = None


def _is_behind(one: Evidence, others: Sequence[Evidence]) -> bool:
    iterations = [other.iteration or 0 for other in others]
    return (one.iteration or 0) == min(iterations) < max(iterations)


def _differs_in(name: str, one: Evidence, others: Sequence[Evidence]) -> bool:
    """Whether most have another value of the field ``name`` than this rank."""
    (common, count), *_ = Counter(getattr(other, name) for other in others).most_common()
    return 2 * count > len(others) and getattr(one, name) != common


def _has_other_collectives(one: Evidence, others: Sequence[Evidence]) -> bool:
    """The odd one, which has left a collective out or started one too many; without a majority, the one behind."""
    counts = [other.collectives or 0 for other in others]
    if not 0 < max(counts) - min(counts) <= _MOST_BEHIND:
        return False
    (common, number), *_ = Counter(counts).most_common()
    own = one.collectives or 0
    return own != common if 2 * number > len(counts) else own == min(counts)


def _is_oldest(one: Evidence, others: Sequence[Evidence]) -> bool:
    times = sorted((other.seconds for other in others), reverse=True)
    return len(times) > 1 and one.seconds == times[0] and times[0] - times[1] > _OLDER_SECONDS


_CRITERIA = (
    # Proofs: what the kernel or a launcher says of a process.
    _Criterion(
        lambda one, _: one.is_lost,
        lambda one: "the launcher of its node does not answer: the node or its link is lost",
        Cause.NODE_LOST,
    ),
    _Criterion(
        lambda one, _: one.state is None or one.state in ENDED, lambda one: "its process has ended", Cause.KILLED
    ),
    _Criterion(
        lambda one, _: one.state is not None and one.state in STOPPED,
        lambda one: f"its process is stopped (state {one.state})",
        Cause.STOPPED_PROCESS,
    ),
    _Criterion(
        lambda one, _: bool(one.children),
        lambda one: f"its {one.children[0].role} {one.children[0].pid} is stopped",
        Cause.STOPPED_PROCESS,
    ),
    _Criterion(
        lambda one, _: one.state is not None and one.state in UNINTERRUPTIBLE and one.stack is None,
        lambda one: "its process waits in the kernel (state D): a file system or a driver does not answer",
        Cause.HANG,
    ),
    _Criterion(
        lambda one, _: one.waits_for_lock, lambda one: "another of its threads holds the interpreter's lock", Cause.HANG
    ),
    # Comparisons with the other ranks, the strongest first.
    _Criterion(
        lambda one, _: one.stack is not None and not is_waiting_for_ranks(one.stack),
        lambda one: "it does not wait for other ranks, as the others do",
    ),
    _Criterion(_is_behind, lambda one: f"it is still in iteration {one.iteration}"),
    _Criterion(partial(_differs_in, "section"), lambda one: "it is in another section than the others"),
    _Criterion(_has_other_collectives, lambda one: "its number of collectives differs from the others'"),
    _Criterion(partial(_differs_in, "stack"), lambda one: "its stack differs from the others'"),
    _Criterion(_is_oldest, lambda one: "its last progress is the oldest"),
)


# --- the report ----------------------------------------------------------------------------------------------


def failure_of_hang(verdict: Verdict, evidence: Sequence[Evidence], seconds: float, limit: float) -> Failure:
    """The report on the ranks of ``evidence``, one of which has made no progress for ``seconds``."""
    culprit = next((one for one in evidence if one.rank == verdict.rank), None)
    if culprit is None:
        section = _only([one.section for one in evidence])
        what = f"The ranks hang{f' in {section}' if section else ''}"
        place: dict[str, Any] = {"section": section}
    else:
        where = culprit.section if not culprit.iteration else f"{culprit.section} of iteration {culprit.iteration}"
        what = f"Rank {culprit.rank} on {culprit.host} hangs in {where}"
        names = ("rank", "local_rank", "host", "iteration", "microbatch", "section")
        place = {name: getattr(culprit, name) for name in names}
        place["stack"] = None if culprit.stack is None else excerpt(culprit.stack)
    groups = tuple(
        {
            "ranks": ranks,
            "section": _only([one.section for one in evidence if one.rank in ranks]),
            "stack": None if stack is None else excerpt(stack),
        }
        for ranks, stack in group_by_stack({one.rank: one.stack for one in evidence})
    )
    found = f"no progress for {seconds:.1f} s, the limit is {limit:.1f} s"
    return Failure(
        cause=verdict.cause,
        message=f"{what}: {verdict.reason}; {found}.{_different_waits(evidence)}",
        exit_code=ExitCode.CRASH,
        groups=groups,
        last_checkpoint=max((one.committed_iteration or 0 for one in evidence), default=0) or None,
        **place,
    )


def _only(values: Sequence[str]) -> str | None:
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
    for ranks, stack in groups[:MOST_LISTED]:
        assert stack is not None
        caller = next((frame for frame in stack if not is_waiting_for_ranks((frame,))), stack[-1])
        places.append(f"{list_ranks(ranks)} at {caller} (collective {counts[ranks[0]]})")
    return f" All ranks wait for others, in different collectives: {'; '.join(places)}."
