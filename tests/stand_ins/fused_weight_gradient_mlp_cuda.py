"""Stands in for apex's extension: what we call of it, in torch."""

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    """``d_weight += d_output^T @ input``, never rounded to the format of the operands."""
    assert d_weight.dtype == torch.float32 and input_2d.dim() == d_output_2d.dim() == 2
    d_weight.addmm_(d_output_2d.t().float(), input_2d.float())
