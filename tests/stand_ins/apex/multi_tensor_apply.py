"""Stands in for apex's."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    """Call ``op``."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)
