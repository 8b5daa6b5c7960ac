"""Flags for metrics and their writers."""

from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of
from megatron.metrics.console import ConsoleFlags, ProgressBarFlags
from megatron.metrics.jsonl import JsonlFlags
from megatron.metrics.tensorboard import TensorBoardFlags
from megatron.metrics.wandb import WandbFlags
from megatron.metrics.writer import writer_flags
from megatron.urls import refuse_urls


# Each base class is a metrics writer with its flags (megatron/metrics); the last one is opened first.
@dataclass(frozen=True)
class LoggingConfig(ProgressBarFlags, WandbFlags, TensorBoardFlags, JsonlFlags, ConsoleFlags):
    """Metrics, their writers and profiles."""

    log_interval: int = 100
    """Iterations between metrics records."""
    tensorboard_log_interval: int = 1
    """Minimum number of iterations between TensorBoard and wandb points; only records of --log-interval are written."""
    log_params_norm: bool = False
    """Log the L2 norm of all weights."""
    log_num_zeros_in_grad: bool = False
    """Log the number of zeros in the gradient."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Detail of the timers: 0 none, 1 phases of an iteration, 2 also the waiting time for data."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Combine the timers of all ranks: maximum, minimum and maximum, or all."""
    log_memory_to_tensorboard: bool = False
    """Log the memory of rank 0's GPU to TensorBoard and wandb: allocated, peak, reserved, number of allocations."""
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
        for writer in writer_flags(self):
            writer.check(self)
