"""Upcycling: a model with experts from the checkpoint of a dense model (arXiv 2212.05055; ``--moe-use-upcycling`` of
Megatron-LM).

Every expert is a copy of the MLP of its layer, and the router has initial weights. The weights of the chosen experts
sum to one, so the output of the new model is the output of the dense model.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.manifest import MASTER, MODEL
from megatron.checkpoint.streaming import Advance, SavedTensors, blocks
from megatron.core.initialization import initialize_range
from megatron.core.parameter import Box, ParameterInfo

_MLP_WEIGHT = re.compile(r"layers\.(\d+)\.mlp\.(linear_fc[12])\.weight")


class UpcycledModel:
    """The tensors of a model with experts, read chunk by chunk from the checkpoint of a dense model.

    ``architecture`` is the one of the dense model, with experts as wide as its MLP. The weights are the fp32 master
    weights if the checkpoint has them.
    """

    def __init__(self, saved: SavedTensors, architecture: TransformerConfig, seed: int, advance: Advance) -> None:
        self._saved, self._architecture, self._seed, self._advance = saved, architecture, seed, advance
        self._is_moe = self._architecture.moe_layers()
        self._readers: dict[str, Callable[[ChunkStorageMetadata], Tensor]] = {}
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """The chunks of each global tensor."""
        stored = saved.manifest.tensors
        for name in (name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)):
            # Frozen parameters have no master weights.
            self._add(name, MASTER + name if MASTER + name in stored else MODEL + name)

    @property
    def nbytes(self) -> int:
        return sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in self.tensors.values())

    def read(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk of the global tensor ``name``."""
        content = self._readers[name](chunk)
        self._advance(content.nbytes)
        return content

    def _add(self, name: str, source: str) -> None:
        """Add the tensor ``name`` of the dense model, or what replaces it."""
        mlp = _MLP_WEIGHT.fullmatch(name)
        if mlp is None or not self._is_moe[int(mlp[1])]:
            self._add_copies(name, source, copies=1)
            return
        layer, linear = f"layers.{mlp[1]}.mlp", mlp[2]
        if linear == "linear_fc1":
            self._add_router(f"{layer}.router.weight", self._saved.manifest.tensors[source].dtype)
        assert self._architecture.num_experts is not None
        self._add_copies(f"{layer}.experts.{linear}.weight", source, self._architecture.num_experts)

    def _add_copies(self, name: str, source: str, copies: int) -> None:
        """Add the stack of ``copies`` of the tensor ``source`` along dim 0."""
        stored = self._saved.manifest.tensors[source]
        dtype, (rows, *other) = stored.dtype, stored.shape
        chunks = [
            ChunkStorageMetadata(torch.Size((copy * rows + first, *(0 for _ in other))), torch.Size((count, *other)))
            for copy in range(copies)
            for first, count in blocks((rows, *other), dtype)
        ]

        def read(chunk: ChunkStorageMetadata) -> Tensor:
            block = torch.empty(chunk.sizes, dtype=dtype)
            first = chunk.offsets[0] % rows
            place = (slice(first, first + chunk.sizes[0]), *(slice(0, size) for size in other))
            self._saved.read_into(block, source, place)
            return block

        size = torch.Size((copies * rows, *other))
        self.tensors[MODEL + name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
        self._readers[MODEL + name] = read

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

        size = torch.Size(shape)
        chunk = ChunkStorageMetadata(torch.Size((0, 0)), size)
        self.tensors[MODEL + name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
        self._readers[MODEL + name] = read
