"""Flags for checks of numbers: replicas, replays, a known product."""

from dataclasses import dataclass

from megatron.flags import require_at_least, values_of


@dataclass(frozen=True)
class GuardConfig:
    """Checks that find wrong bits."""

    check_replicas_interval: int = 100
    """Compare the bits of weights, gradients and optimizer state over the ranks that hold the same, and with the bits
    after the last update, every this many iterations, and whenever a checkpoint is saved; 0 disables this."""
    replay_interval: int | None = None
    """Run a microbatch again, also on another data-parallel rank, every this many iterations, and compare all bits; 0
    replays only an iteration whose loss or gradient is not finite. GPUs need --deterministic-mode (default: 1000 where
    this is possible and there are several data-parallel ranks, otherwise 0)."""
    known_answer_interval_s: float = 3600.0
    """Seconds between two tests in which each rank computes a matrix product whose bits are known; the first is before
    the first iteration. 0 disables them."""

    def check_guard(self) -> None:
        """Raise :class:`ConfigError` for the first invalid value."""
        require_at_least(0, values_of(self, "check_replicas_interval", "known_answer_interval_s"))
        if self.replay_interval is not None:
            require_at_least(0, values_of(self, "replay_interval"))
