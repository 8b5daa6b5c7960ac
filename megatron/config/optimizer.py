"""Flags for the optimizer, the learning-rate schedule and the precision."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least, require_fraction, require_positive

PrecisionName = Literal["fp32", "bf16", "fp16", "fp64"]
"""The formats in which a model computes."""

FP8_UNITS = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""Sizes of matrices that are multiplied in FP8 are multiples of this, by recipe."""

BF16_SPACING = 2.0**-7
"""Largest relative distance of neighbouring bf16 numbers."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW: weight decay apart from the gradient."""
    weight_decay: float = 0.01
    """Weight decay, apart from the gradient under adam and added to it under sgd; never applied to norms."""
    start_weight_decay: float | None = None
    """Weight decay at the start of the run, with --weight-decay-incr-style."""
    end_weight_decay: float | None = None
    """Weight decay at its end."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from --start-weight-decay to --end-weight-decay; constant is --weight-decay."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment (Llama: 0.95)."""
    adam_eps: float = 1e-8
    """Term added to the denominator (Llama 2: 1e-5)."""
    sgd_momentum: float = 0.9
    """Momentum of --optimizer sgd."""
    use_precision_aware_optimizer: bool = False
    """Let gradients and adam's moments have the formats of the next flags; updates are computed in fp32. (fp16 and
    fp8, which need a scale for each tensor, are not supported.)"""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are accumulated."""
    main_params_dtype: Literal["fp32"] = "fp32"
    """States what is so: master weights are fp32."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of adam's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of adam's second moment."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(
            0, {"--weight-decay": self.weight_decay, "--clip-grad": self.clip_grad, "--adam-eps": self.adam_eps}
        )
        require_fraction(
            {
                "--adam-beta1": self.adam_beta1,
                "--adam-beta2": self.adam_beta2,
                "--sgd-momentum": self.sgd_momentum,
            }
        )
        self._check_weight_decay()
        self._check_formats()

    def _check_weight_decay(self) -> None:
        ends = {"--start-weight-decay": self.start_weight_decay, "--end-weight-decay": self.end_weight_decay}
        require_at_least(0, ends)
        is_constant = self.weight_decay_incr_style == "constant"
        for flag, value in ends.items():
            if is_constant and value is not None:
                raise ConfigError(f"{flag} needs --weight-decay-incr-style linear or cosine: add it, or remove {flag}.")
            if not is_constant and value is None:
                raise ConfigError(f"--weight-decay-incr-style {self.weight_decay_incr_style} needs {flag}: add it.")

    def _check_formats(self) -> None:
        formats = {
            "--main-grads-dtype": self.main_grads_dtype,
            "--exp-avg-dtype": self.exp_avg_dtype,
            "--exp-avg-sq-dtype": self.exp_avg_sq_dtype,
        }
        narrow = [flag for flag, name in formats.items() if name != "fp32"]
        if narrow and not self.use_precision_aware_optimizer:
            raise ConfigError(f"{narrow[0]} needs --use-precision-aware-optimizer: add that, or remove {narrow[0]}.")
        if self.use_precision_aware_optimizer and self.optimizer != "adam":
            raise ConfigError(
                f"--use-precision-aware-optimizer is about adam's moments, which --optimizer {self.optimizer} does "
                "not have: remove one."
            )
        for flag, beta_flag, beta in (
            ("--exp-avg-dtype", "--adam-beta1", self.adam_beta1),
            ("--exp-avg-sq-dtype", "--adam-beta2", self.adam_beta2),
        ):
            if flag in narrow and 1.0 - beta < BF16_SPACING:
                raise ConfigError(
                    f"{flag} bf16 does not go with {beta_flag} {beta}: bf16 rounds to 8 bits, and such a moment "
                    f"changes by less in a step, so that it would never forget: use a {beta_flag} of at most "
                    f"{1.0 - BF16_SPACING:.3f}, or fp32."
                )


@dataclass(frozen=True)
class LearningRateConfig:
    """The learning rate over the run; lengths in iterations mean that many full global batches."""

    lr: float | None = None
    """Peak learning rate (required for training)."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay, and floor."""
    decoupled_lr: float | None = None
    """Peak learning rate of embedding and head, which then have one apart, of the same shape (default: --lr)."""
    decoupled_min_lr: float | None = None
    """Their floor, with --decoupled-lr (default: --min-lr)."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: int | None = None
    """Length of warm-up and decay together (default: --train-iters)."""
    lr_decay_samples: int | None = None
    """The same in samples, for --train-samples (default: --train-samples)."""
    lr_warmup_iters: int = 0
    """Length of the linear warm-up."""
    lr_warmup_samples: int = 0
    """The same in samples, for --train-samples."""
    lr_warmup_fraction: float | None = None
    """Length of the warm-up as a share of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final annealing under --lr-decay-style WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = None
    """Length of that annealing."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples, for --train-samples."""
    override_opt_param_scheduler: bool = False
    """Resume with the schedule of the command line although the checkpoint's differs."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Resume with the checkpoint's schedule although the command line's differs."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(0, {"--lr": self.lr, "--lr-warmup-init": self.lr_warmup_init})
        require_at_least(0, {"--lr-warmup-iters": self.lr_warmup_iters, "--lr-warmup-samples": self.lr_warmup_samples})
        require_fraction({"--lr-warmup-fraction": self.lr_warmup_fraction})
        require_at_least(
            1,
            {
                "--lr-decay-iters": self.lr_decay_iters,
                "--lr-decay-samples": self.lr_decay_samples,
                "--lr-wsd-decay-iters": self.lr_wsd_decay_iters,
                "--lr-wsd-decay-samples": self.lr_wsd_decay_samples,
            },
        )
        if self.lr is not None and not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}.")
        self._check_decoupled()
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            raise ConfigError("--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples: keep one.")
        self._check_annealing()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: keep one."
            )

    def _check_decoupled(self) -> None:
        require_at_least(0, {"--decoupled-lr": self.decoupled_lr, "--decoupled-min-lr": self.decoupled_min_lr})
        if self.decoupled_lr is None:
            if self.decoupled_min_lr is not None:
                raise ConfigError("--decoupled-min-lr needs --decoupled-lr: add it, or remove the flag.")
        elif self.vocabulary_min_lr > self.decoupled_lr:
            raise ConfigError(
                f"--decoupled-lr {self.decoupled_lr} is below its floor of {self.vocabulary_min_lr}: give a lower "
                "--decoupled-min-lr."
            )

    @property
    def vocabulary_min_lr(self) -> float:
        """Floor of the learning rate of embedding and head, where they have one apart."""
        return self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr

    def _check_annealing(self) -> None:
        for flag, value in (
            ("--lr-wsd-decay-iters", self.lr_wsd_decay_iters),
            ("--lr-wsd-decay-samples", self.lr_wsd_decay_samples),
        ):
            if value is not None and self.lr_decay_style != "WSD":
                raise ConfigError(
                    f"{flag} is the length of the last phase of --lr-decay-style WSD: choose that style, or remove it."
                )
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None and self.lr_wsd_decay_samples is None:
            raise ConfigError(
                "--lr-decay-style WSD needs --lr-wsd-decay-iters (with --train-samples: --lr-wsd-decay-samples), the "
                "length of its last phase."
            )


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats; without a flag everything is fp32."""

    bf16: bool = False
    """Compute in bf16; master weights, and by default gradients, in fp32."""
    fp16: bool = False
    """Compute in fp16, with a loss scale; master weights, and by default gradients, in fp32."""
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Multiply in FP8 in the linear layers of the transformer layers, all else under --bf16: in e4m3, or (hybrid) in
    e4m3 with gradients of outputs in e5m2, which has more range and fewer bits. See docs/precision.md."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """Where scales come from: a tensor's magnitudes in past steps (delayed), or the tensor itself (tensorwise).
    blockwise (Hopper) and mxfp8 (Blackwell) scale blocks of a tensor and need --transformer-impl
    transformer_engine."""
    fp8_margin: int = 0
    """Delayed scaling leaves this many powers of two of the range free."""
    fp8_amax_history_len: int = 1
    """Steps whose magnitudes delayed scaling remembers (1024 is common)."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Which of these sets the scale: the newest, or the largest."""
    first_last_layers_bf16: bool = False
    """Keep the linear layers of the first and the last transformer layers in bf16 under --fp8-format."""
    num_layers_at_start_in_bf16: int = 1
    """How many at the start, with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = 1
    """How many at the end, with --first-last-layers-bf16."""
    fp64: bool = False
    """Verification: everything in fp64, so that every layout equals one process to 1e-9."""
    loss_scale: float | None = None
    """Constant factor of the loss in the backward pass, best a power of 2 (default: under --fp16 a dynamic one,
    else 1)."""
    initial_loss_scale: float = 2.0**32
    """First value of --fp16's dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Floor of --fp16's dynamic loss scale."""
    loss_scale_window: int = 1000
    """Updates without an overflow in between after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Which overflow after a doubling is the first that halves the dynamic loss scale; all later ones do."""
    grad_reduce_in_bf16: bool = False
    """Send gradients to other data-parallel ranks in bf16: half the bytes, and sums of 8 bits. Over microbatches they
    are still accumulated in the format of --main-grads-dtype."""
    accumulate_allreduce_grads_in_fp32: bool = True
    """States what is so: gradients are accumulated and reduced in fp32 (fp64 under --fp64), unless
    --main-grads-dtype or --grad-reduce-in-bf16 say otherwise."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        self._check_loss_scale()
        given = [flag for flag, on in (("--bf16", self.bf16), ("--fp16", self.fp16), ("--fp64", self.fp64)) if on]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} exclude each other: remove one of them.")
        if self.fp64 and self.grad_reduce_in_bf16:
            raise ConfigError("--fp64 verifies to 1e-9, which --grad-reduce-in-bf16 rounds away: remove one of them.")
        if not self.accumulate_allreduce_grads_in_fp32:
            raise ConfigError(
                "--no-accumulate-allreduce-grads-in-fp32 is not supported, since gradients are accumulated in fp32: "
                "remove it."
            )
        self._check_fp8()

    def _check_loss_scale(self) -> None:
        require_positive(
            {
                "--loss-scale": self.loss_scale,
                "--initial-loss-scale": self.initial_loss_scale,
                "--min-loss-scale": self.min_loss_scale,
            }
        )
        require_at_least(1, {"--loss-scale-window": self.loss_scale_window, "--hysteresis": self.hysteresis})
        defaults = PrecisionConfig()
        rules = {
            "--initial-loss-scale": self.initial_loss_scale != defaults.initial_loss_scale,
            "--min-loss-scale": self.min_loss_scale != defaults.min_loss_scale,
            "--loss-scale-window": self.loss_scale_window != defaults.loss_scale_window,
            "--hysteresis": self.hysteresis != defaults.hysteresis,
        }
        changed = [flag for flag, is_changed in rules.items() if is_changed]
        if changed and not self.fp16:
            raise ConfigError(
                f"{changed[0]} is about the dynamic loss scale, which only --fp16 has: add that, or remove "
                f"{changed[0]}."
            )
        if changed and self.loss_scale is not None:
            raise ConfigError(
                f"{changed[0]} is about a dynamic loss scale, and --loss-scale {self.loss_scale} is constant: remove "
                "one of them."
            )
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"--min-loss-scale {self.min_loss_scale} is above --initial-loss-scale {self.initial_loss_scale}: "
                "change one of them."
            )

    def _check_fp8(self) -> None:
        require_at_least(1, {"--fp8-amax-history-len": self.fp8_amax_history_len})
        require_at_least(
            0,
            {
                "--fp8-margin": self.fp8_margin,
                "--num-layers-at-start-in-bf16": self.num_layers_at_start_in_bf16,
                "--num-layers-at-end-in-bf16": self.num_layers_at_end_in_bf16,
            },
        )
        default = PrecisionConfig()
        delayed = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
        ends = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        for needed, is_there, names in (
            ("--fp8-format", self.fp8_format is not None, ("fp8_recipe", *delayed, "first_last_layers_bf16", *ends)),
            ("--fp8-recipe delayed", self.fp8_recipe == "delayed", delayed),
            ("--first-last-layers-bf16", self.first_last_layers_bf16, ends),
        ):
            for name in names:
                if not is_there and getattr(self, name) != getattr(default, name):
                    raise ConfigError(
                        f"--{name.replace('_', '-')} has no effect without {needed}: add it, or remove the flag."
                    )
        if self.fp8_format is not None and not self.bf16:
            remedy = "add --bf16" if self.name == "fp32" else f"use --bf16 instead of --{self.name}"
            raise ConfigError(
                f"--fp8-format {self.fp8_format} multiplies in FP8 and does everything else in bf16: {remedy}."
            )

    @property
    def has_dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.fp16 and self.loss_scale is None

    @property
    def name(self) -> PrecisionName:
        """The format in which the model computes."""
        if self.fp64:
            return "fp64"
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"

    @property
    def product_name(self) -> PrecisionName | Literal["fp8"]:
        """The format in which linear layers multiply, by whose peak MFU goes."""
        return self.name if self.fp8_format is None else "fp8"
