"""The implementations of every operation in order of preference, and the choice among them.

On a GPU each kernel that depends on the hardware, and the compiler, is tried once against the reference before it is
chosen. So a kernel that fails or is wrong is reported at the start and not at the first step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron.config.kernels import KernelConfig
from megatron.core.kernels.attention import attention_candidates
from megatron.core.kernels.choice import BrokenDevice, Candidate, Choice, attempt, choose, short_name
from megatron.core.kernels.fp8 import quantization_candidates, weight_gradient_candidates
from megatron.core.kernels.grouped import grouped_gemm_candidates
from megatron.core.kernels.request import KernelRequest
from megatron.core.kernels.trials import TrialSizes
from megatron.core.ops.attention_interface import AttentionKernel
from megatron.core.ops.cross_entropy import CompiledCrossEntropy, CrossEntropyKernel, EagerCrossEntropy
from megatron.core.ops.fp8 import FP8_CAPABILITY, Fp8Kernels, ScaledGemm, gemm_for
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient, WeightGradientKernel
from megatron.core.ops.norm import CompiledRMSNorm, EagerRMSNorm, RMSNormKernel
from megatron.core.ops.rope import CompiledRotation, Rotation, rotate_
from megatron.core.ops.swiglu import CompiledSwiGLU, EagerSwiGLU, SwiGLUKernel
from megatron.core.optimizer.kernels import AdamBuilder, OptimizerKernels, SquaredNorm, torch_adam, torch_squared_norm
from megatron.core.packages import Unavailable, load
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


def choose_kernels(config: KernelConfig, request: KernelRequest) -> Kernels:
    """The kernels of a run. Raises :class:`~megatron.errors.ConfigError` if a required one is not available."""
    choices = [_linear(request)]

    def chosen(operation: str, candidates: Sequence[Candidate[T]]) -> T:
        kernel, choice = choose(operation, candidates, config.wanted(operation))
        choices.append(choice)
        return kernel

    sizes, device, dtype = request.sizes, request.device, request.weight
    rms_norm: list[Candidate[RMSNormKernel]] = _elementwise(
        request, EagerRMSNorm, CompiledRMSNorm, lambda kernel: request.trials.rms_norm(kernel, sizes, device, dtype)
    )
    rms_norm.insert(0, _quantising(request, "rms_norm.TritonRMSNorm", request.trials.quantized_rms_norm))
    rms_norm += _optional(request, "RMSNorm")
    swiglu: list[Candidate[SwiGLUKernel]] = _elementwise(
        request, EagerSwiGLU, CompiledSwiGLU, partial(_try_swiglu, request)
    )
    swiglu.insert(0, _quantising(request, "swiglu.TritonSwiGLU", request.trials.quantized_swiglu))
    rope: list[Candidate[Rotation]] = _elementwise(
        request, lambda: rotate_, CompiledRotation, partial(_try_rotation, request)
    )
    try_triton = request.trial(partial(_try_rotation, request))
    rope.insert(0, Candidate("triton", partial(_triton_rotation, request), "one pass", request.on_gpu, try_triton))
    cross_entropy: list[Candidate[CrossEntropyKernel]] = _elementwise(
        request,
        EagerCrossEntropy,
        CompiledCrossEntropy,
        lambda kernel: request.trials.cross_entropy(kernel, sizes, device, dtype),
    )
    adam: list[Candidate[AdamBuilder]] = [
        Candidate("torch", lambda: torch_adam, "torch's fused AdamW"),
        *_optional(request, "adam"),
    ]
    l2_norm: list[Candidate[SquaredNorm]] = [
        Candidate("torch", lambda: torch_squared_norm, "torch._foreach_norm"),
        *_optional(request, "squared_norm"),
    ]
    fp8 = Fp8Kernels.eager(_scaled_gemm(request))
    if request.fp8:
        fp8 = Fp8Kernels(
            fp8.gemm,
            chosen("fp8_quantization", quantization_candidates(request)),
            chosen("fp8_weight_gradient", weight_gradient_candidates(request, fp8.gemm)),
        )
    attention = chosen("attention", attention_candidates(request, config.wanted("attention")))
    weight_gradient = chosen("weight_gradient", _weight_gradient(request))
    grouped_gemm: GroupedGemm = LoopGroupedGemm(weight_gradient)
    if request.experts is not None:
        grouped_gemm = chosen("grouped_gemm", grouped_gemm_candidates(request, weight_gradient))
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
        engine=request.engine,
        choices=tuple(choices),
    )
    if request.machine.can_try:
        # Otherwise the first step would be the second size of these functions, and compile them for any size.
        request.trials.forget()
    return kernels


def _linear(request: KernelRequest) -> Choice:
    """The linear layers, by ``--transformer-impl``."""
    if request.engine is None:
        return Choice("linear", "local", "the layers of this project")
    asked = f"version {request.engine.version}, by --transformer-impl; with the norms before linear layers"
    return Choice("linear", "transformer_engine", asked)


# GEMMs and elementwise kernels


def _weight_gradient(request: KernelRequest) -> list[Candidate[WeightGradientKernel]]:
    def in_place() -> WeightGradientKernel:
        is_wider = request.gradient != request.weight
        if is_wider and not (request.on_gpu and request.weight.itemsize == 2 and request.gradient == torch.float32):
            formats = f"{short_name(request.weight)} products and {short_name(request.gradient)} gradients"
            raise Unavailable(f"torch has no in-place kernel for {formats} on {request.device.type}")
        return InPlaceWeightGradient()

    def apex() -> WeightGradientKernel:
        if not (request.on_gpu and request.weight.itemsize == 2 and request.gradient == torch.float32):
            raise Unavailable("apex only accumulates half-precision products in fp32 on GPUs")
        kernel: WeightGradientKernel = _from_backend(request, "apex", "WeightGradient")
        return kernel

    def trial(kernel: WeightGradientKernel) -> None:
        request.trials.weight_gradient(kernel, request.device, request.weight, request.gradient)

    return [
        Candidate(
            "in_place",
            in_place,
            "the GEMM adds to the main gradient",
            # On CPUs oneDNN's fp32 GEMM, which cannot add in place, is faster (docs/performance.md).
            is_automatic=request.on_gpu or request.weight == torch.float64,
            trial=request.trial(trial),
        ),
        Candidate("separate", SeparateWeightGradient, "a GEMM, then an addition"),
        Candidate("apex", apex, "", False, request.trial(trial)),
    ]


def _scaled_gemm(request: KernelRequest) -> ScaledGemm:
    gemm = gemm_for(request.device)
    if request.fp8 and request.machine.can_try and request.machine.capability >= FP8_CAPABILITY:
        try:
            attempt(lambda: request.trials.scaled_gemm(gemm, request.device, request.weight))
        except (Unavailable, BrokenDevice) as error:
            raise ConfigError(
                f"--fp8-format needs FP8 GEMMs, which torch does not have on this GPU: {error}; remove it, or use "
                "--transformer-impl transformer_engine."
            ) from error
    return gemm


def _elementwise(
    request: KernelRequest, eager: Callable[[], T], compiled: Callable[[], T], trial: Callable[[T], None]
) -> list[Candidate[T]]:
    def compilable() -> T:
        obstacle = request.compiler_obstacle
        if obstacle is not None:
            raise Unavailable(obstacle)
        return compiled()

    return [
        Candidate("compiled", compilable, "torch.compile fuses it", request.on_gpu, request.trial(trial)),
        Candidate("eager", eager, "one operation after the other"),
    ]


def _triton_rotation(request: KernelRequest) -> Rotation:
    missing = request.machine.missing_for_triton if request.on_gpu else "a GPU"
    if missing is not None:
        raise Unavailable(f"it needs {missing}")
    rotate: Rotation = load("megatron.core.backends.triton.rope", "Triton").rotate
    return rotate


def _try_rotation(request: KernelRequest, rotate: Rotation) -> None:
    request.trials.rotation(rotate, request.sizes, request.device, request.weight, request.resets_positions)


def _try_swiglu(request: KernelRequest, kernel: SwiGLUKernel) -> None:
    request.trials.swiglu(kernel, request.sizes, request.device, request.weight)
    if request.experts is not None:
        sizes = replace(request.sizes, mlp_width=request.experts.width)
        request.trials.swiglu(kernel, sizes, request.device, request.weight)


def _quantising(request: KernelRequest, path: str, trial: Callable[[T, TrialSizes, Any, Any], None]) -> Candidate[T]:
    def triton() -> T:
        if not request.has_delayed_scales:
            raise Unavailable("it quantises for FP8 with delayed scaling, which this run does not use")
        obstacle = request.compiler_obstacle if request.on_gpu else "it needs a GPU"
        if obstacle is not None:
            raise Unavailable(obstacle)
        module, name = path.split(".")
        kernel: T = getattr(load(f"megatron.core.backends.triton.{module}", "Triton"), name)()
        return kernel

    def try_at_sizes(kernel: T) -> None:
        trial(kernel, request.sizes, request.device, request.weight)

    is_automatic = request.on_gpu and request.has_delayed_scales
    return Candidate("triton", triton, "compiled, and quantises", is_automatic, request.trial(try_at_sizes))


# Optional packages

_BACKENDS = {
    "apex": ("megatron.core.backends.apex", "apex"),
    "te": ("megatron.core.backends.transformer_engine.kernels", "Transformer Engine"),
}


def _optional(request: KernelRequest, kernel: str) -> list[Candidate[Any]]:
    return [
        Candidate(name, partial(_from_backend, request, name, kernel), "", is_automatic=False) for name in _BACKENDS
    ]


def _from_backend(request: KernelRequest, backend: str, kernel: str) -> Any:
    """The ``kernel`` of an optional package, whose module is loaded only now."""
    if not request.on_gpu:
        raise Unavailable("it needs a GPU")
    if request.weight == torch.float64:
        raise Unavailable("it does not support fp64")
    return getattr(load(*_BACKENDS[backend]), kernel)()
