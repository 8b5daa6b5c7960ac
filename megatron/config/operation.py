"""Flags for running unattended."""

from dataclasses import dataclass
from typing import Literal

from megatron.features.faults.flags import FaultFlags
from megatron.features.known_product.flags import KnownProductFlags
from megatron.features.preflight.flags import PreflightFlags
from megatron.features.replay.flags import ReplayFlags
from megatron.features.replicas.flags import ReplicaFlags
from megatron.features.spikes.flags import SpikeFlags
from megatron.features.stragglers.flags import StragglerFlags
from megatron.flags import require_at_least, require_positive, values_of
from megatron.urls import refuse_urls

HANG_LIMITS = (
    "hang_limit_s",
    "hang_limit_data_s",
    "hang_limit_start_s",
    "hang_limit_load_s",
    "hang_limit_save_s",
    "hang_limit_evaluation_s",
)
"""Fields of the watchdog."""


@dataclass(frozen=True)
class AttemptFlags:
    """Restarts, and the files that record them."""

    run_dir: str | None = None
    """Directory for the records of the run: the command and versions, the time of all attempts, their failures
    (docs/operations.md; default: --save)."""
    max_failed_attempts: int = 3
    """End the run with exit code 93 after this many consecutive failed attempts without a new checkpoint in --save; 0
    disables this. Restarts and requeues count, attempts stopped on request do not."""
    inprocess_restart: bool = False
    """After an exception in a rank, call the training again in the same processes, with nvidia-resiliency-ext, instead
    of starting new ones (docs/operations.md)."""

    def check(self) -> None:
        refuse_urls(values_of(self, "run_dir"), "use a directory that all nodes share")
        require_at_least(0, values_of(self, "max_failed_attempts"))


# The base classes have the flags of features (megatron/features); the last one comes first in --help.
@dataclass(frozen=True)
class OperationConfig(
    SpikeFlags,
    StragglerFlags,
    PreflightFlags,
    FaultFlags,
    AttemptFlags,
    KnownProductFlags,
    ReplayFlags,
    ReplicaFlags,
):
    """Restarts, the files that record them, and checks of numbers."""

    on_hang: Literal["restart", "report"] = "restart"
    """At a rank that hangs: end all ranks and start them again, under our launcher alone (restart); or name it, with
    failure.json and its stacks, and end nothing (report), under any launcher: torchrun, NVRx's ft_launcher, srun."""
    hang_limit_s: float = 60.0
    """Under the launcher (megatron.operation.launch), restart all ranks when one has stayed in a section of an
    iteration for longer than this many seconds and than 5 times the longest of its last 20 stays; 0 disables the
    watchdog. Time in which a rank waits for storage does not count, up to --hang-limit-data-s."""
    hang_limit_data_s: float = 600.0
    """The same for waiting for data. With --dataloader-timeout, the limit is at least that."""
    hang_limit_start_s: float | None = None
    """The same for the start of a rank and for its first six iterations, which may compile kernels (default: 1800, and
    after an attempt of the same command 10 times the longest stay, at least 60)."""
    hang_limit_load_s: float | None = None
    """The same for loading a checkpoint (default: as for the start)."""
    hang_limit_save_s: float | None = None
    """The same for a save, while it blocks training (default: 1800, and after three saves 10 times the longest, at
    least 60)."""
    hang_limit_evaluation_s: float | None = None
    """The same for an evaluation (default: as for a save)."""

    def check(self) -> None:
        SpikeFlags.check(self)
        StragglerFlags.check(self)
        FaultFlags.check(self)
        AttemptFlags.check(self)
        KnownProductFlags.check(self)
        ReplayFlags.check(self)
        ReplicaFlags.check(self)
        require_at_least(0, values_of(self, "hang_limit_s"))
        require_positive(values_of(self, *HANG_LIMITS[1:]))
