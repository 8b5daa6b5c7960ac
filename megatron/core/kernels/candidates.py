"""The implementations of every operation in order of preference: where each is available, its trial on a GPU, and what
it launches where it is simulated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.core.device import Compiler, Unavailable, inductor, load
from megatron.core.gradient import GradientProduct
from megatron.core.kernels.choice import Candidate, KernelRequest, short_name
from megatron.core.kernels.trials import LENGTH
from megatron.core.ops.attention import AttentionKernel, HalfPrecisionGpuKernel
from megatron.core.ops.attention_kernels import (
    CpuFlashAttention,
    CudaFlashAttention,
    CudnnAttention,
    CudnnVarlenAttention,
    FlashAttention3,
    ReferenceAttention,
    TorchAttention,
    attention_kernels,
)
from megatron.core.ops.fp8 import (
    BlockQuantization,
    DelayedQuantization,
    EagerQuantization,
    Fp8Format,
    Fp8WeightGradientKernel,
    InPlaceFp8WeightGradient,
    Quantization,
    ScaledGemm,
    SeparateFp8WeightGradient,
)
from megatron.core.ops.grouped import (
    GroupedGemm,
    GroupedWeightGradient,
    LoopGroupedGemm,
    PaddedGroupedGemm,
    RowCounts,
    TorchGroupedGemm,
)
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient, WeightGradientKernel
from megatron.core.ops.norm import CompiledRMSNorm, EagerRMSNorm, RMSNormKernel, normalise
from megatron.core.ops.rope import CompiledRotation, Rotation, rotate_
from megatron.core.ops.swiglu import CompiledSwiGLU, EagerSwiGLU, SwiGLUKernel, swiglu_reference
from megatron.core.optimizer import AdamBuilder, SquaredNorm, torch_adam, torch_squared_norm
from megatron.core.precision import Layout, QuantizedTensor
from megatron.core.tensor_parallel.cross_entropy import (
    GPU_CHUNK_BYTES,
    CompiledCrossEntropy,
    CrossEntropyKernel,
    EagerCrossEntropy,
)
from megatron.torch_compat import onednn_linear, scaled_addmm_

T = TypeVar("T")

# Attention

_ATTENTION: dict[str, tuple[str, type[AttentionKernel]]] = {
    "flash3": ("made for Hopper", FlashAttention3),
    "cudnn": ("cuDNN's kernel for Hopper", CudnnAttention),
    "cudnn_varlen": ("cuDNN's kernel, all documents in one call", CudnnVarlenAttention),
    "flash": ("torch's FlashAttention 2", CudaFlashAttention),
    "sdpa": ("torch chooses the kernel", TorchAttention),
    "cpu": ("torch's flash attention for CPUs", CpuFlashAttention),
    "reference": ("the definition; stores all scores", ReferenceAttention),
}
"""Merit and maker of each kernel."""
_PLANS = "one call per document, and cuDNN builds a plan for every new length while the step waits"
_COSTS_OF_DOCUMENTS = {"cudnn": _PLANS, "te": f"if it picks cuDNN: {_PLANS}", "sdpa": f"if it picks cuDNN: {_PLANS}"}
"""The cost of kernels without a varlen call where documents mask attention."""


def attention(request: KernelRequest) -> list[Candidate[AttentionKernel]]:
    def transformer_engine() -> AttentionKernel:
        from megatron.core.backends.transformer_engine import TransformerEngineAttention

        assert request.engine is not None
        return TransformerEngineAttention(request.engine)

    def usable(make: Callable[[], AttentionKernel]) -> AttentionKernel:
        kernel = make()
        if request.needs_log_sum_exp and not kernel.returns_log_sum_exp:
            needed = "context parallelism, CPU offload and --softmax-type need"
            raise Unavailable(f"it does not return the log-sum-exp, which {needed}")
        return kernel

    # A candidate for every known name, so that a flag can require it; those that are preferred come first.
    kernels: dict[str, tuple[str, Callable[[], AttentionKernel]]] = {
        "te": ("Transformer Engine chooses the kernel", transformer_engine),
        **_ATTENTION,
    }
    preferred = _preferred_attention(request)
    costs = _COSTS_OF_DOCUMENTS if request.masks_attention and request.on_gpu else {}
    mask = request.mask if request.mask.window is None else replace(request.mask, window=LENGTH // 3)
    at_sizes = request.sizes, request.device, request.weight, request.masks_attention, mask
    return [
        Candidate(
            name,
            partial(usable, kernels[name][1]),
            kernels[name][0],
            is_automatic=name in preferred,
            obstacle=_attention_obstacle(request, name),
            trial=None if name == "reference" else request.trial(request.trials.attention, *at_sizes),
            cost=costs.get(name, ""),
            # What these kernels save is what torch's FlashAttention saves.
            simulated=(lambda compiler: CudaFlashAttention()) if name in ("te", "flash3", "cudnn_varlen") else None,
        )
        for name in dict.fromkeys((*preferred, *kernels))
    ]


def _preferred_attention(request: KernelRequest) -> list[str]:
    """Names in order of preference. With documents, kernels with a varlen call come before those that build a plan for
    every length; under context parallelism, too, because documents cut the tiles."""
    name_of = {make: name for name, (_, make) in _ATTENTION.items()}
    backend, in_documents = request.attention_backend, request.masks_attention
    names = [name_of[type(kernel)] for kernel in attention_kernels(backend, in_documents)]
    if backend == "auto" and request.machine.is_hopper:
        names.insert(names.index("reference") if in_documents else 0, "cudnn")
    if backend in ("auto", "flash") and request.machine.is_hopper:
        names.insert(0, "flash3")
    if backend == "auto" and request.engine is not None:
        names.insert(names.index("sdpa") if in_documents else 0, "te")
    return list(dict.fromkeys(names))


def _attention_obstacle(request: KernelRequest, name: str) -> str | None:
    # The planner simulates local layers in place of Transformer Engine's, whose package it does not load.
    if name == "te" and request.engine is None and request.machine.simulated_compiler is None:
        return "it needs --transformer-impl transformer_engine"
    of_package = name in ("te", "flash3")
    supports = HalfPrecisionGpuKernel().supports if of_package else _ATTENTION[name][1]().supports
    if not supports(request.device, request.weight):
        return f"it does not support {short_name(request.weight)} on {request.device.type}"
    if name.startswith("cudnn") and torch.are_deterministic_algorithms_enabled():
        return "its backward pass is not deterministic"  # the operator itself does not refuse that
    # Transformer Engine's kernels have windows, and no cap.
    has_mask = request.mask.soft_cap is None if name == "te" else _ATTENTION[name][1].supports_mask(request.mask)
    return None if has_mask else "it does not support --window-size, or --attn-logit-softcapping"


# GEMMs


def weight_gradient(request: KernelRequest) -> list[Candidate[WeightGradientKernel]]:
    half_into_fp32 = request.on_gpu and request.weight.itemsize == 2 and request.gradient == torch.float32
    in_place = apex = None
    if not half_into_fp32:
        apex = "apex only accumulates half-precision products in fp32 on GPUs"
        if request.gradient != request.weight:
            formats = f"{short_name(request.weight)} products and {short_name(request.gradient)} gradients"
            in_place = f"torch has no in-place kernel for {formats} on {request.device.type}"
    trial = request.trial(request.trials.weight_gradient, request.device, request.weight, request.gradient)
    # On CPUs oneDNN's fp32 GEMM, which cannot add in place, is faster (docs/performance_cpu.md).
    is_preferred = request.on_gpu or request.weight == torch.float64
    return [
        Candidate(
            "in_place", InPlaceWeightGradient, "the GEMM adds to the main gradient", is_preferred, in_place, trial
        ),
        Candidate("separate", SeparateWeightGradient, "a GEMM, then an addition"),
        replace(
            _of_package(request, "apex", "WeightGradient", lambda compiler: InPlaceWeightGradient()),
            obstacle=apex,
            trial=trial,
        ),
    ]


LAUNCH_FLOPS = 5e9
"""FLOPs of a GEMM that takes an H100 about as long as the host needs to launch it, 8 us. An estimate."""


def grouped_gemm(request: KernelRequest, weight_gradient: WeightGradientKernel) -> list[Candidate[GroupedGemm]]:
    """The GEMMs of experts. ``weight_gradient`` is the chosen kernel for the weight gradients of linear layers."""
    experts = request.experts
    grouped = padded = None
    if request.weight != torch.bfloat16:
        grouped = f"torch's grouped GEMM multiplies bf16, not {short_name(request.weight)}"
    elif experts is not None and (experts.hidden_size % 8 or experts.width % 8):
        widths = f"{experts.hidden_size} or {experts.width}, the width of an expert's matrix,"
        grouped = f"{widths} is no multiple of 16 bytes"
    if request.on_gpu or onednn_linear() is None:
        padded = "it is for CPUs with oneDNN"
    elif request.weight == torch.float64:
        padded = "oneDNN does not multiply fp64"
    # The host launches long GEMMs ahead of the GPU; short ones wait for it.
    is_short = experts is not None and experts.flops < LAUNCH_FLOPS
    # A grouped GEMM for weight gradients, then an addition, instead of a GEMM for each expert.
    of_group = None if is_short or isinstance(weight_gradient, SeparateWeightGradient) else weight_gradient
    trial = request.trial(request.trials.grouped_gemm, request.device, request.weight, request.gradient)
    # For one expert a grouped GEMM is a GEMM. On CPUs it is slower (docs/performance_cpu.md).
    is_preferred = request.on_gpu and experts is not None and experts.count > 1
    one_launch, few_shapes = "one launch for all experts", "a GEMM for each expert, of few shapes"
    added = f"{one_launch}, which adds their weight gradients"
    triton = _of_triton(request, "grouped.TritonGroupedGemm", added, SimulatedTritonGroupedGemm, trial)
    return [
        replace(triton, is_automatic=is_preferred and is_short, obstacle=triton.obstacle or grouped),
        Candidate("grouped_mm", partial(TorchGroupedGemm, of_group), one_launch, is_preferred, grouped, trial),
        Candidate("padded", partial(PaddedGroupedGemm, weight_gradient), few_shapes, not request.on_gpu, padded),
        Candidate("loop", partial(LoopGroupedGemm, weight_gradient), "a GEMM for each expert"),
    ]


# FP8

_FOR_BLOCKS = "for --fp8-recipe blockwise"


def fp8_quantization(request: KernelRequest) -> list[Candidate[Quantization]]:
    trial = request.trial(request.trials.fp8_quantization, request.device, request.weight)
    return [
        _of_triton(request, "fp8.TritonQuantization", "one pass", SimulatedQuantization, trial),
        Candidate("eager", EagerQuantization, "one operation after the other"),
        Candidate("compiled", EagerQuantization, "", False, f"it is {_FOR_BLOCKS}"),
    ]


def block_quantization(request: KernelRequest) -> list[Candidate[BlockQuantization]]:
    trial = request.trial(request.trials.block_quantization, request.device, request.weight)
    return [
        *_elementwise(request, BlockQuantization, BlockQuantization, trial),
        Candidate("triton", BlockQuantization, "", False, f"it is not {_FOR_BLOCKS}"),
    ]


def fp8_weight_gradient(request: KernelRequest, gemm: ScaledGemm) -> list[Candidate[Fp8WeightGradientKernel]]:
    trial = request.trial(request.trials.fp8_weight_gradient, request.device, request.gradient)
    path, simulated = "fp8.TritonFp8WeightGradient", partial(SimulatedFp8WeightGradient, gemm)

    def in_place() -> Fp8WeightGradientKernel:
        if scaled_addmm_ is None:
            raise Unavailable("this version of torch has no scaled_addmm_")
        return InPlaceFp8WeightGradient(gemm, scaled_addmm_)

    # Without it `separate` is no stand-in.
    is_preferred, obstacle = scaled_addmm_ is not None and request.on_gpu, None if request.on_gpu else "it needs a GPU"
    added = "the GEMM adds to the main gradient"
    accumulating = Candidate("in_place", in_place, added, is_preferred, obstacle, trial, simulated=simulated)
    # Its speed is unmeasured.
    triton = replace(_of_triton(request, path, "", simulated, trial), is_automatic=False)
    if request.has_block_scales:
        not_of_blocks = f"it is not {_FOR_BLOCKS}"
        accumulating, triton = (replace(one, obstacle=not_of_blocks) for one in (accumulating, triton))
    return [
        accumulating,
        Candidate("separate", lambda: SeparateFp8WeightGradient(gemm), "a GEMM, then an addition"),
        triton,
    ]


# Elementwise kernels


def rms_norm(request: KernelRequest) -> list[Candidate[RMSNormKernel]]:
    trials, at_sizes = request.trials, (request.sizes, request.device, request.weight)
    trial, of_quantised = (request.trial(one, *at_sizes) for one in (trials.rms_norm, trials.quantized_rms_norm))
    return [
        _quantising(request, "elementwise.TritonRMSNorm", SimulatedRMSNorm, of_quantised),
        *_elementwise(request, EagerRMSNorm, CompiledRMSNorm, trial),
        *_of_packages(request, "RMSNorm", CompiledRMSNorm),
    ]


def swiglu(request: KernelRequest) -> list[Candidate[SwiGLUKernel]]:
    # Experts and dense layers may have other widths, and a compiled kernel is another for each.
    def try_all_widths(kernel: SwiGLUKernel) -> None:
        request.trials.swiglu(kernel, *at_sizes)
        if request.experts is not None:
            sizes = replace(request.sizes, mlp_width=request.experts.width)
            request.trials.swiglu(kernel, sizes, request.device, request.weight)

    at_sizes = request.sizes, request.device, request.weight
    of_quantised = request.trial(request.trials.quantized_swiglu, *at_sizes)
    return [
        _quantising(request, "elementwise.TritonSwiGLU", SimulatedSwiGLU, of_quantised),
        *_elementwise(request, EagerSwiGLU, CompiledSwiGLU, request.trial(try_all_widths)),
    ]


def rope(request: KernelRequest) -> list[Candidate[Rotation]]:
    at_sizes = request.sizes, request.device, request.weight, request.resets_positions
    trial = request.trial(request.trials.rotation, *at_sizes)
    return [
        _of_triton(request, "elementwise.rotate", "one pass", lambda compiler: compiler(rotate_), trial),
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

    fused = "torch.compile fuses it"
    return [
        Candidate("compiled", compilable, fused, request.on_gpu, trial=trial, simulated=compiled),
        Candidate("eager", eager, "one operation after the other"),
    ]


def _quantising(
    request: KernelRequest, path: str, simulated: Callable[[Compiler], T], trial: Callable[[T], None] | None
) -> Candidate[T]:
    """A compiled kernel whose Triton version also quantises its output."""
    candidate = _of_triton(request, path, "compiled, and quantises", simulated, trial)

    def make() -> T:
        if request.compiler_obstacle is not None:
            raise Unavailable(request.compiler_obstacle)
        return candidate.make()

    if request.has_delayed_scales:
        return replace(candidate, make=make)
    obstacle = "it quantises for FP8 with delayed scaling, which this run does not use"
    return replace(candidate, is_automatic=False, obstacle=obstacle)


# The optimizer's kernels


def adam(request: KernelRequest) -> list[Candidate[AdamBuilder]]:
    others: list[Candidate[AdamBuilder]] = _of_packages(request, "adam", lambda compiler: torch_adam)
    return [Candidate("torch", lambda: torch_adam, "torch's fused AdamW"), *others]


def l2_norm(request: KernelRequest) -> list[Candidate[SquaredNorm]]:
    others: list[Candidate[SquaredNorm]] = _of_packages(request, "squared_norm", lambda compiler: torch_squared_norm)
    return [Candidate("torch", lambda: torch_squared_norm, "torch._foreach_norm"), *others]


# Packages, whose modules are loaded when a kernel is made


def _of_packages(request: KernelRequest, kernel: str, simulated: Callable[[Compiler], T]) -> list[Candidate[T]]:
    """The ``kernel`` of every optional package, which is assumed to need the memory of ``simulated``."""
    return [_of_package(request, name, kernel, simulated) for name in ("apex", "te")]


def _of_package(request: KernelRequest, name: str, kernel: str, simulated: Callable[[Compiler], T]) -> Candidate[T]:
    module, package = {"apex": ("apex", "apex"), "te": ("transformer_engine", "Transformer Engine")}[name]
    obstacle = None if request.on_gpu else "it needs a GPU"
    if request.weight == torch.float64:
        obstacle = obstacle or "it does not support fp64"

    def make() -> T:
        made: T = getattr(load(f"megatron.core.backends.{module}", package), kernel)()
        return made

    return Candidate(name, make, "", is_automatic=False, obstacle=obstacle, simulated=simulated)


def _of_triton(
    request: KernelRequest,
    path: str,
    merit: str,
    simulated: Callable[[Compiler], T],
    trial: Callable[[T], None] | None,
) -> Candidate[T]:
    """``MODULE.NAME`` of our Triton kernels: a function, or an object of a class."""
    module, name = path.split(".")

    def make() -> Any:
        if request.machine.missing_for_triton is not None:
            raise Unavailable(f"it needs {request.machine.missing_for_triton}")
        kernel = getattr(load(f"megatron.core.backends.triton_{module}", "Triton"), name)
        return kernel() if name.startswith("Triton") else kernel

    obstacle = None if request.on_gpu else "it needs a GPU"
    return Candidate("triton", make, merit, request.on_gpu, obstacle, trial, simulated=simulated)


# What Triton's kernels launch and allocate where they are simulated. A compiler says what one kernel is.


class SimulatedSwiGLU(CompiledSwiGLU):
    """:class:`~megatron.core.backends.triton_elementwise.TritonSwiGLU`: the reciprocal of the scale, and one kernel."""

    def quantized(self, gate_and_up: Tensor, quantization: DelayedQuantization) -> QuantizedTensor:
        eagerly = replace(quantization, quantization=EagerQuantization())

        def write(gate_and_up: Tensor) -> tuple[Tensor | None, ...]:
            found = eagerly.quantize(swiglu_reference(gate_and_up))
            return found.data, found.transposed

        inverse_scale = quantization.target.scale.reciprocal()
        data, transposed = self._compiler(write)(gate_and_up)
        return QuantizedTensor(data, inverse_scale, transposed)


class SimulatedRMSNorm(CompiledRMSNorm):
    """:class:`~megatron.core.backends.triton_elementwise.TritonRMSNorm`: the reciprocal of the scale, a kernel for the
    inverse RMS and the rows, and one for the transpose."""

    def quantized(
        self, inputs: Tensor, weight: Tensor, epsilon: float, quantization: DelayedQuantization
    ) -> tuple[QuantizedTensor, Tensor]:
        both = replace(quantization.target, layout=Layout.BOTH)
        eagerly = replace(quantization, quantization=EagerQuantization(), target=both)

        def write_rows(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            output, inverse_rms = normalise(inputs, weight, epsilon)
            data = eagerly.quantize(output).data
            return data if Layout.ROWS in quantization.target.layout else data.new_empty(0), inverse_rms

        def write_transpose(inputs: Tensor, weight: Tensor, inverse_rms: Tensor) -> Tensor | None:
            return eagerly.quantize(inputs * inverse_rms * weight).transposed

        inverse_scale = quantization.target.scale.reciprocal()
        data, inverse_rms = self._compiler(write_rows)(inputs, weight)
        transposed = None
        if Layout.TRANSPOSED in quantization.target.layout:
            transposed = self._compiler(write_transpose)(inputs, weight, inverse_rms)
        return QuantizedTensor(data, inverse_scale, transposed), inverse_rms


class SimulatedQuantization:
    """:class:`~megatron.core.backends.triton_fp8.TritonQuantization`: one kernel, and under delayed scaling the
    reciprocal of the scale before."""

    def __init__(self, compiler: Compiler) -> None:
        eager = EagerQuantization()
        self._eager, self._compiler = eager, compiler
        self.current_scale, self.transpose = compiler(eager.current_scale), compiler(eager.transpose)

    def quantize(self, tensor: Tensor, target: Fp8Format, amax: Tensor, out: Tensor | None = None) -> QuantizedTensor:
        def write(tensor: Tensor, scale: Tensor, out: Tensor | None) -> tuple[Tensor | None, ...]:
            found = self._eager.quantize(tensor, replace(target, scale=scale), amax, out)
            return found.data, found.inverse_scale, found.transposed

        return QuantizedTensor(*self._compiler(write)(tensor, target.scale, out))

    def quantize_and_record(self, tensor: Tensor, target: Fp8Format, step_amax: Tensor) -> QuantizedTensor:
        inverse_scale = target.scale.reciprocal()
        return replace(self.quantize(tensor, target, step_amax), inverse_scale=inverse_scale)


class SimulatedTritonGroupedGemm(TorchGroupedGemm):
    """:class:`~megatron.core.backends.triton_grouped.TritonGroupedGemm`: one batched GEMM of groups of equal rows."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__()

    def weight_gradient(self, grad_outputs: Tensor, inputs: Tensor, counts: RowCounts) -> GradientProduct:
        return _BatchedWeightGradient(grad_outputs, inputs, counts)


@dataclass(frozen=True)
class _BatchedWeightGradient(GroupedWeightGradient):
    """One batched GEMM, as if every group had the mean number of rows."""

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        groups = len(self.counts.host)
        rows = self.inputs.shape[0] // groups
        dy, x = (one[: groups * rows].view(groups, rows, -1) for one in (self.grad_outputs, self.inputs))
        matrices, left = self.counts.matrices(buffer), dy.transpose(1, 2)
        if accumulate:
            torch.ops.aten.baddbmm.dtype_out(matrices, left, x, buffer.dtype, out=matrices)
        else:
            torch.ops.aten.bmm.dtype_out(left, x, buffer.dtype, out=matrices)


class SimulatedFp8WeightGradient:
    """:class:`~megatron.core.backends.triton_fp8.TritonFp8WeightGradient`: one kernel."""

    def __init__(self, gemm: ScaledGemm, compiler: Compiler) -> None:
        self.write = compiler(SeparateFp8WeightGradient(gemm).write)
