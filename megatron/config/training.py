"""Flags for the training loop and evaluation."""

from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, and conditions to stop."""

    micro_batch_size: int | None = None
    """Sequences per microbatch of a model replica (required for training)."""
    global_batch_size: int | None = None
    """Sequences per iteration (default: --micro-batch-size x data-parallel size)."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """Batch-size ramp-up START INCREMENT SAMPLES: increase the global batch size from START to --global-batch-size in
    steps of INCREMENT, evenly over the first SAMPLES samples."""
    step_batch_size_schedule: str | None = None
    """Global batch sizes by consumed tokens, instead of --global-batch-size: "0:768 250B:1536" (suffixes K, M, B,
    T)."""
    decrease_batch_size_if_needed: bool = False
    """Round the global batch size down to a multiple of --micro-batch-size x data-parallel size, instead of failing."""
    train_iters: int | None = None
    """Length of the run in iterations (this or --train-samples)."""
    train_samples: int | None = None
    """Length of the run in sequences."""
    exit_interval: int | None = None
    """Save and exit with code 75 at every iteration divisible by this."""
    exit_duration_in_mins: float | None = None
    """Save and exit with code 75 after this many minutes."""
    exit_signal_handler: bool = True
    """Finish the iteration, save and exit with code 75 on SIGINT, SIGTERM or --exit-signal."""
    exit_signal: Literal["SIGTERM", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """Signal for a graceful stop, in addition to SIGINT and SIGTERM."""
    seed: int = 1234
    """Seed of the initial weights and of the sample order."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a loss or gradient that is not finite. With --no-check-for-nan-in-loss-and-grad such an iteration is
    skipped without an update and counted. With the dynamic loss scale of --fp16, overflowing gradients skip the update
    and stop the run only at --min-loss-scale."""
    iterations_to_skip: tuple[int, ...] = ()
    """Iterations, counted from 1, to skip without training, for example because of a loss spike: their samples are
    consumed, but nothing is logged, evaluated or saved."""
    z_loss_multiplier: float | None = None
    """Add this times the squared log-sum-exp of a token's logits to its loss, so that the log-sum-exp stays near zero
    (PaLM: 1e-4; OLMo 2: 1e-5). The reported loss is the cross entropy alone; the metric lm_z_loss is the mean of the
    square, without the multiplier."""
    freeze_parameters: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as 'embedding.*' or 'layers.[0-3].*' (in quotes; as in
    a shell, but * also fits dots). Names are those of checkpoints. Frozen parameters have no gradient, no optimizer
    state and no part in the gradient norm; checkpoints hold their weights. To train parameters that were frozen in the
    loaded checkpoint, add --no-load-optim."""
    deterministic_mode: bool = False
    """Use only torch's deterministic algorithms, and fail where there is none. CPU runs are always deterministic. On
    GPUs it costs time, and CUBLAS_WORKSPACE_CONFIG is set to :4096:8 unless the environment sets it."""
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """Empty torch's cache of GPU memory before every update (1), or before and after it (2). Reduces fragmentation and
    costs time."""
    manual_gc: bool = False
    """Run Python's garbage collection at the same iterations on all ranks, instead of automatically on each."""
    manual_gc_interval: int = 0
    """Iterations between garbage collections with --manual-gc; 0 collects only at evaluations and checkpoints."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: auto chooses GPUs if there are any, otherwise the CPU."""

    def check(self) -> None:
        sizes = ("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "exit_interval")
        require_at_least(1, values_of(self, *sizes))
        require_at_least(0, values_of(self, "seed", "manual_gc_interval"))
        require_positive(values_of(self, "exit_duration_in_mins", "z_loss_multiplier"))
        if self.train_iters is not None and self.train_samples is not None:
            raise ConfigError("--train-iters and --train-samples exclude each other: remove one of them.")
        if any(iteration < 1 for iteration in self.iterations_to_skip):
            raise ConfigError(
                f"--iterations-to-skip {min(self.iterations_to_skip)} must be at least 1: iterations count from 1."
            )
        require_flag("--manual-gc", self.manual_gc, changed_flags(self, "manual_gc_interval"))


@dataclass(frozen=True)
class ValidationConfig:
    """Evaluation interval and size."""

    eval_interval: int | None = None
    """Iterations between evaluations (default: none)."""
    eval_iters: int = 100
    """Batches per evaluation."""
    eval_global_batch_size: int | None = None
    """Sequences per evaluation batch (default: the global batch size at the end of the run)."""
    skip_train: bool = False
    """Evaluate the loaded checkpoint once and exit. It needs no training data, --train-iters or --lr."""
    full_validation: bool = False
    """Evaluate every sample of the validation and test sets once, instead of --eval-iters batches."""
    multiple_validation_sets: bool = False
    """Evaluate every corpus of --valid-data-path (or of the validation split of --data-path) by itself."""
    validation_set_names: tuple[str, ...] = ()
    """Names of the sets of --multiple-validation-sets in logs and metrics (default: 0, 1, ...)."""
    eval_ema: bool = False
    """Evaluate the moving average of --ema-decay instead of the weights; with --skip-train the moving average of the
    checkpoint."""

    def check(self) -> None:
        require_at_least(1, values_of(self, "eval_interval", "eval_global_batch_size"))
        names = self.validation_set_names
        named = changed_flags(self, "validation_set_names")
        require_flag("--multiple-validation-sets", self.multiple_validation_sets, named)
        if len(set(names)) < len(names):
            raise ConfigError("--validation-set-names has a name twice: give every set a name of its own.")
        require_at_least(0, values_of(self, "eval_iters"))
