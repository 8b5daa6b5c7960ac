"""The context-parallel types: what their ranks exchange, and what that requires of the layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

Exchange = Literal["p2p", "allgather", "a2a"]


@dataclass(frozen=True)
class ContextParallelSpec:
    """One value of --cp-comm-type."""

    levels: tuple[Exchange, ...]
    """The exchanges, from groups of neighbouring ranks outwards. All but the last are a2a."""
    summary: str
    """For --help."""

    def level_sizes(self, context_parallel_size: int, hierarchical_sizes: Sequence[int]) -> tuple[int, ...]:
        """Ranks of each level."""
        return tuple(hierarchical_sizes) if len(self.levels) > 1 else (context_parallel_size,)

    def head_divisor(self, level_sizes: Sequence[int]) -> int:
        """The number of ranks over which attention heads are divided."""
        return prod(size for level, size in zip(self.levels, level_sizes, strict=True) if level == "a2a")


CONTEXT_PARALLEL_TYPES = {
    "p2p": ContextParallelSpec(("p2p",), "keys and values in a ring, overlapped with attention"),
    "allgather": ContextParallelSpec(("allgather",), "an all-gather of keys and values"),
    "a2a": ContextParallelSpec(("a2a",), "an all-to-all from a shard of the sequence to a shard of the heads"),
    "a2a+p2p": ContextParallelSpec(
        ("a2a", "p2p"),
        "a2a in groups of neighbouring ranks, p2p across groups: --hierarchical-context-parallel-sizes",
    ),
}

if TYPE_CHECKING:
    ContextParallelType = str
else:
    ContextParallelType = Literal[tuple(CONTEXT_PARALLEL_TYPES)]
    """The choices of --cp-comm-type."""
