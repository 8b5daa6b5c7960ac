"""The tensors of a checkpoint by their global names: weights, optimizer, FP8, experts, random-number states."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.manifest import FP8, MODEL
from megatron.core.data_parallel.strategy import LocalParam
from megatron.core.fp8 import Fp8Layers
from megatron.core.moe.routing import ExpertBalance
from megatron.core.optimizer import Optimizer


def model_tensors(
    weights: Iterable[LocalParam], with_copies: bool = True, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """This rank's weights by global name, in ``dtype`` if it is given; ``with_copies`` includes the output layer's copy
    of a tied embedding, which is loaded but not saved."""
    return {
        f"{MODEL}{weight.info.name}": BoxedTensor.from_flat_range(
            weight.info, weight.tensor.to(dtype or weight.tensor.dtype), weight.start, weight.holders, weight.division
        )
        for weight in weights
        if with_copies or weight.info.tied_end != "output_layer"
    }


def optimizer_tensors(optimizer: Optimizer, with_copies: bool = True) -> dict[str, Tensor]:
    """This rank's master weights and moments by global name; ``with_copies`` as in :func:`model_tensors`."""
    return {
        f"optimizer/{state.kind}/{state.info.name}": BoxedTensor.from_flat_range(
            state.info, state.tensor, state.start, state.holders, state.division
        )
        for state in optimizer.state()
        if with_copies or state.info.tied_end != "output_layer"
    }


def fp8_tensors(fp8: Fp8Layers | None) -> dict[str, Tensor]:
    """Scales and amax histories by the global name of their linear layer."""
    return {} if fp8 is None else {f"{FP8}{name}": tensor for name, tensor in fp8.state().items()}


def bias_tensors(experts: ExpertBalance | None) -> dict[str, Tensor]:
    """The biases of the routers of this rank's layers by global name."""
    return {} if experts is None else {f"{MODEL}{name}": tensor for name, tensor in experts.state().items()}


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """The tensors whose name starts with ``old``, under names that start with ``new`` instead."""
    return {new + name.removeprefix(old): tensor for name, tensor in tensors.items() if name.startswith(old)}


# --- random numbers -----------------------------------------------------------------------------------------


def random_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The random-number states of a rank. Training draws no random numbers; a user's code may."""
    states = {f"random/torch/rank_{rank}": torch.get_rng_state()}
    if device.type != "cpu":
        states[f"random/cuda/rank_{rank}"] = torch.cuda.get_rng_state(device)
    numbers: Any = np.random.get_state(legacy=False)["state"]
    states[f"random/numpy/rank_{rank}"] = torch.from_numpy(np.append(numbers["key"].astype(np.int64), numbers["pos"]))
    version, words, _ = random.getstate()
    assert version == 3
    states[f"random/python/rank_{rank}"] = torch.tensor(words, dtype=torch.int64)
    return states


def seed_random(seed: int) -> None:
    """Seed every global generator with ``--seed``, the same on all ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore_random(states: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """The inverse of :func:`random_tensors`."""
    torch.set_rng_state(states[f"random/torch/rank_{rank}"])
    if device.type != "cpu":
        torch.cuda.set_rng_state(states[f"random/cuda/rank_{rank}"], device)
    numbers = states[f"random/numpy/rank_{rank}"].numpy()
    np.random.set_state(("MT19937", numbers[:-1].astype(np.uint32), int(numbers[-1]), 0, 0.0))
    random.setstate((3, tuple(states[f"random/python/rank_{rank}"].tolist()), None))
