"""Matrix products of linear layers.

On x86 CPUs torch multiplies fp32 matrices with MKL, which does not use the wide vectors of every processor;
oneDNN does (measured: 2.3 times as fast on a Zen 5 core, see ``docs/performance.md``). torch exposes oneDNN's
fp32 product as the operator that its compiler uses; where it is missing, the ordinary product serves.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _onednn_linear() -> Callable[..., Any] | None:
    if not torch.backends.mkldnn.is_available():
        return None
    operators = torch.ops.mkldnn
    return operators._linear_pointwise if hasattr(operators, "_linear_pointwise") else None


_ONEDNN_LINEAR = _onednn_linear()


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """``inputs [..., k] @ weight [n, k]^T``; either may be a transposed view."""
    if _ONEDNN_LINEAR is not None and inputs.dtype == torch.float32 and inputs.device.type == "cpu":
        output: Tensor = _ONEDNN_LINEAR(inputs, weight, None, "none", [], "")
        return output
    return F.linear(inputs, weight)
