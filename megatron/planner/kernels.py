"""Kernels of a simulated rank: they allocate and save what the kernels of the real run allocate and save."""

from dataclasses import replace
from functools import partial

import torch

from megatron.config.run import RunConfig
from megatron.core.device import Machine
from megatron.core.kernels.selection import Kernels, build_kernels
from megatron.core.topology import Topology
from megatron.planner.memory import MemoryTracker


def with_local_layers(config: RunConfig) -> RunConfig:
    """``config`` without Transformer Engine, whose layers cannot be built without a GPU.

    Local layers save similar tensors, but lack two recipes, which are planned as tensorwise.
    """
    if config.model.transformer_impl == "local":
        return config
    precision = config.precision
    if precision.fp8_recipe in ("blockwise", "mxfp8"):
        precision = replace(precision, fp8_recipe="tensorwise")
    return replace(config, model=replace(config.model, transformer_impl="local"), precision=precision)


def simulated_kernels(
    config: RunConfig, topology: Topology, device: torch.device, vocab_size: int, tracker: MemoryTracker
) -> Kernels:
    """On CPUs the kernels of the run. On GPUs (``device``) what stands for them, since the packages and compilers there
    are unknown: ``tracker`` counts each compiled function as one kernel."""
    if device.type == "cpu":
        return build_kernels(config, topology, vocab_size)
    machine = Machine(device, simulated_compiler=partial(partial, tracker.fused))
    return build_kernels(config, topology, vocab_size, machine)
