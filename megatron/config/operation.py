"""Flags for running unattended."""

from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.features.faults.flags import parse_faults
from megatron.features.replicas.flags import GuardConfig
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of
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
class OperationConfig(GuardConfig):
    """Restarts, the files that record them, and checks of numbers."""

    run_dir: str | None = None
    """Directory for the records of the run: the command and versions, the time of all attempts, their failures
    (docs/operations.md; default: --save)."""
    max_failed_attempts: int = 3
    """End the run with exit code 93 after this many consecutive failed attempts without a new checkpoint in --save; 0
    disables this. Restarts and requeues count, attempts stopped on request do not."""
    inprocess_restart: bool = False
    """After an exception in a rank, call the training again in the same processes, with nvidia-resiliency-ext, instead
    of starting new ones (docs/operations.md)."""
    inject_fault: str | None = None
    """For tests of a cluster and of its recovery: break this run on purpose, as in kill@12:rank1,slow@30+10:rank0:1.3
    (docs/operations.md). Refused unless the environment variable MEGATRON_FAULTS is 1."""
    preflight: bool = False
    """Before the model is built, check the nodes: disk, clocks, memory, GPUs, a product and a sum of known bits, and
    the links between the nodes (docs/operations.md). Takes up to 60 s; a failure ends the run with exit code 2."""
    straggler_threshold: float = 1.2
    """Warn of a rank that was busy this many times as long as the median of the ranks with the same work, in 90 % of
    the log intervals of the last minute, and at least of the last 5; 0 disables this."""
    nan_policy: Literal["stop", "skip", "rollback"] = "stop"
    """At a loss or gradient that is not finite: stop, as --check-for-nan-in-loss-and-grad describes; or skip the update
    on all ranks and count it, until more than 3 in a row or more than 10 of the last 1,000 are skipped, and then exit
    with code 93 (skip) or return to an earlier checkpoint (rollback)."""
    spike_policy: Literal["log", "skip", "rollback"] = "log"
    """At a spike (--spike-window): log it; skip the update on all ranks, with the limits of --nan-policy; or return at
    once to a checkpoint from before the spike (rollback), which needs --save and --save-interval."""
    spike_window: int = 100
    """Number of updates with which each loss and gradient norm is compared. A spike is a robust z-score of a logarithm
    above 6 in three iterations in a row, or one value above 10 times the largest of the window. There are no spikes
    before so many updates."""
    rollback_margin: int = 50
    """A rollback leaves out the samples from this many iterations before the spike until the iteration at which it was
    noticed."""
    max_rollbacks: int = 3
    """Rollbacks of the whole run, after which the next one ends it with exit code 93."""
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

    @property
    def rolls_back(self) -> bool:
        """Whether a policy returns to earlier checkpoints."""
        return "rollback" in (self.nan_policy, self.spike_policy)

    @property
    def decides_by_norm(self) -> bool:
        """Whether a policy decides by the gradient norm of an iteration whether there is an update."""
        return self.spike_policy != "log" or self.nan_policy != "stop"

    def check(self) -> None:
        require_at_least(10, values_of(self, "spike_window"))
        require_at_least(1, values_of(self, "max_rollbacks"))
        require_at_least(0, values_of(self, "rollback_margin"))
        dependent = changed_flags(self, "rollback_margin", "max_rollbacks")
        require_flag("--spike-policy rollback or --nan-policy rollback", self.rolls_back, dependent)
        refuse_urls(values_of(self, "run_dir"), "use a directory that all nodes share")
        require_at_least(0, values_of(self, "max_failed_attempts"))
        if self.inject_fault is not None:
            parse_faults(self.inject_fault)
        if self.straggler_threshold != 0 and self.straggler_threshold <= 1:
            raise ConfigError(
                f"--straggler-threshold {self.straggler_threshold} would warn of every rank: use a number above 1, or "
                "0 to disable the warning."
            )
        require_at_least(0, values_of(self, "hang_limit_s"))
        require_positive(values_of(self, *HANG_LIMITS[1:]))
        self.check_guard()
