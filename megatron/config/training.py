"""Flags for the training loop and evaluation."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least, require_positive


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, and when to stop."""

    micro_batch_size: int | None = None
    """Sequences that one model copy works on at a time (required for training)."""
    global_batch_size: int | None = None
    """Sequences per iteration (default: --micro-batch-size x data-parallel size)."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """Batch-size ramp: START INCREMENT SAMPLES grows the global batch from START by INCREMENT, in equal steps
    over the first SAMPLES samples, to --global-batch-size."""
    step_batch_size_schedule: str | None = None
    """Batch sizes by tokens consumed, instead of --global-batch-size: "0:768 250B:1536" (suffixes K, M, B, T)."""
    decrease_batch_size_if_needed: bool = False
    """Round the global batch size down to what the ranks divide evenly, instead of refusing it."""
    train_iters: int | None = None
    """Length of the run in iterations (this or --train-samples)."""
    train_samples: int | None = None
    """Length of the run in sequences."""
    exit_interval: int | None = None
    """Save and exit at every iteration divisible by this."""
    exit_duration_in_mins: float | None = None
    """Save and exit after this many minutes."""
    exit_signal_handler: bool = True
    """Finish the iteration, save and exit 0 on SIGINT or --exit-signal."""
    exit_signal: Literal["SIGTERM", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """Signal for a graceful stop, beside SIGINT."""
    seed: int = 1234
    """Seed of the initial weights and of the order of samples."""
    calculate_per_token_loss: bool = True
    """States what is so: the loss is the mean over all unmasked tokens of the global batch, in every layout."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a loss or gradient that is not finite; off, such an iteration makes no update and is counted. Under
    --fp16's dynamic loss scale gradients may overflow, unless the scale is at its floor."""
    iterations_to_skip: tuple[int, ...] = ()
    """Iterations, counted from 1, whose samples are passed over without training, say because a loss spiked there:
    they count, but nothing is reported, evaluated or saved at them."""
    rerun_mode: Literal["disabled"] = "disabled"
    """States what is so: no iteration is run twice to compare its results."""
    te_rng_tracker: bool = True
    """States what is so: nothing draws random numbers while a Llama trains, so that there is nothing to track."""
    use_cpu_initialization: bool = True
    """States what is so in Megatron-LM with this flag: initial weights are the same in every layout (here they are
    computed on the training device all the same)."""
    deterministic_mode: bool = False
    """Use torch's deterministic algorithms alone, an error where there is none. On CPUs a run is deterministic without
    it; on GPUs it costs time, and CUBLAS_WORKSPACE_CONFIG is :4096:8 unless the environment has it."""
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Give memory that torch keeps back to the GPU, where it is short, at the price of time: before every update (1),
    or also after it (2)."""
    manual_gc: bool = False
    """Collect Python's garbage at the same iteration on every rank, instead of whenever each rank happens to."""
    manual_gc_interval: int = 0
    """Iterations between these collections; 0 collects at evaluations and checkpoints only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run: GPUs when there are any, else the CPU."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(
            1,
            {
                "--micro-batch-size": self.micro_batch_size,
                "--global-batch-size": self.global_batch_size,
                "--train-iters": self.train_iters,
                "--train-samples": self.train_samples,
                "--exit-interval": self.exit_interval,
            },
        )
        require_at_least(0, {"--seed": self.seed, "--manual-gc-interval": self.manual_gc_interval})
        require_positive({"--exit-duration-in-mins": self.exit_duration_in_mins})
        if self.train_iters is not None and self.train_samples is not None:
            raise ConfigError("--train-iters and --train-samples exclude each other: give one of them.")
        if not self.calculate_per_token_loss:
            raise ConfigError(
                "--no-calculate-per-token-loss is not supported, because a mean of microbatch means depends on the "
                "layout: remove it; the loss is the mean over all unmasked tokens."
            )
        for flag, is_so in (
            ("--no-te-rng-tracker", self.te_rng_tracker),
            ("--no-use-cpu-initialization", self.use_cpu_initialization),
        ):
            if not is_so:
                raise ConfigError(f"{flag} asks for another way, and there is one: remove it.")
        if any(iteration < 1 for iteration in self.iterations_to_skip):
            raise ConfigError(
                f"--iterations-to-skip {min(self.iterations_to_skip)} must be at least 1, the first iteration."
            )
        if self.manual_gc_interval and not self.manual_gc:
            raise ConfigError("--manual-gc-interval needs --manual-gc.")


@dataclass(frozen=True)
class ValidationConfig:
    """When and how much to evaluate."""

    eval_interval: int | None = None
    """Iterations between evaluations (default: none)."""
    eval_iters: int = 100
    """Batches per evaluation."""
    eval_global_batch_size: int | None = None
    """Sequences per evaluation batch (default: the training batch's at the end of the run)."""
    skip_train: bool = False
    """Evaluate the loaded checkpoint once and exit."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(
            1, {"--eval-interval": self.eval_interval, "--eval-global-batch-size": self.eval_global_batch_size}
        )
        require_at_least(0, {"--eval-iters": self.eval_iters})
