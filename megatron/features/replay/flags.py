"""The flag for replays."""

from dataclasses import dataclass

from megatron.flags import require_at_least, values_of

INTERVAL = 1000
"""Iterations between two replays by default: a replay is three microbatches."""


@dataclass(frozen=True)
class ReplayFlags:
    """Replays."""

    replay_interval: int | None = None
    """Run a microbatch again, also on another data-parallel rank, every this many iterations, and compare all bits; 0
    replays only an iteration whose loss or gradient is not finite. GPUs need --deterministic-mode (default: 1000 where
    this is possible and there are several data-parallel ranks, otherwise 0)."""

    def check(self) -> None:
        if self.replay_interval is not None:
            require_at_least(0, values_of(self, "replay_interval"))
