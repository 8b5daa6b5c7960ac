"""The constants of the step-time model: what each one means, where a fit starts, how far it may move, and the values
that the planner uses.

A constant with a spread of 0 is stated and not fitted: with it free, sources that are left out of the fit are predicted
hardly better, or worse (docs/planner.md). ``python -m benchmarks.published --write`` fits the others to published runs
and writes :data:`RECORD`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Constants = Mapping[str, float]

RECORD = Path(__file__).with_name("fitted.json")
"""The constants, the errors of the fit, and what its runs have measured."""


@dataclass(frozen=True)
class Constant:
    """A positive constant with a log-normal prior, or a stated one."""

    start: float
    """Median of the prior."""
    spread: float
    """Standard deviation of its logarithm; 0 if the constant is stated."""
    meaning: str


CONSTANTS: Mapping[str, Constant] = {
    # Products.
    "product_ampere": Constant(0.874, 0.1, "share of the peak that a large product reaches on Ampere"),
    "product_hopper": Constant(0.744, 0.1, "the same on Hopper"),
    "product_blackwell": Constant(0.584, 0.15, "the same on Blackwell"),
    "product_fp8": Constant(1.0, 0.0, "the share of the FP8 peak relative to that of the bf16 peak"),
    "product_depth": Constant(128.0, 0.0, "inner length at which a product takes twice the time per FLOP"),
    "wave_quantization": Constant(1.0, 0.0, "share of the idle multiprocessors in the last wave of tiles that is lost"),
    "product_bytes": Constant(0.5, 0.0, "share of a product's memory traffic that its computation does not hide"),
    # Attention.
    "flash_ampere": Constant(0.327, 0.2, "share of the peak of fused attention, causal FLOPs, on Ampere"),
    "flash_hopper": Constant(0.184, 0.1, "the same on Hopper with FlashAttention 2 or Triton"),
    "cudnn_hopper": Constant(0.459, 0.2, "the same on Hopper with cuDNN"),
    "cudnn_blackwell": Constant(0.376, 0.2, "the same on Blackwell"),
    "attention_length": Constant(500.0, 0.0, "sequence length at which fused attention has half of its final rate"),
    "batched_product": Constant(0.33, 0.0, "share of the peak of the two products of unfused attention"),
    "softmax": Constant(1.0, 0.0, "factor on the memory accesses of the softmax"),
    # Between the products.
    "elementwise": Constant(1.6, 0.0, "factor on the estimated memory accesses of other software between products"),
    "own_elementwise": Constant(1.25, 0.0, "factor on the recorded memory accesses of this project between products"),
    "fp8_cast": Constant(1.6, 0.0, "factor on the estimated memory accesses of other software's casts to FP8"),
    "layer_gap": Constant(50e-6, 0.0, "seconds per layer and microbatch without work on the GPU"),
    "deepspeed_layer": Constant(4.3e-3, 1.0, "seconds per layer and microbatch of DeepSpeed's pipeline engine"),
    # Communication.
    "link": Constant(0.9, 0.0, "share of NVLink's rate that collectives reach"),
    "network": Constant(1.0, 0.0, "share of the network adapters' rate that collectives reach"),
    "exposed_tensor_parallel": Constant(0.49, 0.5, "share of overlapped tensor-parallel communication that is exposed"),
    "exposed_messages": Constant(1.0, 0.0, "share of the pipeline's messages that is exposed"),
    "exposed_interleaved_messages": Constant(1.0, 0.0, "the same with interleaving"),
    "hidden_data_parallel": Constant(1.0, 0.0, "share of a microbatch behind which gradients can be reduced"),
    "fsdp2_contention": Constant(0.2, 0.0, "share of hidden FSDP 2 traffic by which computation is slowed"),
    # The rest of a step.
    "optimizer": Constant(1.0, 0.0, "factor on 30 bytes of memory traffic per parameter"),
    "step": Constant(47e-3, 0.5, "seconds per step: host, loss, logging"),
    "growth": Constant(0.0046, 1.0, "growth of the time with each doubling of the nodes"),
}


def starts() -> dict[str, float]:
    """The medians of the priors."""
    return {name: constant.start for name, constant in CONSTANTS.items()}


def load_fitted() -> dict[str, float]:
    """The constants that the planner uses: fitted and stated ones."""
    return dict(load_record()["constants"])


@cache
def load_record() -> Mapping[str, Any]:
    """The content of :data:`RECORD`: ``constants``; ``errors``, 90th percentiles of the fit by name; ``measured``, the
    number of runs, the most GPUs of one, and the keys of the regimes of dense runs."""
    found: Mapping[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found
