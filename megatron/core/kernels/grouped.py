"""The implementations of the grouped GEMMs of experts in order of preference, and their trial on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron.core.kernels.choice import Candidate, Unavailable, short_name
from megatron.core.kernels.trials import compare, random
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, PaddedGroupedGemm, RowCounts, TorchGroupedGemm
from megatron.core.ops.matmul import SeparateWeightGradient, WeightGradientKernel
from megatron.torch_compat import onednn_linear

if TYPE_CHECKING:
    from megatron.core.kernels.selection import Setting


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a layer on one rank."""

    count: int
    hidden_size: int
    width: int
    """``f / etp``."""


def grouped_gemm_candidates(
    setting: "Setting", weight_gradient: WeightGradientKernel
) -> Sequence[Candidate[GroupedGemm]]:
    """``weight_gradient`` is the chosen kernel for the weight gradients of linear layers."""

    def grouped() -> GroupedGemm:
        obstacle = obstacle_to_grouped_mm(setting.weight, setting.experts)
        if obstacle is not None:
            raise Unavailable(obstacle)
        return torch_grouped_gemm(weight_gradient)

    def padded() -> GroupedGemm:
        if setting.on_gpu or onednn_linear() is None:
            raise Unavailable("it is for CPUs with oneDNN")
        if setting.weight == torch.float64:
            raise Unavailable("oneDNN does not multiply fp64")
        return PaddedGroupedGemm(weight_gradient)

    # For one expert a grouped GEMM is a GEMM. On CPUs it is slower (docs/performance.md).
    is_preferred = setting.on_gpu and setting.experts is not None and setting.experts.count > 1
    return [
        Candidate(
            "grouped_mm", grouped, "one launch for all experts", is_preferred, setting.trial(partial(_try, setting))
        ),
        Candidate("padded", padded, "a GEMM for each expert, of few shapes", is_automatic=not setting.on_gpu),
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


def _try(setting: "Setting", kernel: GroupedGemm) -> None:
    try_grouped_gemm(kernel, setting.device, setting.weight, setting.gradient)


def try_grouped_gemm(kernel: GroupedGemm, device: torch.device, dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    """Compare all three GEMMs with the reference, two weight gradients in one buffer, for few and many rows of a group
    and for none; raises :class:`Unavailable`."""
    n, k, reference = 48, 32, LoopGroupedGemm()
    for rows in ((5, 0, 77, 16), (0, 130, 1, 0), (0, 0, 0, 0)):
        counts = RowCounts.of(rows, device)
        x, dy, weight = (
            random(*shape, device=device, dtype=dtype, seed=seed)
            for seed, shape in enumerate(((counts.total, k), (counts.total, n), (len(rows) * n, k)))
        )
        wide_x, wide_dy, wide_weight = x.double(), dy.double(), weight.double()
        buffer = torch.full(weight.shape, torch.nan, dtype=buffer_dtype, device=device)
        for accumulate in (False, True):
            kernel.weight_gradient(dy, x, counts).write_to(buffer, accumulate)
        pairs = (
            (kernel.output(x, weight, counts), reference.output(wide_x, wide_weight, counts)),
            (kernel.input_gradient(dy, weight, counts), reference.input_gradient(wide_dy, wide_weight, counts)),
            (buffer, 2 * reference.weight_gradient(wide_dy, wide_x, counts).value()),
        )
        for found, expected in pairs:
            if counts.total:
                compare(found, expected)
            elif found.shape != expected.shape or not torch.equal(found.double(), expected):
                raise Unavailable("a trial without rows returned another result than zeros")
