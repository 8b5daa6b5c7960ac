"""The implementations of attention in order of preference, and their trials on a GPU."""

from collections.abc import Callable
from functools import partial

import torch

from megatron.config.kernels import Wanted
from megatron.core.kernels.choice import Candidate, short_name
from megatron.core.kernels.request import KernelRequest
from megatron.core.ops.attention_interface import AttentionKernel
from megatron.core.ops.attention_kernels import (
    CpuFlashAttention,
    CudaFlashAttention,
    CudnnAttention,
    ReferenceAttention,
    TorchAttention,
    attention_kernels,
)
from megatron.core.packages import Unavailable, load

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
    "reference": "the definition; stores all scores",
}


_PLANS = "one call per document, and cuDNN builds a plan for every new length while the step waits"
_COSTS_OF_DOCUMENTS = {"cudnn": _PLANS, "te": f"if it picks cuDNN: {_PLANS}", "sdpa": f"if it picks cuDNN: {_PLANS}"}
"""What kernels without a varlen call cost where documents mask attention."""


def attention_candidates(request: KernelRequest, wanted: Wanted | None) -> list[Candidate[AttentionKernel]]:
    makers: dict[str, Callable[[], AttentionKernel]] = {
        "te": partial(_transformer_engine_attention, request),
        **_ATTENTION,
    }
    merits = {"te": "Transformer Engine chooses the kernel", **_MERITS}

    def trial(kernel: AttentionKernel) -> None:
        if not isinstance(kernel, ReferenceAttention):
            request.trials.attention(kernel, request.sizes, request.device, request.weight, request.masks_attention)

    costs = _COSTS_OF_DOCUMENTS if request.masks_attention and request.on_gpu else {}
    return [
        Candidate(
            name,
            partial(_usable_attention, makers[name], request),
            merits[name],
            trial=request.trial(trial),
            cost=costs.get(name, ""),
        )
        for name in (_preferred_attention(request) if wanted is None else makers)
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
    from megatron.core.backends.transformer_engine.attention import TransformerEngineAttention

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
