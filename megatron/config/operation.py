"""Flags for running unattended."""

from dataclasses import dataclass

from megatron.flags import values_of
from megatron.ranges import require_at_least
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class OperationConfig:
    """Restarts, and the files that record them."""

    run_dir: str | None = None
    """Directory for failed_attempts.json, which counts the failed attempts of the run (default: --save)."""
    max_failed_attempts: int = 3
    """End the run with exit code 93 after this many consecutive failed attempts without a new checkpoint in --save; 0
    disables this. Restarts and requeues count, attempts stopped on request do not."""

    def check(self) -> None:
        refuse_urls(values_of(self, "run_dir"), "use a directory that all nodes share")
        require_at_least(0, values_of(self, "max_failed_attempts"))
