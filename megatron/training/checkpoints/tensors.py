"""The tensors of a checkpoint by their global names."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.manifest import FP8, MODEL
from megatron.core.data_parallel.strategy import LocalParam
from megatron.core.fp8 import Fp8Layers
from megatron.core.moe.balance import ExpertBalance
from megatron.core.optimizer.optimizer import Optimizer


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
