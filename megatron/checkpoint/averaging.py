"""Averages of the weights of several checkpoints of one model, read chunk by chunk."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from megatron.checkpoint.manifest import MASTER, MODEL
from megatron.checkpoint.streaming import Advance, SavedTensors, blocks
from megatron.errors import CheckpointError


class AveragedModel:
    """The tensors of the average of ``saved``, of which each counts by its share of the ``weights``.

    Read from the fp32 master weights where a checkpoint has them, else from the model's weights; summed in fp64. The
    average has the widest dtype of its sources.
    """

    def __init__(self, saved: Sequence[SavedTensors], weights: Sequence[float], advance: Advance) -> None:
        self._saved, self._advance = saved, advance
        self._shares = [weight / sum(weights) for weight in weights]
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """The chunks of each global tensor."""
        first = saved[0]
        names = [_model_names(one) for one in saved]
        for one, sizes in zip(saved, names):
            different = names[0].items() ^ sizes.items()
            if different:
                raise CheckpointError(
                    f"The checkpoints of iterations {first.iteration} and {one.iteration} are of different models: "
                    f"{min(different)[0]} is in one of them, or has another shape: average checkpoints of one run."
                )
        for name, size in names[0].items():
            dtypes = [one.manifest.tensors[_source(one, name)].dtype for one in saved]
            rows, *other = size
            chunks = [
                ChunkStorageMetadata(torch.Size((begin, *(0 for _ in other))), torch.Size((count, *other)))
                for begin, count in blocks((rows, *other), torch.float64)
            ]
            self.tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=reduce(torch.promote_types, dtypes)), size, chunks
            )

    @property
    def nbytes(self) -> int:
        return sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in self.tensors.values())

    def read(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk of the average of the tensor ``name``."""
        total = torch.zeros(chunk.sizes, dtype=torch.float64)
        block = torch.empty(chunk.sizes, dtype=torch.float64)
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
        for one, share in zip(self._saved, self._shares):
            one.read_into(block, _source(one, name), place)
            total.add_(block, alpha=share)
        content = total.to(self.tensors[name].properties.dtype)
        self._advance(content.nbytes)
        return content


def _model_names(saved: SavedTensors) -> dict[str, torch.Size]:
    return {name: torch.Size(tensor.shape) for name, tensor in saved.manifest.tensors.items() if name.startswith(MODEL)}


def _source(saved: SavedTensors, name: str) -> str:
    """The tensor of ``saved`` to read for the model's tensor ``name``."""
    master = MASTER + name.removeprefix(MODEL)
    return master if master in saved.manifest.tensors else name
