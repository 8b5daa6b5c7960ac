"""One training step to price: shapes, layout, software and cluster.

:class:`Run` is one step. :class:`Workload` has many of them as arrays, so that one evaluation of the formulas prices
thousands of layouts, or all published runs at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron.planner.step_time.workload import Cluster

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

Attention = Literal["unfused", "flash", "cudnn"]
Elementwise = Literal["megatron-2021", "transformer-engine", "compiled", "eager"]
Sharding = Literal["none", "optimizer", "fsdp1", "fsdp2"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "zb-h1", "zb-2p"]


TERMS = (
    "products",
    "attention",
    "between products",
    "recompute",
    "tensor parallelism",
    "context parallelism",
    "expert parallelism",
    "gaps",
    "output layer",
    "pipeline messages",
    "bubble",
    "data parallelism",
    "optimizer",
)
"""Causes of a step's time, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """What the time of a step depends on besides shapes and layout."""

    attention: Attention
    """Kernels of attention: batched products and a softmax; FlashAttention 2 or Triton; cuDNN."""
    elementwise: Elementwise
    """The fusion of operations between the products."""
    sharding: Sharding = "none"
    """Sharded over the data-parallel ranks: nothing, optimizer state, or everything by FSDP 1 or 2."""
    main_grad_bytes: int = 4
    """Bytes per parameter that a weight gradient reads and writes when it is accumulated."""
    overlaps_tensor_parallel: bool = False
    overlaps_data_parallel: bool = False
    keeps_weights_gathered: bool = False
    """FSDP that does not gather the weights again for the backward pass."""
    recomputes_products: bool = False
    """Whether selective recompute runs half of the products again, and not attention alone."""
    has_deepspeed_pipeline: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training step."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    is_gated: bool
    """Whether the MLP has three products (SwiGLU) instead of two."""
    vocab: int
    seq_length: int
    gpus: int
    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Chunks of a stage; 1 without interleaving."""
    cp: int = 1
    dp: int = 1
    micro_batch_size: float = 1.0
    global_batch_size: int
    is_fp8: bool = False
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    head_size: int = 0
    """Head size of attention; 0 means ``hidden / heads``."""
    num_experts: int = 0
    """Experts of a MoE layer; 0 for a dense model."""
    moe_topk: int = 0
    """Experts that a token uses."""
    moe_ffn: int = 0
    """Width of an expert."""
    shared_ffn: int = 0
    """Width of the expert that every token uses; 0 without one."""
    moe_layers: int = 0
    """MoE layers among the ``layers``; the MLPs of the others are ``ffn`` wide."""
    ep: int = 1
    software: Software
    cluster: Cluster


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, and what they consist of; arrays ``[runs]``."""

    total: Array
    terms: dict[str, Array]
    """Seconds by cause, one of :data:`TERMS`; their sum is ``total``."""
    passes: Array | None = None
    """``[3, 3, runs]``, for runs of this project: forward, backward and weight-gradient seconds of a microbatch in the
    first, an inner and the last virtual stage."""


class Workload:
    """Runs as arrays of one element per run; ``[runs]``."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)

    def number(self, name: str) -> Array:
        """A field of the runs, their software or their clusters, by name."""
        return np.array([float(_field(run, name)) for run in self.runs])

    def where(self, name: str, value: Any = True) -> Mask:
        """Which runs have this value of a field."""
        return np.array([_field(run, name) == value for run in self.runs])


_OF_SOFTWARE = {field.name for field in fields(Software)}
_OF_CLUSTER = {field.name for field in fields(Cluster)}


def _field(run: Run, name: str) -> Any:
    if name in _OF_SOFTWARE:
        return getattr(run.software, name)
    return getattr(run.cluster if name in _OF_CLUSTER else run, name)
