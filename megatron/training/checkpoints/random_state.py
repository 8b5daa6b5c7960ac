"""The random-number generators of a rank: seeds, and their states as tensors."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
