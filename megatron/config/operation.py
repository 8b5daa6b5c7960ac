"""Flags for running unattended, and for what a run records: metrics, their writers, profiles."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron.errors import ConfigError
from megatron.features.faults.flags import FaultFlags
from megatron.features.known_product.flags import KnownProductFlags
from megatron.features.layer_metrics.flags import LayerMetricsFlags
from megatron.features.preflight.flags import PreflightFlags
from megatron.features.record_tensors.flags import RecordTensorsFlags
from megatron.features.replay.flags import ReplayFlags
from megatron.features.replicas.flags import ReplicaFlags
from megatron.features.spikes.flags import SpikeFlags
from megatron.features.stragglers.flags import StragglerFlags
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of
from megatron.metrics.console import ConsoleFlags, ProgressBarFlags
from megatron.metrics.jsonl import JsonlFlags
from megatron.metrics.tensorboard import TensorBoardFlags
from megatron.metrics.wandb import WandbFlags
from megatron.metrics.writer import writer_flags
from megatron.urls import refuse_urls


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
    """Restart all ranks when one has waited for data for longer than this many seconds, and than 5 times the longest of
    its last 20 waits. With --dataloader-timeout, the limit is at least that."""
    hang_limit_start_s: float | None = None
    """Restart all ranks when the start of one, or one of its first six iterations, which may compile kernels, takes
    longer than this many seconds (default: 1800, and after an attempt of the same command 10 times the longest stay, at
    least 60)."""
    hang_limit_load_s: float | None = None
    """Restart all ranks when one loads a checkpoint for longer than this many seconds (default: as for the start)."""
    hang_limit_save_s: float | None = None
    """Restart all ranks when a save blocks the training of one for longer than this many seconds (default: 1800, and
    after three saves 10 times the longest, at least 60)."""
    hang_limit_evaluation_s: float | None = None
    """Restart all ranks when one evaluates for longer than this many seconds (default: as for a save)."""

    def check(self) -> None:
        bases: tuple[Any, ...] = OperationConfig.__bases__
        for flags in bases:
            flags.check(self)
        require_at_least(0, values_of(self, "hang_limit_s"))
        require_positive(values_of(self, *HANG_LIMITS[1:]))


HANG_LIMITS = [field.name for field in fields(OperationConfig) if field.name.startswith("hang_limit")]
"""Fields of the watchdog; the first one turns it off."""


# The base classes are features, and metrics writers with their flags (megatron/metrics); the last one is opened first.
@dataclass(frozen=True)
class LoggingConfig(
    RecordTensorsFlags, LayerMetricsFlags, ProgressBarFlags, WandbFlags, TensorBoardFlags, JsonlFlags, ConsoleFlags
):
    """Metrics, their writers and profiles."""

    # Records
    log_interval: int = 100
    """Iterations between metrics records."""
    tensorboard_log_interval: int = 1
    """Minimum number of iterations between TensorBoard and wandb points; only records of --log-interval are written."""
    log_params_norm: bool = False
    """Log the L2 norm of all weights."""
    log_num_zeros_in_grad: bool = False
    """Log the number of zeros in the gradient."""
    # Timers
    timing_log_level: Literal[0, 1, 2] = 0
    """Detail of the timers: 0 none, 1 phases of an iteration, 2 also the waiting time for data."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Combine the timers of all ranks: maximum, minimum and maximum, or all."""
    log_memory_to_tensorboard: bool = False
    """Log the memory of rank 0's GPU to TensorBoard and wandb: allocated, peak, reserved, number of allocations."""
    # Profiles of operations and of memory
    profile: bool = False
    """Profile some iterations: with torch's profiler under --use-pytorch-profiler, otherwise for nsys (nsys profile
    --capture-range=cudaProfilerApi), which needs a GPU."""
    profile_step_start: int = 10
    """--profile records the iterations after this one."""
    profile_step_end: int = 12
    """--profile records up to this iteration."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks that --profile records (default: rank 0)."""
    use_pytorch_profiler: bool = False
    """--profile writes one trace file per rank with the time and memory of every operation, for TensorBoard,
    chrome://tracing and Perfetto: DIR/profile/rank_0.pt.trace.json, DIR of --tensorboard-dir, otherwise of --save."""
    record_memory_history: bool = False
    """Record every allocation and free of GPU memory on the last rank with its call stack, from before the model is
    built, and write them to --memory-snapshot-path at every --log-interval and at the end, also after an error."""
    memory_snapshot_path: str = "snapshot.pickle"
    """File of --record-memory-history, for https://pytorch.org/memory_viz."""
    peak_tflops: float | None = None
    """Dense peak of one device in TFLOP/s, for MFU (default: of the known GPU; on CPUs a short matrix multiplication is
    measured)."""
    # Timeline of the pipeline
    profile_pipeline: str | None = None
    """File for the measured timeline of the pipeline (Chrome trace JSON, for Perfetto and tools/pipeline_schedule.py
    --measured)."""
    profile_pipeline_iteration: int = 5
    """Iteration that --profile-pipeline records."""

    def check(self) -> None:
        require_at_least(1, values_of(self, "log_interval", "tensorboard_log_interval", "profile_pipeline_iteration"))
        require_positive(values_of(self, "peak_tflops"))
        refuse_urls(
            values_of(self, "profile_pipeline", "memory_snapshot_path"), "use a local file, and copy it afterwards"
        )
        require_at_least(0, values_of(self, "profile_step_start"))
        window = ("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler")
        require_flag("--profile", self.profile, changed_flags(self, *window))
        snapshot = changed_flags(self, "memory_snapshot_path")
        require_flag("--record-memory-history", self.record_memory_history, snapshot)
        if self.profile_step_end <= self.profile_step_start:
            raise ConfigError(
                f"--profile-step-end {self.profile_step_end} must be above --profile-step-start "
                f"{self.profile_step_start}: raise the former or lower the latter."
            )
        LayerMetricsFlags.check(self)
        RecordTensorsFlags.check(self)
        for writer in writer_flags(self):
            writer.check(self)
