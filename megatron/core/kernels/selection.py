"""The implementations of every operation in order of preference, and the choice among them.

On a GPU each kernel that depends on the hardware, and the compiler, is tried once against the reference before it is
chosen. So a kernel that fails or is wrong is reported at the start and not at the first step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron.config.kernels import KernelConfig
from megatron.core.kernels.attention import attention_candidates
from megatron.core.kernels.choice import BrokenDevice, Candidate, Choice, Unavailable, attempt, choose, load, short_name
from megatron.core.kernels.fp8 import quantization_candidates, weight_gradient_candidates
from megatron.core.kernels.grouped import ExpertSizes, grouped_gemm_candidates
from megatron.core.kernels.toolchain import missing_for_inductor, missing_for_triton
from megatron.core.kernels.trials import (
    TrialSizes,
    try_compiler,
    try_cross_entropy,
    try_quantized_rms_norm,
    try_quantized_swiglu,
    try_rms_norm,
    try_rotation,
    try_scaled_gemm,
    try_swiglu,
    try_weight_gradient,
)
from megatron.core.ops.attention_interface import AttentionKernel
from megatron.core.ops.cross_entropy import CompiledCrossEntropy, CrossEntropyKernel, EagerCrossEntropy
from megatron.core.ops.fp8 import Fp8Kernels, ScaledGemm, gemm_for, supports_fp8
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient, WeightGradientKernel
from megatron.core.ops.norm import CompiledRMSNorm, EagerRMSNorm, RMSNormKernel
from megatron.core.ops.rope import CompiledRotation, Rotation, rotate_
from megatron.core.ops.swiglu import CompiledSwiGLU, EagerSwiGLU, SwiGLUKernel
from megatron.core.optimizer.kernels import AdamBuilder, OptimizerKernels, SquaredNorm, torch_adam, torch_squared_norm
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.backends.transformer_engine.package import TransformerEngine

T = TypeVar("T")


@dataclass(frozen=True)
class LayerKernels:
    """The elementwise kernels of a layer, the GEMMs of its experts, and the loss."""

    rms_norm: RMSNormKernel = field(default_factory=EagerRMSNorm)
    swiglu: SwiGLUKernel = field(default_factory=EagerSwiGLU)
    rotate: Rotation = rotate_
    cross_entropy: CrossEntropyKernel = field(default_factory=EagerCrossEntropy)
    grouped_gemm: GroupedGemm = field(default_factory=LoopGroupedGemm)


@dataclass(frozen=True)
class Kernels:
    """The kernel of each operation of a run."""

    attention: AttentionKernel
    weight_gradient: WeightGradientKernel
    layers: LayerKernels
    optimizer: OptimizerKernels
    fp8: Fp8Kernels
    engine: "TransformerEngine | None"
    """Provides the norms and linear layers under ``--transformer-impl transformer_engine``."""
    choices: tuple[Choice, ...]
    """In the order of the printed table."""


@dataclass(frozen=True)
class Setting:
    """The device and dtypes that kernels must support."""

    device: torch.device
    weight: torch.dtype
    """Dtype of weights and activations."""
    gradient: torch.dtype
    """Dtype of gradient buffers."""
    sizes: TrialSizes
    needs_log_sum_exp: bool = False
    """Whether attention must return the log-sum-exp (context parallelism, CPU offload)."""
    masks_attention: bool = False
    """Whether attention stays inside documents, whose lengths differ in every microbatch, or inside chunks."""
    resets_positions: bool = False
    """Whether positions restart at documents, so that each sequence of a microbatch has its own rotations."""
    attention_backend: str = "auto"
    engine: "TransformerEngine | None" = None
    fp8: bool = False
    """Whether linear layers of this project compute in FP8."""
    has_delayed_scales: bool = False
    """Whether FP8 linear layers of this project quantise inputs with scales that are known before the inputs."""
    experts: ExpertSizes | None = None
    """The experts of a layer on this rank; None: the model has no experts."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def can_try(self) -> bool:
        """Whether this process can run kernels on the GPU."""
        return self.on_gpu and torch.cuda.is_available()

    @property
    def is_hopper(self) -> bool:
        """Whether the device is a Hopper GPU."""
        return self.can_try and torch.cuda.get_device_capability(self.device)[0] == 9

    def trial(self, trial: Callable[[T], None]) -> Callable[[T], None] | None:
        """``trial``, if this process can run it."""
        return trial if self.can_try else None

    @cached_property
    def compiler_failure(self) -> str | None:
        """Why ``torch.compile`` fails on the device; None if it works. Tried once for all operations."""
        return try_compiler(self.device)


def choose_kernels(config: KernelConfig, setting: Setting) -> Kernels:
    """The kernels of a run. Raises :class:`~megatron.errors.ConfigError` if a required one is not available."""
    choices = [_linear(setting)]

    def chosen(operation: str, candidates: Sequence[Candidate[T]]) -> T:
        kernel, choice = choose(operation, candidates, config.wanted(operation))
        choices.append(choice)
        return kernel

    sizes, device, dtype = setting.sizes, setting.device, setting.weight
    rms_norm: list[Candidate[RMSNormKernel]] = _elementwise(
        setting, EagerRMSNorm, CompiledRMSNorm, lambda kernel: try_rms_norm(kernel, sizes, device, dtype)
    )
    rms_norm.insert(0, _quantising(setting, "rms_norm.TritonRMSNorm", try_quantized_rms_norm))
    rms_norm += _optional(setting, "RMSNorm")
    swiglu: list[Candidate[SwiGLUKernel]] = _elementwise(
        setting, EagerSwiGLU, CompiledSwiGLU, partial(_try_swiglu, setting)
    )
    swiglu.insert(0, _quantising(setting, "swiglu.TritonSwiGLU", try_quantized_swiglu))
    rope: list[Candidate[Rotation]] = _elementwise(
        setting, lambda: rotate_, CompiledRotation, partial(_try_rotation, setting)
    )
    try_triton = setting.trial(partial(_try_rotation, setting))
    rope.insert(0, Candidate("triton", partial(_triton_rotation, setting), "one pass", setting.on_gpu, try_triton))
    cross_entropy: list[Candidate[CrossEntropyKernel]] = _elementwise(
        setting,
        EagerCrossEntropy,
        CompiledCrossEntropy,
        lambda kernel: try_cross_entropy(kernel, sizes, device, dtype),
    )
    adam: list[Candidate[AdamBuilder]] = [
        Candidate("torch", lambda: torch_adam, "torch's fused AdamW"),
        *_optional(setting, "adam"),
    ]
    l2_norm: list[Candidate[SquaredNorm]] = [
        Candidate("torch", lambda: torch_squared_norm, "torch._foreach_norm"),
        *_optional(setting, "squared_norm"),
    ]
    fp8 = Fp8Kernels.eager(_scaled_gemm(setting))
    if setting.fp8:
        fp8 = Fp8Kernels(
            fp8.gemm,
            chosen("fp8_quantization", quantization_candidates(setting)),
            chosen("fp8_weight_gradient", weight_gradient_candidates(setting, fp8.gemm)),
        )
    attention = chosen("attention", attention_candidates(setting, config.wanted("attention")))
    weight_gradient = chosen("weight_gradient", _weight_gradient(setting))
    grouped_gemm: GroupedGemm = LoopGroupedGemm(weight_gradient)
    if setting.experts is not None:
        grouped_gemm = chosen("grouped_gemm", grouped_gemm_candidates(setting, weight_gradient))
    kernels = Kernels(
        attention=attention,
        weight_gradient=weight_gradient,
        layers=LayerKernels(
            rms_norm=chosen("rms_norm", rms_norm),
            swiglu=chosen("swiglu", swiglu),
            rotate=chosen("rope", rope),
            cross_entropy=chosen("cross_entropy", cross_entropy),
            grouped_gemm=grouped_gemm,
        ),
        optimizer=OptimizerKernels(adam=chosen("adam", adam), squared_norm=chosen("l2_norm", l2_norm)),
        fp8=fp8,
        engine=setting.engine,
        choices=tuple(choices),
    )
    if setting.can_try:
        # Otherwise the first step would be the second size of these functions, and compile them for any size.
        torch.compiler.reset()
    return kernels


def _linear(setting: Setting) -> Choice:
    """The linear layers, by ``--transformer-impl``."""
    if setting.engine is None:
        return Choice("linear", "local", "the layers of this project")
    asked = f"version {setting.engine.version}, by --transformer-impl; with the norms before linear layers"
    return Choice("linear", "transformer_engine", asked)


# GEMMs and elementwise kernels


def _weight_gradient(setting: Setting) -> list[Candidate[WeightGradientKernel]]:
    def in_place() -> WeightGradientKernel:
        is_wider = setting.gradient != setting.weight
        if is_wider and not (setting.on_gpu and setting.weight.itemsize == 2 and setting.gradient == torch.float32):
            formats = f"{short_name(setting.weight)} products and {short_name(setting.gradient)} gradients"
            raise Unavailable(f"torch has no in-place kernel for {formats} on {setting.device.type}")
        return InPlaceWeightGradient()

    def apex() -> WeightGradientKernel:
        if not (setting.on_gpu and setting.weight.itemsize == 2 and setting.gradient == torch.float32):
            raise Unavailable("apex only accumulates half-precision products in fp32 on GPUs")
        kernel: WeightGradientKernel = _from_backend(setting, "apex", "WeightGradient")
        return kernel

    def trial(kernel: WeightGradientKernel) -> None:
        try_weight_gradient(kernel, setting.device, setting.weight, setting.gradient)

    return [
        Candidate(
            "in_place",
            in_place,
            "the GEMM adds to the main gradient",
            # On CPUs oneDNN's fp32 GEMM, which cannot add in place, is faster (docs/performance.md).
            is_automatic=setting.on_gpu or setting.weight == torch.float64,
            trial=setting.trial(trial),
        ),
        Candidate("separate", SeparateWeightGradient, "a GEMM, then an addition"),
        Candidate("apex", apex, "", False, setting.trial(trial)),
    ]


def _scaled_gemm(setting: Setting) -> ScaledGemm:
    gemm = gemm_for(setting.device)
    if setting.fp8 and setting.can_try and supports_fp8(setting.device):
        try:
            attempt(lambda: try_scaled_gemm(gemm, setting.device, setting.weight))
        except (Unavailable, BrokenDevice) as error:
            raise ConfigError(
                f"--fp8-format needs FP8 GEMMs, which torch does not have on this GPU: {error}; remove it, or use "
                "--transformer-impl transformer_engine."
            ) from error
    return gemm


def _elementwise(
    setting: Setting, eager: Callable[[], T], compiled: Callable[[], T], trial: Callable[[T], None]
) -> list[Candidate[T]]:
    def compilable() -> T:
        obstacle = compiler_obstacle(setting)
        if obstacle is not None:
            raise Unavailable(obstacle)
        return compiled()

    return [
        Candidate("compiled", compilable, "torch.compile fuses it", setting.on_gpu, setting.trial(trial)),
        Candidate("eager", eager, "one operation after the other"),
    ]


def _triton_rotation(setting: Setting) -> Rotation:
    missing = missing_for_triton() if setting.on_gpu else "a GPU"
    if missing is not None:
        raise Unavailable(f"it needs {missing}")
    rotate: Rotation = load("megatron.core.backends.triton.rope", "Triton").rotate
    return rotate


def _try_rotation(setting: Setting, rotate: Rotation) -> None:
    try_rotation(rotate, setting.sizes, setting.device, setting.weight, setting.resets_positions)


def _try_swiglu(setting: Setting, kernel: SwiGLUKernel) -> None:
    try_swiglu(kernel, setting.sizes, setting.device, setting.weight)
    if setting.experts is not None:
        sizes = replace(setting.sizes, mlp_width=setting.experts.width)
        try_swiglu(kernel, sizes, setting.device, setting.weight)


def _quantising(setting: Setting, path: str, trial: Callable[[T, TrialSizes, Any, Any], None]) -> Candidate[T]:
    def triton() -> T:
        if not setting.has_delayed_scales:
            raise Unavailable("it quantises for FP8 with delayed scaling, which this run does not use")
        obstacle = compiler_obstacle(setting) if setting.on_gpu else "it needs a GPU"
        if obstacle is not None:
            raise Unavailable(obstacle)
        module, name = path.split(".")
        kernel: T = getattr(load(f"megatron.core.backends.triton.{module}", "Triton"), name)()
        return kernel

    def try_at_sizes(kernel: T) -> None:
        trial(kernel, setting.sizes, setting.device, setting.weight)

    is_automatic = setting.on_gpu and setting.has_delayed_scales
    return Candidate("triton", triton, "compiled, and quantises", is_automatic, setting.trial(try_at_sizes))


def compiler_obstacle(setting: Setting) -> str | None:
    """What ``torch.compile`` lacks; None if nothing."""
    missing = missing_for_inductor(setting.on_gpu)
    if missing is not None:
        return f"torch.compile needs {missing}"
    return setting.compiler_failure if setting.can_try else None


# Optional packages

_BACKENDS = {
    "apex": ("megatron.core.backends.apex", "apex"),
    "te": ("megatron.core.backends.transformer_engine.kernels", "Transformer Engine"),
}


def _optional(setting: Setting, kernel: str) -> list[Candidate[Any]]:
    return [
        Candidate(name, partial(_from_backend, setting, name, kernel), "", is_automatic=False) for name in _BACKENDS
    ]


def _from_backend(setting: Setting, backend: str, kernel: str) -> Any:
    """The ``kernel`` of an optional package, whose module is loaded only now."""
    if not setting.on_gpu:
        raise Unavailable("it needs a GPU")
    if setting.weight == torch.float64:
        raise Unavailable("it does not support fp64")
    return getattr(load(*_BACKENDS[backend]), kernel)()
