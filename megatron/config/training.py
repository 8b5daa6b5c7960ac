"""Flags for the training loop, evaluation, the optimizer and the learning-rate schedule."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_fraction, require_positive, values_of
from megatron.update_rules.rule import Flags, rule_flags, update_rules


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, and conditions to stop."""

    # Batch sizes
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
    # Length of the run, and reasons to stop it earlier
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
    # Numbers
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
    mtp_loss_scaling_factor: float = 0.1
    """Factor of the mean loss of the depths of --mtp-num-layers, which is added to the loss (DeepSeek-V3: 0.3, later
    0.1). The reported loss is that of the next token alone; the metrics mtp_1_loss ... are the losses of the depths."""
    # Parameters without updates
    freeze_parameters: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as 'embedding.*' or 'layers.[0-3].*' (in quotes; as in
    a shell, but * also fits dots). Names are those of checkpoints. Frozen parameters have no gradient, no optimizer
    state and no part in the gradient norm; checkpoints hold their weights. To train parameters that were frozen in the
    loaded checkpoint, add --no-load-optim."""
    # Execution
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
        require_at_least(0, values_of(self, "seed", "manual_gc_interval", "mtp_loss_scaling_factor"))
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


if TYPE_CHECKING:
    from megatron.update_rules.adam import AdamFlags
    from megatron.update_rules.muon import MuonFlags
    from megatron.update_rules.sgd import SgdFlags

    OptimizerName = str

    class RuleFlags(SgdFlags, MuonFlags, AdamFlags):
        """The flags of every update rule, which are found at run time."""
else:
    OptimizerName = Literal[tuple(update_rules())]
    RuleFlags = type("RuleFlags", tuple(reversed(rule_flags())), {})


_DECAY_ENDS = ("start_weight_decay", "end_weight_decay")


@dataclass(frozen=True)
class CommonOptimizerFlags(Flags):
    """Flags of every optimizer."""

    optimizer: OptimizerName = "adam"
    """Update rule: adam is AdamW, with decoupled weight decay. muon orthogonalizes the updates of the layers' matrices,
    and is AdamW for the other weights (docs/optimizer.md)."""
    weight_decay: float = 0.01
    """Weight decay: decoupled for adam and muon, added to the gradient for sgd, and not applied to norm weights."""
    start_weight_decay: float | None = None
    """Weight decay at the start of the run, with --weight-decay-incr-style."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the run, with --weight-decay-incr-style."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the weight decay from --start-weight-decay to --end-weight-decay; constant uses --weight-decay."""
    clip_grad: float = 1.0
    """Clip gradients to this global norm; 0 disables clipping."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the accumulated main gradients."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights beside the optimizer state, in the dtype of the master weights:
    after every update, average = decay x average + (1 - decay) x weights. Checkpoints hold it (docs/training.md)."""
    # Host memory
    optimizer_cpu_offload: bool = False
    """Keep master weights, moments and moving average of adam or sgd in host memory, and update them there: every step
    copies gradients to the host, and weights back (docs/optimizer.md)."""
    optimizer_offload_fraction: float = 1.0
    """With --optimizer-cpu-offload: the share of a rank's bytes that is on the host, in whole parameters."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """With --optimizer-cpu-offload: copy on streams of their own, while other parameters are updated."""


@dataclass(frozen=True)
class OptimizerConfig(RuleFlags, CommonOptimizerFlags):
    """Optimizer, weight decay and clipping."""

    @property
    def offloaded_fraction(self) -> float:
        """The share of the optimizer state in host memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    def check(self) -> None:  # type: ignore[override]
        ends = values_of(self, *_DECAY_ENDS)
        require_at_least(0, values_of(self, "weight_decay", "clip_grad") | ends)
        require_fraction(values_of(self, "ema_decay"))
        require_fraction(values_of(self, "optimizer_offload_fraction"), with_one=True)
        varies = self.weight_decay_incr_style != "constant"
        require_flag("--weight-decay-incr-style linear or cosine", varies, changed_flags(self, *_DECAY_ENDS))
        for flag, value in ends.items():
            if varies and value is None:
                raise ConfigError(f"--weight-decay-incr-style {self.weight_decay_incr_style} needs {flag}: add it.")
        is_precision_aware = self.use_precision_aware_optimizer
        require_flag("--use-precision-aware-optimizer", is_precision_aware, changed_flags(self, "main_grads_dtype"))
        dependent = changed_flags(self, "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
        require_flag("--optimizer-cpu-offload", self.optimizer_cpu_offload, dependent)
        if self.optimizer_cpu_offload and not update_rules()[self.optimizer].is_elementwise:
            raise ConfigError(
                f"--optimizer-cpu-offload does not support --optimizer {self.optimizer}, which updates whole matrices: "
                "use adam or sgd, or remove it."
            )
        # Every update rule checks its flags, also where --optimizer names another one.
        for flags in rule_flags():
            flags.check(self, self.optimizer)


_ANNEALING = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")


@dataclass(frozen=True)
class LearningRateConfig:
    """Learning-rate schedule. Lengths in iterations count full global batches."""

    # Rates
    lr: float | None = None
    """Peak learning rate (required for training)."""
    min_lr: float = 0.0
    """Minimum learning rate, reached at the end of the decay."""
    decoupled_lr: float | None = None
    """Peak learning rate of the embedding and the output layer, with the same schedule (default: --lr)."""
    decoupled_min_lr: float | None = None
    """Minimum learning rate of the embedding and the output layer, with --decoupled-lr (default: --min-lr)."""
    # Shape
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warm-up."""
    # Lengths
    lr_decay_iters: int | None = None
    """Iterations of warm-up and decay together (default: --train-iters)."""
    lr_decay_samples: int | None = None
    """Samples of warm-up and decay together, with --train-samples (default: --train-samples)."""
    lr_warmup_iters: int = 0
    """Iterations of the linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of the linear warm-up, with --train-samples."""
    lr_warmup_fraction: float | None = None
    """Length of the warm-up as a fraction of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    # The last phase of WSD
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay phase of --lr-decay-style WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the decay phase of --lr-decay-style WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the decay phase of --lr-decay-style WSD, with --train-samples."""
    # Resume
    override_opt_param_scheduler: bool = False
    """On resume, use the learning-rate schedule of the command line if the checkpoint has a different one."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, use the learning-rate schedule of the checkpoint if the command line has a different one."""

    def check(self) -> None:
        require_at_least(0, values_of(self, "lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples"))
        require_at_least(0, values_of(self, "decoupled_lr", "decoupled_min_lr"))
        require_at_least(1, values_of(self, "lr_decay_iters", "lr_decay_samples", *_ANNEALING))
        require_fraction(values_of(self, "lr_warmup_fraction"))
        if self.lr is not None and not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} must be between 0 and --lr {self.lr}.")
        require_flag("--decoupled-lr", self.decoupled_lr is not None, changed_flags(self, "decoupled_min_lr"))
        if self.decoupled_lr is not None and self.vocabulary_min_lr > self.decoupled_lr:
            raise ConfigError(
                f"--decoupled-lr {self.decoupled_lr} is below its minimum {self.vocabulary_min_lr}: lower "
                "--decoupled-min-lr."
            )
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            raise ConfigError(
                "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples: remove all but one."
            )
        annealing = changed_flags(self, *_ANNEALING)
        require_flag("--lr-decay-style WSD", self.lr_decay_style == "WSD", annealing)
        if self.lr_decay_style == "WSD" and not annealing:
            raise ConfigError(
                "--lr-decay-style WSD needs the length of its decay phase: add --lr-wsd-decay-iters (with "
                "--train-samples: --lr-wsd-decay-samples)."
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: remove "
                "one."
            )

    @property
    def vocabulary_min_lr(self) -> float:
        """Minimum learning rate of the embedding and the output layer under ``--decoupled-lr``."""
        return self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
