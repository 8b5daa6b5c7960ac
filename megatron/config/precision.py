"""Flags for number formats, and for the kernels that compute in them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of

# Precisions in which the model computes.
PrecisionName = Literal["fp32", "bf16", "fp16", "fp64"]

# Sizes of FP8 matrices must be multiples of this, by recipe.
FP8_UNITS = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
FP8_BLOCK = 128
"""The same under blockwise in local layers, whose ranks have whole blocks."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision; the default is fp32."""

    # Format of the model; fp32 without a flag
    bf16: bool = False
    """Compute in bf16, with master weights and by default gradients in fp32."""
    fp16: bool = False
    """Compute in fp16 with a loss scale, with master weights and by default gradients in fp32."""
    # FP8 linear layers
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Compute the linear layers of the transformer layers in FP8, and everything else in bf16 (needs --bf16): e4m3, or
    hybrid with e4m3 for inputs and weights and e5m2 for output gradients. See docs/precision.md."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """FP8 scaling: from the tensor's amax in past steps (delayed), from its current amax (tensorwise), or from the
    current amax of each block of 128 or 128 x 128 (blockwise, Hopper; local layers need --fp8-format e4m3). mxfp8
    (Blackwell) has a scale per block of 32 and needs --transformer-impl transformer_engine."""
    fp8_margin: int = 0
    """Delayed scaling: divide the scale by two to this power."""
    fp8_amax_history_len: int = 1
    """Delayed scaling: steps in the amax history (1024 is common)."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Delayed scaling: compute the scale from the most recent or the largest amax of the history."""
    fp8_param_gather: bool = False
    """Keep the weights of FP8 linear layers in FP8 alone, quantised from the master weights and all-gathered in FP8. It
    needs a sharded optimizer (--use-distributed-optimizer). See docs/precision.md."""
    first_last_layers_bf16: bool = False
    """Compute the linear layers of the first and the last transformer layers in bf16 under --fp8-format."""
    num_layers_at_start_in_bf16: int = 1
    """Number of first layers in bf16, with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = 1
    """Number of last layers in bf16, with --first-last-layers-bf16."""
    # Verification
    fp64: bool = False
    """Compute everything in fp64, to verify that every layout equals one process to 1e-9."""
    # Loss scale of fp16
    loss_scale: float | None = None
    """Constant loss scale, preferably a power of 2 (default: dynamic with --fp16, otherwise 1)."""
    initial_loss_scale: float = 2.0**32
    """Initial value of the dynamic loss scale of --fp16."""
    min_loss_scale: float = 1.0
    """Minimum of the dynamic loss scale of --fp16."""
    loss_scale_window: int = 1000
    """Consecutive updates without an overflow after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Halve the dynamic loss scale at this many overflows after it has doubled, and at every later one."""
    # Gradients
    grad_reduce_in_bf16: bool = False
    """Accumulate main gradients and reduce them over data-parallel ranks in bf16: half the memory and communication of
    gradients, with less precision."""

    def check(self) -> None:
        self._check_loss_scale()
        given = changed_flags(self, "bf16", "fp16", "fp64")
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} exclude each other: remove one of them.")
        if self.fp64 and self.grad_reduce_in_bf16:
            raise ConfigError("--fp64 and --grad-reduce-in-bf16 exclude each other: remove one of them.")
        self._check_fp8()

    def _check_loss_scale(self) -> None:
        require_positive(values_of(self, "loss_scale", "initial_loss_scale", "min_loss_scale"))
        require_at_least(1, values_of(self, "loss_scale_window", "hysteresis"))
        changed = changed_flags(self, "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        require_flag("--fp16 with its dynamic loss scale", self.fp16, changed)
        if changed and self.loss_scale is not None:
            raise ConfigError(
                f"{changed[0]} needs a dynamic loss scale, but --loss-scale {self.loss_scale} is constant: remove one "
                "of them."
            )
        if self.min_loss_scale > self.initial_loss_scale:
            raise ConfigError(
                f"--min-loss-scale {self.min_loss_scale} is above --initial-loss-scale {self.initial_loss_scale}: "
                "change one of them."
            )

    def _check_fp8(self) -> None:
        require_at_least(1, values_of(self, "fp8_amax_history_len"))
        require_at_least(0, values_of(self, "fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"))
        delayed = changed_flags(self, "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
        ends = changed_flags(self, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        others = changed_flags(self, "fp8_recipe", "fp8_param_gather", "first_last_layers_bf16")
        require_flag("--fp8-format", self.fp8_format is not None, [*others, *delayed, *ends])
        require_flag("--fp8-recipe delayed", self.fp8_recipe == "delayed", delayed)
        require_flag("--first-last-layers-bf16", self.first_last_layers_bf16, ends)
        if self.fp8_format is not None and not self.bf16:
            remedy = "add --bf16" if self.name == "fp32" else f"use --bf16 instead of --{self.name}"
            raise ConfigError(f"--fp8-format {self.fp8_format} needs bf16 outside of the linear layers: {remedy}.")

    @property
    def has_dynamic_loss_scale(self) -> bool:
        return self.fp16 and self.loss_scale is None

    @property
    def name(self) -> PrecisionName:
        """Precision of the model."""
        if self.fp64:
            return "fp64"
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"

    @property
    def product_name(self) -> PrecisionName | Literal["fp8"]:
        """Precision of the linear layers, which decides the peak FLOP/s for MFU."""
        return self.name if self.fp8_format is None else "fp8"


# Known implementations of every operation, whether installed or not (docs/kernels.md).
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "attention": ("te", "flash3", "cudnn", "cudnn_varlen", "flash", "sdpa", "cpu", "reference"),
    "rms_norm": ("eager", "compiled", "triton", "apex", "te"),
    "swiglu": ("eager", "compiled", "triton"),
    "rope": ("eager", "compiled", "triton"),
    "cross_entropy": ("eager", "compiled"),
    "weight_gradient": ("separate", "in_place", "apex"),
    "grouped_gemm": ("triton", "grouped_mm", "padded", "loop"),
    "fp8_quantization": ("eager", "compiled", "triton"),
    "fp8_weight_gradient": ("in_place", "separate", "triton"),
    "adam": ("torch", "apex", "te"),
    "l2_norm": ("torch", "apex", "te"),
}

# Operation and implementation of --no-... by field.
_MEANING_OF_NO = {
    "bias_swiglu_fusion": ("swiglu", "eager"),
    "rope_fusion": ("rope", "eager"),
    "gradient_accumulation_fusion": ("weight_gradient", "separate"),
}


class Wanted(NamedTuple):
    """An implementation that a flag requires."""

    implementation: str
    flag: str
    """The flag with its value, as on the command line."""


@dataclass(frozen=True)
class KernelConfig:
    """Implementation of each operation: the fastest available one, unless a flag requires another."""

    kernel: tuple[str, ...] = ()
    """Required implementations, each as OPERATION=IMPLEMENTATION: attention={te,flash3,cudnn,cudnn_varlen,
    flash,sdpa,cpu,reference}, rms_norm={eager,compiled,triton,apex,te}, swiglu and rope={eager,compiled,triton},
    cross_entropy={eager,compiled}, weight_gradient={separate,in_place,apex},
    grouped_gemm={triton,grouped_mm,padded,loop} (of experts), fp8_quantization={eager,compiled,triton} (compiled is for
    blockwise, triton for other recipes), fp8_weight_gradient={in_place,separate,triton} (triton is never chosen without
    this flag, because its speed is unmeasured), adam and l2_norm={torch,apex,te}. An unavailable one is an error."""
    bias_swiglu_fusion: bool = True
    """--no-bias-swiglu-fusion means --kernel swiglu=eager."""
    rope_fusion: bool = True
    """--no-rope-fusion means --kernel rope=eager."""
    gradient_accumulation_fusion: bool = True
    """--no-gradient-accumulation-fusion means --kernel weight_gradient=separate."""

    def check(self) -> None:
        seen: dict[str, Wanted] = {}
        for operation, wanted in self._all_wanted():
            known = IMPLEMENTATIONS.get(operation)
            if known is None:
                raise ConfigError(f"{wanted.flag} is not an operation: use one of {', '.join(IMPLEMENTATIONS)}.")
            if wanted.implementation not in known:
                raise ConfigError(f"{wanted.flag} is not an implementation of {operation}: use {' or '.join(known)}.")
            other = seen.setdefault(operation, wanted)
            if other.implementation != wanted.implementation:
                raise ConfigError(f"{other.flag} and {wanted.flag} contradict each other: remove one of them.")

    def wanted(self, operation: str) -> Wanted | None:
        """The implementation of ``operation`` that a flag requires; None without such a flag."""
        return dict(self._all_wanted()).get(operation)

    def _all_wanted(self) -> list[tuple[str, Wanted]]:
        wanted = [
            (operation, Wanted(implementation, flag))
            for name, (operation, implementation) in _MEANING_OF_NO.items()
            for flag in changed_flags(self, name)
        ]
        for entry in self.kernel:
            operation, _, implementation = entry.partition("=")
            wanted.append((operation, Wanted(implementation, f"--kernel {entry}")))
        return wanted
