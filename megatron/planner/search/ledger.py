"""A sum of allocated bytes, and its peak."""

from megatron.planner.memory import CUDA_BLOCK


def block(size: int) -> int:
    """``size`` bytes rounded up as torch's allocator on GPUs does."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK


class Ledger:
    """Bytes that are allocated now, and the most so far."""

    def __init__(self, now: int = 0) -> None:
        self.now = self.peak = self._highest = now

    def add(self, *sizes: int) -> None:
        """Allocate one after another."""
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def drop(self, *sizes: int) -> None:
        """Free."""
        self.now -= sum(sizes)

    def pulse(self, *sizes: int) -> None:
        """Allocate one after another, and free all."""
        self.peak = max(self.peak, self.now + sum(sizes))

    def restart(self) -> int:
        """The peak so far; a new one begins."""
        peak, self.peak = self.peak, self.now
        self._highest = max(self._highest, peak)
        return peak

    @property
    def highest(self) -> int:
        """The peak over all restarts."""
        return max(self._highest, self.peak)
