"""Flags for the optimizer and the learning-rate schedule."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_fraction, values_of
from megatron.update_rules.rule import Flags, rule_flags, update_rules

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


@dataclass(frozen=True)
class OptimizerConfig(RuleFlags, CommonOptimizerFlags):
    """Optimizer, weight decay and clipping."""

    def check(self) -> None:  # type: ignore[override]
        ends = values_of(self, *_DECAY_ENDS)
        require_at_least(0, values_of(self, "weight_decay", "clip_grad") | ends)
        require_fraction(values_of(self, "ema_decay"))
        varies = self.weight_decay_incr_style != "constant"
        require_flag("--weight-decay-incr-style linear or cosine", varies, changed_flags(self, *_DECAY_ENDS))
        for flag, value in ends.items():
            if varies and value is None:
                raise ConfigError(f"--weight-decay-incr-style {self.weight_decay_incr_style} needs {flag}: add it.")
        is_precision_aware = self.use_precision_aware_optimizer
        require_flag("--use-precision-aware-optimizer", is_precision_aware, changed_flags(self, "main_grads_dtype"))
        for flags in rule_flags():
            flags.check(self, self.optimizer)


_ANNEALING = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")


@dataclass(frozen=True)
class LearningRateConfig:
    """Learning-rate schedule. Lengths in iterations count full global batches."""

    lr: float | None = None
    """Peak learning rate (required for training)."""
    min_lr: float = 0.0
    """Minimum learning rate, reached at the end of the decay."""
    decoupled_lr: float | None = None
    """Peak learning rate of the embedding and the output layer, with the same schedule (default: --lr)."""
    decoupled_min_lr: float | None = None
    """Minimum learning rate of the embedding and the output layer, with --decoupled-lr (default: --min-lr)."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warm-up."""
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
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay phase of --lr-decay-style WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the decay phase of --lr-decay-style WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the decay phase of --lr-decay-style WSD, with --train-samples."""
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
