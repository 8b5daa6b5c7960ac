"""Flags for metrics and their writers."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least, require_positive


@dataclass(frozen=True)
class LoggingConfig:
    """What is reported, where, and how often."""

    log_interval: int = 100
    """Iterations between console lines and metrics records."""
    metrics_jsonl: str | None = None
    """File that receives one JSON object per logged iteration and per evaluation."""
    tensorboard_dir: str | None = None
    """Directory for TensorBoard events; enables the TensorBoard writer."""
    tensorboard_log_interval: int = 1
    """Least iterations between TensorBoard and wandb points; there are none between those of --log-interval."""
    wandb_project: str | None = None
    """wandb project; enables the wandb writer. The API key comes from the environment only."""
    wandb_exp_name: str | None = None
    """wandb run name."""
    wandb_entity: str | None = None
    """wandb team or user."""
    wandb_save_dir: str | None = None
    """Directory for wandb's local files (default: --save DIR/wandb, else ./wandb)."""
    log_throughput: bool = True
    """Report TFLOP/s per GPU, tokens/s and MFU."""
    log_params_norm: bool = False
    """Report the L2 norm of all weights."""
    log_num_zeros_in_grad: bool = False
    """Report the number of zeros in the gradient."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Detail of the timer report: 0 none, 1 phases of an iteration, 2 also each kind of work inside them."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """How the timers of all ranks are combined."""
    log_timers_to_tensorboard: bool = True
    """States what is so: timers of --timing-log-level go to TensorBoard and wandb, too."""
    log_validation_ppl_to_tensorboard: bool = True
    """States what is so: perplexities go to TensorBoard and wandb beside validation losses."""
    log_memory_to_tensorboard: bool = False
    """Report the memory of rank 0's GPU to TensorBoard and wandb: allocated, its peak, reserved, and allocations."""
    profile: bool = False
    """Profile some iterations: by torch's profiler with --use-pytorch-profiler, else for nsys (nsys profile
    --capture-range=cudaProfilerApi), which needs a GPU."""
    profile_step_start: int = 10
    """Iterations before those that --profile records."""
    profile_step_end: int = 12
    """Last iteration that --profile records."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks that --profile records (default: rank 0)."""
    use_pytorch_profiler: bool = False
    """--profile writes traces with times and memory of every operation, one file per rank, for TensorBoard,
    chrome://tracing and Perfetto: --tensorboard-dir DIR (else --save DIR) /profile/rank_0.pt.trace.json."""
    peak_tflops: float | None = None
    """Dense peak of one device in TFLOP/s for MFU (default: known for the GPU; on CPU a short matrix product
    is measured)."""
    profile_pipeline: str | None = None
    """File for a measured timeline of the pipeline (Chrome trace JSON, for Perfetto and
    tools/pipeline_schedule.py --measured)."""
    profile_pipeline_iteration: int = 5
    """Iteration that --profile-pipeline records."""
    progress_bar: bool | None = None
    """Progress bar on the terminal (default: only when a person is watching, that is, on a terminal)."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(
            1,
            {
                "--log-interval": self.log_interval,
                "--tensorboard-log-interval": self.tensorboard_log_interval,
                "--profile-pipeline-iteration": self.profile_pipeline_iteration,
            },
        )
        require_positive({"--peak-tflops": self.peak_tflops})
        self._check_profile()
        for flag, is_so in (
            ("--no-log-timers-to-tensorboard", self.log_timers_to_tensorboard),
            ("--no-log-validation-ppl-to-tensorboard", self.log_validation_ppl_to_tensorboard),
        ):
            if not is_so:
                raise ConfigError(f"{flag} leaves out what TensorBoard always gets: remove it.")
        self._check_wandb()

    def _check_wandb(self) -> None:
        wandb_flags = {
            "--wandb-exp-name": self.wandb_exp_name,
            "--wandb-entity": self.wandb_entity,
            "--wandb-save-dir": self.wandb_save_dir,
        }
        for flag, value in wandb_flags.items():
            if value is not None and self.wandb_project is None:
                raise ConfigError(f"{flag} needs --wandb-project, which enables wandb.")

    def _check_profile(self) -> None:
        require_at_least(0, {"--profile-step-start": self.profile_step_start})
        default = LoggingConfig()
        for name in ("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler"):
            if not self.profile and getattr(self, name) != getattr(default, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} has no effect without --profile: add that, or remove {flag}.")
        if self.profile_step_end <= self.profile_step_start:
            raise ConfigError(
                f"--profile-step-end {self.profile_step_end} must be above --profile-step-start "
                f"{self.profile_step_start}: iteration {self.profile_step_start + 1} is the first that is recorded."
            )
