"""The implementations of the grouped GEMMs of experts in order of preference, and their trial on a GPU."""

from collections.abc import Sequence

import torch

from megatron.core.kernels.choice import Candidate, short_name
from megatron.core.kernels.request import ExpertSizes, KernelRequest
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, PaddedGroupedGemm, TorchGroupedGemm
from megatron.core.ops.matmul import SeparateWeightGradient, WeightGradientKernel
from megatron.core.packages import Unavailable
from megatron.torch_compat import onednn_linear


def grouped_gemm_candidates(
    request: KernelRequest, weight_gradient: WeightGradientKernel
) -> Sequence[Candidate[GroupedGemm]]:
    """``weight_gradient`` is the chosen kernel for the weight gradients of linear layers."""

    def grouped() -> GroupedGemm:
        obstacle = obstacle_to_grouped_mm(request.weight, request.experts)
        if obstacle is not None:
            raise Unavailable(obstacle)
        return torch_grouped_gemm(weight_gradient)

    def padded() -> GroupedGemm:
        if request.on_gpu or onednn_linear() is None:
            raise Unavailable("it is for CPUs with oneDNN")
        if request.weight == torch.float64:
            raise Unavailable("oneDNN does not multiply fp64")
        return PaddedGroupedGemm(weight_gradient)

    def trial(kernel: GroupedGemm) -> None:
        request.trials.grouped_gemm(kernel, request.device, request.weight, request.gradient)

    # For one expert a grouped GEMM is a GEMM. On CPUs it is slower (docs/performance.md).
    is_preferred = request.on_gpu and request.experts is not None and request.experts.count > 1
    return [
        Candidate("grouped_mm", grouped, "one launch for all experts", is_preferred, request.trial(trial)),
        Candidate("padded", padded, "a GEMM for each expert, of few shapes", is_automatic=not request.on_gpu),
        Candidate("loop", lambda: LoopGroupedGemm(weight_gradient), "a GEMM for each expert"),
    ]


def obstacle_to_grouped_mm(dtype: torch.dtype, experts: ExpertSizes | None) -> str | None:
    """Why torch's grouped GEMM does not multiply the matrices of ``experts``; None if it does."""
    if dtype != torch.bfloat16:
        return f"torch's grouped GEMM multiplies bf16, not {short_name(dtype)}"
    if experts is not None and (experts.hidden_size % 8 or experts.width % 8):
        return f"{experts.hidden_size} or {experts.width}, the width of an expert's matrix, is no multiple of 16 bytes"
    return None


def torch_grouped_gemm(weight_gradient: WeightGradientKernel) -> TorchGroupedGemm:
    """torch's grouped GEMM with ``weight_gradient``; separate GEMMs for weight gradients are one grouped GEMM."""
    return TorchGroupedGemm(None if isinstance(weight_gradient, SeparateWeightGradient) else weight_gradient)
