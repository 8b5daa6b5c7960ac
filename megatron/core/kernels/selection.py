"""The implementations of every operation in order of preference, and the choice among them.

On a GPU each kernel that depends on the hardware, and the compiler, is tried once against the reference before it is
chosen. So a kernel that fails or is wrong is reported at the start and not at the first step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megatron.config.kernels import KernelConfig, Wanted
from megatron.core.kernels.choice import Candidate, Choice, Unavailable, attempt, choose, load
from megatron.core.kernels.fp8 import quantization_candidates, weight_gradient_candidates
from megatron.core.kernels.toolchain import missing_for_inductor, missing_for_triton
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.attention_interface import AttentionKernel
from megatron.core.ops.attention_kernels import (
    CpuFlashAttention,
    CudaFlashAttention,
    CudnnAttention,
    ReferenceAttention,
    TorchAttention,
    attention_kernels,
)
from megatron.core.ops.cross_entropy import CompiledCrossEntropy, CrossEntropyKernel, EagerCrossEntropy
from megatron.core.ops.fp8 import Fp8Kernels, gemm_for
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient, WeightGradientKernel
from megatron.core.ops.norm import CompiledRMSNorm, EagerRMSNorm, RMSNormKernel
from megatron.core.ops.rope import CompiledRotation, Rotation, rotary_frequencies, rotary_table, rotate_
from megatron.core.ops.swiglu import CompiledSwiGLU, EagerSwiGLU, SwiGLUKernel
from megatron.core.optimizer.kernels import AdamBuilder, OptimizerKernels, SquaredNorm, torch_adam, torch_squared_norm

if TYPE_CHECKING:
    from megatron.core.backends.transformer_engine.package import TransformerEngine

T = TypeVar("T")


@dataclass(frozen=True)
class LayerKernels:
    """The elementwise kernels of a layer, and the loss."""

    rms_norm: RMSNormKernel = field(default_factory=EagerRMSNorm)
    swiglu: SwiGLUKernel = field(default_factory=EagerSwiGLU)
    rotate: Rotation = rotate_
    cross_entropy: CrossEntropyKernel = field(default_factory=EagerCrossEntropy)


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
    attention: AttentionShape
    needs_log_sum_exp: bool = False
    """Whether attention must return the log-sum-exp (context parallelism, CPU offload)."""
    attention_backend: str = "auto"
    engine: "TransformerEngine | None" = None
    fp8: bool = False
    """Whether linear layers of this project multiply in FP8."""

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

    rms_norm: list[Candidate[RMSNormKernel]] = _elementwise(setting, EagerRMSNorm, CompiledRMSNorm)
    rms_norm += _optional(setting, "RMSNorm")
    swiglu: list[Candidate[SwiGLUKernel]] = _elementwise(setting, EagerSwiGLU, CompiledSwiGLU)
    rope: list[Candidate[Rotation]] = _elementwise(setting, lambda: rotate_, CompiledRotation)
    rope.insert(0, Candidate("triton", partial(_triton_rotation, setting), "one pass", is_automatic=setting.on_gpu))
    cross_entropy: list[Candidate[CrossEntropyKernel]] = _elementwise(setting, EagerCrossEntropy, CompiledCrossEntropy)
    adam: list[Candidate[AdamBuilder]] = [
        Candidate("torch", lambda: torch_adam, "torch's fused AdamW"),
        *_optional(setting, "adam"),
    ]
    l2_norm: list[Candidate[SquaredNorm]] = [
        Candidate("torch", lambda: torch_squared_norm, "torch._foreach_norm"),
        *_optional(setting, "squared_norm"),
    ]
    fp8 = Fp8Kernels.eager(gemm_for(setting.device))
    if setting.fp8:
        fp8 = Fp8Kernels(
            fp8.gemm,
            chosen("fp8_quantization", quantization_candidates(setting)),
            chosen("fp8_weight_gradient", weight_gradient_candidates(setting, fp8.gemm)),
        )
    return Kernels(
        attention=chosen("attention", _attention(setting, config.wanted("attention"))),
        weight_gradient=chosen("weight_gradient", _weight_gradient(setting)),
        layers=LayerKernels(
            rms_norm=chosen("rms_norm", rms_norm),
            swiglu=chosen("swiglu", swiglu),
            rotate=chosen("rope", rope),
            cross_entropy=chosen("cross_entropy", cross_entropy),
        ),
        optimizer=OptimizerKernels(adam=chosen("adam", adam), squared_norm=chosen("l2_norm", l2_norm)),
        fp8=fp8,
        engine=setting.engine,
        choices=tuple(choices),
    )


def _linear(setting: Setting) -> Choice:
    """The linear layers, by ``--transformer-impl``."""
    if setting.engine is None:
        return Choice("linear", "local", "the layers of this project")
    asked = f"version {setting.engine.version}, by --transformer-impl; with the norms before linear layers"
    return Choice("linear", "transformer_engine", asked)


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
    "flash3": "made for Hopper",
    "cudnn": "cuDNN's kernel for Hopper",
    "flash": "torch's FlashAttention 2",
    "sdpa": "torch chooses the kernel",
    "cpu": "torch's flash attention for CPUs",
    "reference": "the definition; holds all scores",
}


def _attention(setting: Setting, wanted: Wanted | None) -> list[Candidate[AttentionKernel]]:
    candidates = []
    if wanted is not None or (setting.engine is not None and setting.attention_backend == "auto"):
        make = partial(_usable_attention, partial(_transformer_engine_attention, setting), setting)
        candidates.append(Candidate("te", make, "Transformer Engine chooses the kernel"))
    names = []
    if setting.is_hopper and setting.attention_backend in ("auto", "flash"):
        names.append("flash3")
    if setting.is_hopper and setting.attention_backend == "auto":
        names.append("cudnn")
    name_of = {kernel: name for name, kernel in _ATTENTION.items()}
    names += [name_of[type(kernel)] for kernel in attention_kernels(setting.attention_backend)]
    for name in dict.fromkeys(names) if wanted is None else _ATTENTION:
        make = partial(_usable_attention, _ATTENTION[name], setting)
        candidates.append(Candidate(name, make, _MERITS[name]))
    return candidates


def _transformer_engine_attention(setting: Setting) -> AttentionKernel:
    if setting.engine is None:
        raise Unavailable("it needs --transformer-impl transformer_engine")
    from megatron.core.backends.transformer_engine.attention import TransformerEngineAttention

    return TransformerEngineAttention(setting.engine)


def _usable_attention(make: Callable[[], AttentionKernel], setting: Setting) -> AttentionKernel:
    kernel = make()
    if not kernel.supports(setting.device, setting.weight):
        raise Unavailable(f"it does not support {_short(setting.weight)} on {setting.device.type}")
    if setting.needs_log_sum_exp and not kernel.returns_log_sum_exp:
        raise Unavailable("it does not return the log-sum-exp, which context parallelism and CPU offload need")
    if isinstance(kernel, CudnnAttention) and torch.are_deterministic_algorithms_enabled():
        # The operator itself does not refuse that.
        raise Unavailable("its backward pass is not deterministic")
    if setting.can_try and not isinstance(kernel, ReferenceAttention):
        attempt(lambda: try_attention(kernel, setting.attention, setting.device, setting.weight))
    return kernel


def try_attention(kernel: AttentionKernel, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
    """Compare a kernel with the reference on some heads of ``shape``, in a model's memory layout; raises
    :class:`Unavailable`."""
    batch, groups, length, generator = 2, 2, 192, torch.Generator().manual_seed(0)
    heads = groups * (shape.query_heads // shape.key_value_heads)
    some = AttentionShape(heads, groups, shape.head_size)

    def random(heads: int) -> Tensor:
        return torch.randn(length, batch, heads * shape.head_size, generator=generator).to(device, dtype)

    query, key, value = some.split(random(heads + 2 * groups))
    grad = some.query_heads_of(random(heads))
    found, expected = (one.forward(query, key, value, is_causal=True) for one in (kernel, ReferenceAttention()))
    pairs = [(found.output, expected.output)]
    if found.log_sum_exp is not None and expected.log_sum_exp is not None:
        pairs.append((found.log_sum_exp, expected.log_sum_exp))
    # Saved as the input of the next layer, [s, b, n d].
    joined = replace(found, output=some.query_heads_of(found.output.permute(2, 0, 1, 3).flatten(2)))
    grads, expected_grads = (
        one.backward(grad, query, key, value, part, is_causal=True)
        for one, part in ((kernel, joined), (ReferenceAttention(), expected))
    )
    for one, other in (*pairs, *zip(grads, expected_grads, strict=True)):
        _compare(one, other)


# Products and elementwise work


def _weight_gradient(setting: Setting) -> list[Candidate[WeightGradientKernel]]:
    def in_place() -> WeightGradientKernel:
        is_wider = setting.gradient != setting.weight
        if is_wider and not (setting.on_gpu and setting.weight.itemsize == 2 and setting.gradient == torch.float32):
            formats = f"{_short(setting.weight)} products and {_short(setting.gradient)} gradients"
            raise Unavailable(f"torch has no in-place kernel for {formats} on {setting.device.type}")
        return _tried_weight_gradient(InPlaceWeightGradient(), setting)

    def apex() -> WeightGradientKernel:
        if not (setting.on_gpu and setting.weight.itemsize == 2 and setting.gradient == torch.float32):
            raise Unavailable("apex only accumulates half-precision products in fp32 on GPUs")
        return _tried_weight_gradient(_from_backend(setting, "apex", "WeightGradient"), setting)

    return [
        Candidate(
            "in_place",
            in_place,
            "the product adds to the gradient buffer",
            # On CPUs oneDNN's fp32 GEMM, which cannot add in place, is faster (docs/performance.md).
            is_automatic=setting.on_gpu or setting.weight == torch.float64,
        ),
        Candidate("separate", SeparateWeightGradient, "a product, then a sum"),
        Candidate("apex", apex, "", is_automatic=False),
    ]


def _tried_weight_gradient(kernel: WeightGradientKernel, setting: Setting) -> WeightGradientKernel:
    if setting.can_try:
        attempt(lambda: try_weight_gradient(kernel, setting.device, setting.weight, setting.gradient))
    return kernel


def try_weight_gradient(
    kernel: WeightGradientKernel, device: torch.device, dtype: torch.dtype, buffer_dtype: torch.dtype
) -> None:
    """Compare two products in one buffer with the sum of both; raises :class:`Unavailable`."""
    generator = torch.Generator().manual_seed(0)
    grad_outputs, inputs = (
        torch.randn(64, width, generator=generator, dtype=torch.float64).to(device, dtype) for width in (32, 48)
    )
    buffer = torch.full((32, 48), torch.nan, dtype=buffer_dtype, device=device)
    for accumulate in (False, True):
        kernel.write(buffer, grad_outputs, inputs, accumulate)
    _compare(buffer, 2 * (grad_outputs.double().t() @ inputs.double()))


def _elementwise(setting: Setting, eager: Callable[[], T], compiled: Callable[[], T]) -> list[Candidate[T]]:
    def compilable() -> T:
        obstacle = compiler_obstacle(setting)
        if obstacle is not None:
            raise Unavailable(obstacle)
        return compiled()

    return [
        Candidate("compiled", compilable, "torch.compile fuses it", is_automatic=setting.on_gpu),
        Candidate("eager", eager, "one operation after the other"),
    ]


def _triton_rotation(setting: Setting) -> Rotation:
    missing = missing_for_triton() if setting.on_gpu else "a GPU"
    if missing is not None:
        raise Unavailable(f"it needs {missing}")
    rotate: Rotation = load("megatron.core.backends.triton.rope", "Triton").rotate
    if setting.can_try:
        attempt(lambda: try_rotation(rotate, setting.attention, setting.device, setting.weight))
    return rotate


def try_rotation(rotate: Rotation, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
    """Compare a rotation, in both directions, with the eager one, on a projection of ``shape`` whose sequences have
    positions of their own; raises :class:`Unavailable`."""
    length, batch, generator = 24, 2, torch.Generator().manual_seed(0)
    width = shape.rotated_size + shape.key_value_heads * shape.head_size
    fused = torch.randn(length, batch, width, generator=generator).to(device, dtype)
    positions = torch.randint(1000, (length, batch), generator=generator).to(device)
    table = rotary_table(rotary_frequencies(shape.head_size, 10000.0), positions, dtype)
    for angles in (table, table.conj()):
        found, expected = fused.clone(), fused.clone()
        for one, result in ((rotate, found), (rotate_, expected)):
            one(result[..., : shape.rotated_size], angles)
        _compare(found, expected)


def compiler_obstacle(setting: Setting) -> str | None:
    """What ``torch.compile`` lacks; None if nothing."""
    missing = missing_for_inductor(setting.on_gpu)
    if missing is not None:
        return f"torch.compile needs {missing}"
    return setting.compiler_failure if setting.can_try else None


def try_compiler(device: torch.device) -> str | None:
    """Why a small function does not compile, or gives a wrong result; None if it compiles."""

    # A function of its own: one that is compiled for a second shape is compiled for all shapes.
    def gated(numbers: Tensor) -> Tensor:
        return numbers * torch.sigmoid(numbers)

    numbers = torch.linspace(-2.0, 2.0, 48, device=device)
    try:
        attempt(lambda: _compare(torch.compile(gated, fullgraph=True)(numbers), gated(numbers)))
    except Unavailable as error:
        return f"torch.compile does not work: {error}"
    return None


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


# Trials


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(found: Tensor, expected: Tensor) -> None:
    """Accept a twentieth of the largest element: a wrong mask or head exceeds it, rounding never does."""
    if found.shape != expected.shape:
        raise Unavailable(f"a trial returned shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    if not error < 0.05:
        raise Unavailable(f"a trial had a relative error of {error:.0%}")
