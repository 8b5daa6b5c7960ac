"""What makes one kernel of a function of torch's operations."""

from collections.abc import Callable
from typing import Any

import torch

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function with the same results that launches one kernel; its arguments are positional."""


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through ``torch.compile``."""
    return torch.compile(function, fullgraph=True)
