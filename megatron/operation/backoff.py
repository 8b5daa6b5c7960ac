"""The pause before a restart."""

from dataclasses import dataclass


@dataclass
class Backoff:
    """Pauses that grow while attempts fail without progress.

    The first restart is immediate: most failures pass. An attempt that fails at once again and again would otherwise
    load the file system and flood the log. Three attempts without a new checkpoint end the run anyway
    (megatron/operation/attempts.py), if it saves any.
    """

    first_s: float = 1.0
    """The first pause, which doubles with every further failure."""
    longest_s: float = 30.0
    failures: int = 0
    """Consecutive attempts that failed without progress."""

    def pause_after_failure(self, made_progress: bool) -> float:
        """Seconds to wait after an attempt that has failed; ``made_progress`` says whether it finished an iteration."""
        self.failures = 0 if made_progress else self.failures + 1
        if self.failures < 2:
            return 0.0
        return min(self.longest_s, self.first_s * 2.0 ** (self.failures - 2))
