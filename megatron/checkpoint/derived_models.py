"""Models computed from checkpoints, chunk by chunk: the average of several, and a dense model with experts.

Upcycling (arXiv 2212.05055; ``--moe-use-upcycling`` of Megatron-LM) makes a model with experts from a dense one. Every
expert is a copy of the MLP of its layer, and the router has initial weights. The weights of the chosen experts sum to
one, so the output of the new model is the output of the dense model.
"""

import re
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.manifest import MASTER, MODEL
from megatron.checkpoint.streaming import Advance, ChunkedModel, SavedTensors, row_chunks
from megatron.core.initialization import initialize_range
from megatron.core.parameter import Box, ParameterInfo
from megatron.errors import CheckpointError

_MLP_WEIGHT = re.compile(rf"{MODEL}layers\.(\d+)\.mlp\.(linear_fc[12])\.weight")


class AveragedModel(ChunkedModel):
    """The tensors of the average of ``saved``, of which each counts by its share of the ``weights``.

    Read from the fp32 master weights where a checkpoint has them, else from the model's weights; summed in fp64. The
    average has the widest dtype of its sources.
    """

    def __init__(self, saved: Sequence[SavedTensors], weights: Sequence[float], advance: Advance) -> None:
        super().__init__(advance)
        self._saved = saved
        self._shares = [weight / sum(weights) for weight in weights]
        models = [
            {name: tensor.shape for name, tensor in one.manifest.tensors.items() if name.startswith(MODEL)}
            for one in saved
        ]
        for one, shapes in zip(saved, models):
            different = models[0].items() ^ shapes.items()
            if different:
                raise CheckpointError(
                    f"The checkpoints of iterations {saved[0].iteration} and {one.iteration} are of different models: "
                    f"{min(different)[0]} is in one of them, or has another shape: average checkpoints of one run."
                )
        for name, shape in models[0].items():
            dtypes = [one.manifest.tensors[_source(one, name)].dtype for one in saved]
            self._add(name, shape, reduce(torch.promote_types, dtypes), row_chunks(shape, torch.float64))

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


def _source(saved: SavedTensors, name: str) -> str:
    """The tensor to read for the model's tensor ``name``: its master weights, which frozen parameters do not have."""
    master = MASTER + name.removeprefix(MODEL)
    return master if master in saved.manifest.tensors else name


class UpcycledModel(ChunkedModel):
    """The tensors of a model with experts, read from the checkpoint of a dense model.

    ``architecture`` is the one of the dense model, with experts as wide as its MLP. The weights are the fp32 master
    weights if the checkpoint has them.
    """

    def __init__(self, saved: SavedTensors, architecture: TransformerConfig, seed: int, advance: Advance) -> None:
        super().__init__(advance)
        self._saved, self._architecture, self._seed = saved, architecture, seed
        self._readers: dict[str, Callable[[ChunkStorageMetadata], Tensor]] = {}
        is_moe = architecture.moe_layers()
        for name in (name for name in saved.manifest.tensors if name.startswith(MODEL)):
            source, mlp = _source(saved, name), _MLP_WEIGHT.fullmatch(name)
            if mlp is None or not is_moe[int(mlp[1])]:
                self._add_copies(name, source, copies=1)
                continue
            layer, linear = f"layers.{mlp[1]}.mlp", mlp[2]
            if linear == "linear_fc1":
                self._add_router(f"{layer}.router.weight", saved.manifest.tensors[source].dtype)
            assert architecture.num_experts is not None
            self._add_copies(f"{MODEL}{layer}.experts.{linear}.weight", source, architecture.num_experts)

    def read(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk of the global tensor ``name``."""
        content = self._readers[name](chunk)
        self._advance(content.nbytes)
        return content

    def _add_copies(self, name: str, source: str, copies: int) -> None:
        """Add the stack of ``copies`` of the tensor ``source`` along dim 0."""
        stored = self._saved.manifest.tensors[source]
        rows, *other = stored.shape
        chunks = [chunk for copy in range(copies) for chunk in row_chunks(stored.shape, stored.dtype, copy * rows)]

        def read(chunk: ChunkStorageMetadata) -> Tensor:
            block = torch.empty(chunk.sizes, dtype=stored.dtype)
            first = chunk.offsets[0] % rows  # no chunk has rows of two copies
            place = (slice(first, first + chunk.sizes[0]), *(slice(0, size) for size in other))
            self._saved.read_into(block, source, place)
            return block

        self._add(name, (copies * rows, *other), stored.dtype, chunks)
        self._readers[name] = read

    def _add_router(self, name: str, dtype: torch.dtype) -> None:
        """Add a router with the weights that a new run with the seed has: a function of seed, name and index."""
        config = self._architecture
        assert config.num_experts is not None
        shape = (config.num_experts, config.hidden_size)
        box = Box((0, 0), (0, 0), shape)
        info = ParameterInfo(name, shape, shape, (box,), config.router_init_std, True, tensor_parallel_sharded=False)

        def read(chunk: ChunkStorageMetadata) -> Tensor:
            weights = torch.empty(shape, dtype=dtype)
            initialize_range(weights.view(-1), info, 0, self._seed)
            return weights

        self._add(MODEL + name, shape, dtype, [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(shape))])
        self._readers[MODEL + name] = read
