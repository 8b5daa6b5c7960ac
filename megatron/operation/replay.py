"""Replays: the same microbatch twice on one rank and once on a data-parallel neighbour must give the same bits.

This is the pure part: which rank is the neighbour, and what the digests of all ranks mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.topology import RankGrid

Kind = Literal["transient", "persistent", "data"]
"""A rank gave different bits for the same input; a rank and its neighbour did; all agree, so the cause is the input or
the model."""


@dataclass(frozen=True)
class RankReplay:
    """The digests of one rank's passes, each of the losses and all gradients, and at the end how many of these are not
    finite."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    neighbour: tuple[int, ...] | None
    """Of the microbatch of the rank before it; None without a neighbour."""


@dataclass(frozen=True)
class Verdict:
    """What the replays of all ranks show."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    """The ranks that may be wrong; none for "data"."""
    is_finite: bool = True
    """Whether all numbers of all passes were finite."""


def neighbour_distance(grid: RankGrid) -> int | None:
    """The distance along ``dp`` at which a rank computes the same bits from the same microbatch; None if there is none.

    Expert-parallel ranks exchange tokens, so such a group must move as a whole to the place of another one.
    """
    if grid.dp == 1:
        return None
    if grid.ep * grid.etp == 1:
        return 1
    stage = grid.group(0, ("tp", "cp", "dp"))
    groups = {rank: grid.group(rank, ("etp", "ep")) for rank in stage}
    for distance in range(1, grid.dp):
        moved = {rank: neighbour(grid, rank, distance) for rank in stage}
        if all(tuple(moved[one] for one in ranks) == groups[moved[rank]] for rank, ranks in groups.items()):
            return distance
    return None


def neighbour(grid: RankGrid, rank: int, distance: int) -> int:
    """The rank ``distance`` replicas further, which has the same part of the model."""
    ranks = grid.group(rank, ("dp",))
    return ranks[(ranks.index(rank) + distance) % len(ranks)]


def judge(grid: RankGrid, distance: int | None, replays: Sequence[RankReplay]) -> Verdict:
    """The verdict on the ``replays`` of all ranks.

    All ranks of a replica exchange activations and gradients, so an error of one shows on several of them, and all
    whose digests differ are named.
    """
    is_finite = all(replay.first[-1] == 0 for replay in replays)
    unsteady = tuple(rank for rank, replay in enumerate(replays) if replay.first != replay.second)
    if unsteady:
        return Verdict("transient", unsteady, is_finite)
    if distance is None:
        return Verdict("data", (), is_finite)
    differing = [
        (rank, other)
        for rank in range(len(replays))
        if replays[rank].first != replays[other := neighbour(grid, rank, distance)].neighbour
    ]
    if not differing:
        return Verdict("data", (), is_finite)
    # A wrong rank disagrees with the rank after it, which repeats its microbatch, and with the one before it. Among two
    # replicas both do.
    sources, targets = {rank for rank, _ in differing}, {other for _, other in differing}
    both = sources & targets
    return Verdict("persistent", tuple(sorted(both or sources | targets)), is_finite)
