"""The kernels of a run: one implementation of every operation.

On a GPU each kernel that depends on the hardware, and the compiler, is tried once against the reference before it is
chosen. So a kernel that fails or is wrong is reported at the start and not at the first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from megatron.config.precision import KernelConfig
from megatron.core.device import Unavailable
from megatron.core.kernels import candidates
from megatron.core.kernels.choice import Candidate, Choice, KernelRequest, choose
from megatron.core.kernels.trials import BrokenDevice, attempt
from megatron.core.ops.attention import AttentionKernel
from megatron.core.ops.cross_entropy import CrossEntropyKernel, EagerCrossEntropy
from megatron.core.ops.fp8 import FP8_CAPABILITY, Fp8Kernels, ScaledGemm, gemm_for
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm
from megatron.core.ops.matmul import WeightGradientKernel
from megatron.core.ops.norm import EagerRMSNorm, RMSNormKernel
from megatron.core.ops.rope import Rotation, rotate_
from megatron.core.ops.swiglu import EagerSwiGLU, SwiGLUKernel
from megatron.core.optimizer.kernels import OptimizerKernels
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.backends.transformer_engine import TransformerEngine

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

    def chosen(operation: str, implementations: Sequence[Candidate[T]]) -> T:
        compiler = request.machine.simulated_compiler
        kernel, choice = choose(operation, implementations, config.wanted(operation), compiler)
        choices.append(choice)
        return kernel

    fp8 = Fp8Kernels.eager(_scaled_gemm(request))
    if request.fp8:
        fp8 = Fp8Kernels(
            fp8.gemm,
            chosen("fp8_quantization", candidates.fp8_quantization(request)),
            chosen("fp8_weight_gradient", candidates.fp8_weight_gradient(request, fp8.gemm)),
        )
    attention = chosen("attention", candidates.attention(request))
    weight_gradient = chosen("weight_gradient", candidates.weight_gradient(request))
    grouped_gemm: GroupedGemm = LoopGroupedGemm(weight_gradient)
    if request.experts is not None:
        grouped_gemm = chosen("grouped_gemm", candidates.grouped_gemm(request, weight_gradient))
    kernels = Kernels(
        attention=attention,
        weight_gradient=weight_gradient,
        layers=LayerKernels(
            rms_norm=chosen("rms_norm", candidates.rms_norm(request)),
            swiglu=chosen("swiglu", candidates.swiglu(request)),
            rotate=chosen("rope", candidates.rope(request)),
            cross_entropy=chosen("cross_entropy", candidates.cross_entropy(request)),
            grouped_gemm=grouped_gemm,
        ),
        optimizer=OptimizerKernels(
            chosen("adam", candidates.adam(request)), chosen("l2_norm", candidates.l2_norm(request))
        ),
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
