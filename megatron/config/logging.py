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
        wandb_flags = {
            "--wandb-exp-name": self.wandb_exp_name,
            "--wandb-entity": self.wandb_entity,
            "--wandb-save-dir": self.wandb_save_dir,
        }
        for flag, value in wandb_flags.items():
            if value is not None and self.wandb_project is None:
                raise ConfigError(f"{flag} needs --wandb-project, which enables wandb.")
