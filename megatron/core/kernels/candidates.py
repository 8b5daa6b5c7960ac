"""The implementations of every operation in order of preference: where each is available, its trial on a GPU, and what
it launches where it is simulated."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from megatron.core.device import Compiler, Unavailable, inductor, load
from megatron.core.kernels.candidates import (
    SimulatedFp8WeightGradient,
    SimulatedQuantization,
    SimulatedRMSNorm,
    SimulatedSwiGLU,
)
from megatron.core.kernels.choice import Candidate, KernelRequest, short_name
from megatron.core.ops.attention import AttentionKernel
from megatron.core.ops.attention_kernels import (
    CpuFlashAttention,
    CudaFlashAttention,
    CudnnAttention,
    ReferenceAttention,
    TorchAttention,
    attention_kernels,
)
from megatron.core.ops.cross_entropy import (
    GPU_CHUNK_BYTES,
    CompiledCrossEntropy,
    CrossEntropyKernel,
    EagerCrossEntropy,
)
from megatron.core.ops.fp8 import (
    EagerQuantization,
    Fp8WeightGradientKernel,
    Quantization,
    ScaledGemm,
    SeparateFp8WeightGradient,
)
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, PaddedGroupedGemm, TorchGroupedGemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient, WeightGradientKernel
from megatron.core.ops.norm import CompiledRMSNorm, EagerRMSNorm, RMSNormKernel
from megatron.core.ops.rope import CompiledRotation, Rotation, rotate_
from megatron.core.ops.swiglu import CompiledSwiGLU, EagerSwiGLU, SwiGLUKernel
from megatron.core.optimizer.kernels import AdamBuilder, SquaredNorm, torch_adam, torch_squared_norm
from megatron.torch_compat import onednn_linear

T = TypeVar("T")

# Attention

_ATTENTION: dict[str, Callable[[], AttentionKernel]] = {
    "flash3": lambda: load("megatron.core.backends.flash_attention", "FlashAttention 3").FlashAttention3(),
    "cudnn": CudnnAttention,
    "flash": CudaFlashAttention,
    "sdpa": TorchAttention,
    "cpu": CpuFlashAttention,
    "reference": ReferenceAttention,
}
_MERITS = {
    "te": "Transformer Engine chooses the kernel",
    "flash3": "made for Hopper",
    "cudnn": "cuDNN's kernel for Hopper",
    "flash": "torch's FlashAttention 2",
    "sdpa": "torch chooses the kernel",
    "cpu": "torch's flash attention for CPUs",
    "reference": "the definition; stores all scores",
}
_PLANS = "one call per document, and cuDNN builds a plan for every new length while the step waits"
_COSTS_OF_DOCUMENTS = {"cudnn": _PLANS, "te": f"if it picks cuDNN: {_PLANS}", "sdpa": f"if it picks cuDNN: {_PLANS}"}
"""What kernels without a varlen call cost where documents mask attention."""


def attention(request: KernelRequest) -> list[Candidate[AttentionKernel]]:
    makers: dict[str, Callable[[], AttentionKernel]] = {
        "te": partial(_transformer_engine_attention, request),
        **_ATTENTION,
    }
    preferred = _preferred_attention(request)
    costs = _COSTS_OF_DOCUMENTS if request.masks_attention and request.on_gpu else {}
    at_sizes = request.sizes, request.device, request.weight, request.masks_attention
    return [
        Candidate(
            name,
            partial(_usable_attention, makers[name], request),
            _MERITS[name],
            is_automatic=name in preferred,
            trial=None if name == "reference" else request.trial(request.trials.attention, *at_sizes),
            cost=costs.get(name, ""),
            # What kernels of packages save is what torch's FlashAttention saves.
            simulated=(lambda compiler: CudaFlashAttention()) if name in ("te", "flash3") else None,
        )
        for name in dict.fromkeys((*preferred, *makers))
    ]


def _preferred_attention(request: KernelRequest) -> list[str]:
    """Names in order of preference. With documents, kernels with a varlen call come before those that build a plan for
    every length; under context parallelism, too, because documents cut the tiles."""
    name_of = {kernel: name for name, kernel in _ATTENTION.items()}
    backend, in_documents = request.attention_backend, request.masks_attention
    names = [name_of[type(kernel)] for kernel in attention_kernels(backend, in_documents)]
    if backend == "auto" and request.machine.is_hopper:
        names.insert(names.index("reference") if in_documents else 0, "cudnn")
    if backend in ("auto", "flash") and request.machine.is_hopper:
        names.insert(0, "flash3")
    if backend == "auto" and request.engine is not None:
        names.insert(names.index("sdpa") if in_documents else 0, "te")
    return list(dict.fromkeys(names))


def _transformer_engine_attention(request: KernelRequest) -> AttentionKernel:
    if request.engine is None:
        raise Unavailable("it needs --transformer-impl transformer_engine")
    from megatron.core.backends.transformer_engine import TransformerEngineAttention

    return TransformerEngineAttention(request.engine)


def _usable_attention(make: Callable[[], AttentionKernel], request: KernelRequest) -> AttentionKernel:
    kernel = make()
    if not kernel.supports(request.device, request.weight):
        raise Unavailable(f"it does not support {short_name(request.weight)} on {request.device.type}")
    if request.needs_log_sum_exp and not kernel.returns_log_sum_exp:
        raise Unavailable("it does not return the log-sum-exp, which context parallelism and CPU offload need")
    if isinstance(kernel, CudnnAttention) and torch.are_deterministic_algorithms_enabled():
        # The operator itself does not refuse that.
        raise Unavailable("its backward pass is not deterministic")
    return kernel


# GEMMs


def weight_gradient(request: KernelRequest) -> list[Candidate[WeightGradientKernel]]:
    half_into_fp32 = request.on_gpu and request.weight.itemsize == 2 and request.gradient == torch.float32

    def in_place() -> WeightGradientKernel:
        if request.gradient != request.weight and not half_into_fp32:
            formats = f"{short_name(request.weight)} products and {short_name(request.gradient)} gradients"
            raise Unavailable(f"torch has no in-place kernel for {formats} on {request.device.type}")
        return InPlaceWeightGradient()

    def apex() -> WeightGradientKernel:
        if not half_into_fp32:
            raise Unavailable("apex only accumulates half-precision products in fp32 on GPUs")
        kernel: WeightGradientKernel = _from_backend(request, "apex", "WeightGradient")
        return kernel

    trial = request.trial(request.trials.weight_gradient, request.device, request.weight, request.gradient)
    # On CPUs oneDNN's fp32 GEMM, which cannot add in place, is faster (docs/performance.md).
    is_preferred = request.on_gpu or request.weight == torch.float64
    return [
        Candidate("in_place", in_place, "the GEMM adds to the main gradient", is_preferred, trial),
        Candidate("separate", SeparateWeightGradient, "a GEMM, then an addition"),
        Candidate("apex", apex, "", False, trial, simulated=lambda compiler: InPlaceWeightGradient()),
    ]


def grouped_gemm(request: KernelRequest, weight_gradient: WeightGradientKernel) -> list[Candidate[GroupedGemm]]:
    """The GEMMs of experts. ``weight_gradient`` is the chosen kernel for the weight gradients of linear layers."""
    experts = request.experts

    def grouped() -> GroupedGemm:
        if request.weight != torch.bfloat16:
            raise Unavailable(f"torch's grouped GEMM multiplies bf16, not {short_name(request.weight)}")
        if experts is not None and (experts.hidden_size % 8 or experts.width % 8):
            widths = f"{experts.hidden_size} or {experts.width}, the width of an expert's matrix,"
            raise Unavailable(f"{widths} is no multiple of 16 bytes")
        # Separate GEMMs for weight gradients are one grouped GEMM.
        return TorchGroupedGemm(None if isinstance(weight_gradient, SeparateWeightGradient) else weight_gradient)

    def padded() -> GroupedGemm:
        if request.on_gpu or onednn_linear() is None:
            raise Unavailable("it is for CPUs with oneDNN")
        if request.weight == torch.float64:
            raise Unavailable("oneDNN does not multiply fp64")
        return PaddedGroupedGemm(weight_gradient)

    trial = request.trial(request.trials.grouped_gemm, request.device, request.weight, request.gradient)
    # For one expert a grouped GEMM is a GEMM. On CPUs it is slower (docs/performance.md).
    is_preferred = request.on_gpu and experts is not None and experts.count > 1
    return [
        Candidate("grouped_mm", grouped, "one launch for all experts", is_preferred, trial),
        Candidate("padded", padded, "a GEMM for each expert, of few shapes", is_automatic=not request.on_gpu),
        Candidate("loop", lambda: LoopGroupedGemm(weight_gradient), "a GEMM for each expert"),
    ]


# FP8


def fp8_quantization(request: KernelRequest) -> list[Candidate[Quantization]]:
    trial = request.trial(request.trials.fp8_quantization, request.device, request.weight)
    make = partial(_made_by_triton, request, "quantize.TritonQuantization")
    return [
        Candidate("triton", make, "one pass", request.on_gpu, trial, simulated=SimulatedQuantization),
        Candidate("eager", EagerQuantization, "one operation after the other"),
    ]


def fp8_weight_gradient(request: KernelRequest, gemm: ScaledGemm) -> list[Candidate[Fp8WeightGradientKernel]]:
    trial = request.trial(request.trials.fp8_weight_gradient, request.device, request.gradient)
    make = partial(_made_by_triton, request, "fp8_weight_gradient.TritonFp8WeightGradient")
    simulated = partial(SimulatedFp8WeightGradient, gemm)
    return [
        Candidate("separate", lambda: SeparateFp8WeightGradient(gemm), "a GEMM, then an addition"),
        # Its speed is unmeasured.
        Candidate("triton", make, "", is_automatic=False, trial=trial, simulated=simulated),
    ]


# Elementwise kernels


def rms_norm(request: KernelRequest) -> list[Candidate[RMSNormKernel]]:
    trials, at_sizes = request.trials, (request.sizes, request.device, request.weight)
    trial, of_quantised = (request.trial(one, *at_sizes) for one in (trials.rms_norm, trials.quantized_rms_norm))
    return [
        _quantising(request, "rms_norm.TritonRMSNorm", of_quantised, SimulatedRMSNorm),
        *_elementwise(request, EagerRMSNorm, CompiledRMSNorm, trial),
        *_optional(request, "RMSNorm", CompiledRMSNorm),
    ]


def swiglu(request: KernelRequest) -> list[Candidate[SwiGLUKernel]]:
    def try_all_widths(kernel: SwiGLUKernel) -> None:
        request.trials.swiglu(kernel, *at_sizes)
        if request.experts is not None:
            sizes = replace(request.sizes, mlp_width=request.experts.width)
            request.trials.swiglu(kernel, sizes, request.device, request.weight)

    at_sizes = request.sizes, request.device, request.weight
    of_quantised = request.trial(request.trials.quantized_swiglu, *at_sizes)
    return [
        _quantising(request, "swiglu.TritonSwiGLU", of_quantised, SimulatedSwiGLU),
        *_elementwise(request, EagerSwiGLU, CompiledSwiGLU, request.trial(try_all_widths)),
    ]


def rope(request: KernelRequest) -> list[Candidate[Rotation]]:
    at_sizes = request.sizes, request.device, request.weight, request.resets_positions
    trial, make = request.trial(request.trials.rotation, *at_sizes), partial(_from_triton, request, "rope.rotate")
    return [
        Candidate("triton", make, "one pass", request.on_gpu, trial, simulated=lambda compiler: compiler(rotate_)),
        *_elementwise(request, lambda: rotate_, CompiledRotation, trial),
    ]


def cross_entropy(request: KernelRequest) -> list[Candidate[CrossEntropyKernel]]:
    trial = request.trial(request.trials.cross_entropy, request.sizes, request.device, request.weight)
    eager = partial(EagerCrossEntropy, GPU_CHUNK_BYTES if request.on_gpu else None)
    return _elementwise(request, eager, CompiledCrossEntropy, trial)


def _elementwise(
    request: KernelRequest,
    eager: Callable[[], T],
    compiled: Callable[[Compiler], T],
    trial: Callable[[T], None] | None,
) -> list[Candidate[T]]:
    def compilable() -> T:
        if request.compiler_obstacle is not None:
            raise Unavailable(request.compiler_obstacle)
        return compiled(inductor)

    return [
        Candidate("compiled", compilable, "torch.compile fuses it", request.on_gpu, trial, simulated=compiled),
        Candidate("eager", eager, "one operation after the other"),
    ]


def _quantising(
    request: KernelRequest, path: str, trial: Callable[[T], None] | None, simulated: Callable[[Compiler], T]
) -> Candidate[T]:
    def triton() -> T:
        if not request.has_delayed_scales:
            raise Unavailable("it quantises for FP8 with delayed scaling, which this run does not use")
        if request.on_gpu and request.compiler_obstacle is not None:
            raise Unavailable(request.compiler_obstacle)
        kernel: T = _made_by_triton(request, path)
        return kernel

    is_automatic = request.on_gpu and request.has_delayed_scales
    return Candidate("triton", triton, "compiled, and quantises", is_automatic, trial, simulated=simulated)


# The optimizer's kernels


def adam(request: KernelRequest) -> list[Candidate[AdamBuilder]]:
    others: list[Candidate[AdamBuilder]] = _optional(request, "adam", lambda compiler: torch_adam)
    return [Candidate("torch", lambda: torch_adam, "torch's fused AdamW"), *others]


def l2_norm(request: KernelRequest) -> list[Candidate[SquaredNorm]]:
    others: list[Candidate[SquaredNorm]] = _optional(request, "squared_norm", lambda compiler: torch_squared_norm)
    return [Candidate("torch", lambda: torch_squared_norm, "torch._foreach_norm"), *others]


# Packages

_BACKENDS = {
    "apex": ("megatron.core.backends.apex", "apex"),
    "te": ("megatron.core.backends.transformer_engine", "Transformer Engine"),
}


def _optional(request: KernelRequest, kernel: str, simulated: Callable[[Compiler], T]) -> list[Candidate[T]]:
    """The ``kernel`` of every optional package, which is taken to need the memory of ``simulated``."""
    return [
        Candidate(name, partial(_from_backend, request, name, kernel), "", is_automatic=False, simulated=simulated)
        for name in _BACKENDS
    ]


def _from_backend(request: KernelRequest, backend: str, kernel: str) -> Any:
    """The ``kernel`` of an optional package, whose module is loaded only now."""
    if not request.on_gpu:
        raise Unavailable("it needs a GPU")
    if request.weight == torch.float64:
        raise Unavailable("it does not support fp64")
    return getattr(load(*_BACKENDS[backend]), kernel)()


def _from_triton(request: KernelRequest, path: str) -> Any:
    """``MODULE.NAME`` of our Triton kernels, whose module is loaded only now."""
    missing = request.machine.missing_for_triton if request.on_gpu else "a GPU"
    if missing is not None:
        raise Unavailable(f"it needs {missing}")
    module, name = path.split(".")
    return getattr(load(f"megatron.core.backends.triton.{module}", "Triton"), name)


def _made_by_triton(request: KernelRequest, path: str) -> Any:
    """An object of a class of our Triton kernels."""
    return _from_triton(request, path)()
