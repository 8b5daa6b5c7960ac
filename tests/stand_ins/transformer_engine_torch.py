"""Stands in for Transformer Engine's extension: what we call of it, in torch."""

import fused_layer_norm_cuda
import torch
from torch import Tensor

FORMATS = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: None,
    quantizer: None,
    otype: str,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """Output, nothing, and inverse RMS of every row."""
    assert input.dim() == 2 and not zero_centered_gamma and ln_out is quantizer is None
    output, inverse = fused_layer_norm_cuda.rms_forward_affine(input, weight.shape, weight, eps)
    return output.to(FORMATS[otype]), None, inverse


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight."""
    assert dz.shape == x.shape and x.dim() == 2 and not zero_centered_gamma
    grads: tuple[Tensor, Tensor] = fused_layer_norm_cuda.rms_backward_affine(
        dz, rsigma, x, gamma.shape, gamma, 0.0, False
    )
    return grads
