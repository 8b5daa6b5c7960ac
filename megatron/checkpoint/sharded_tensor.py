"""One rank's pieces of a global tensor, in the form that ``torch.distributed.checkpoint`` plans with.

Whatever cut a tensor (tensor parallelism by rows or columns, fused sections, flat ranges of a distributed
optimizer), a rank ends up with rectangles of the global tensor. A checkpoint written as rectangles can be
read as any other rectangles, so a layout leaves no trace in it.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.parameter import ParameterInfo, flat_range_boxes


class BoxedTensor(Tensor):
    """A global tensor of which this rank holds some rectangles, or none.

    Its ``size()`` and ``dtype`` are the global tensor's. It has no memory of its own: the pieces are views of
    local tensors, which a save reads and a load fills in place. It only describes; computing with it fails.
    """

    _pieces: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(
        cls, global_shape: Sequence[int], dtype: torch.dtype, pieces: dict[tuple[int, ...], Tensor]
    ) -> "BoxedTensor":
        """Use the ``from_...`` constructors instead."""
        device = next((piece.device for piece in pieces.values()), torch.device("cpu"))
        tensor: BoxedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(global_shape), dtype=dtype, device=device
        )
        tensor._pieces = pieces
        return tensor

    @classmethod
    def from_pieces(
        cls, global_shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[tuple[Sequence[int], Tensor]]
    ) -> "BoxedTensor":
        """From ``(global offset, local view)`` pairs, whose views a load will fill in place.

        Empty pieces are left out. Two pieces must not overlap.
        """
        kept: dict[tuple[int, ...], Tensor] = {}
        for offset, piece in pieces:
            assert len(offset) == piece.dim() == len(global_shape), (offset, piece.shape, global_shape)
            for start, length, size in zip(offset, piece.shape, global_shape):
                assert start + length <= size, (offset, piece.shape, global_shape)
            assert piece.dtype == dtype, (piece.dtype, dtype)
            # A global tensor without elements keeps its empty piece: otherwise nobody would write it.
            if piece.numel() > 0 or prod(global_shape) == 0:
                assert tuple(offset) not in kept, offset
                kept[tuple(offset)] = piece.detach()
        return cls(global_shape, dtype, kept)

    @classmethod
    def from_whole(cls, tensor: Tensor) -> "BoxedTensor":
        """From a tensor that is the global tensor itself, the same on every rank that has it."""
        return cls.from_pieces(tensor.shape, tensor.dtype, [((0,) * tensor.dim(), tensor)])

    @classmethod
    def from_flat_range(cls, info: ParameterInfo, flat_tensor: Tensor, start: int) -> "BoxedTensor":
        """From a 1-D tensor with elements ``[start, start + numel)`` of the flattened local parameter."""
        assert flat_tensor.dim() == 1, (info.name, flat_tensor.shape)
        pieces = [
            (box.global_offset, flat_tensor[begin - start : end - start].view(box.shape))
            for box, begin, end in flat_range_boxes(info, start, start + flat_tensor.numel())
        ]
        return cls.from_pieces(info.global_shape, flat_tensor.dtype, pieces)

    @property
    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The ``(global offset, local view)`` pairs of this rank."""
        return list(self._pieces.items())

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """What this rank could write: one item for each piece."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The rectangles that this rank holds."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=piece.size())
            for offset, piece in self._pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The piece at ``index.offset``; the offset alone identifies it, since pieces do not overlap."""
        assert index.offset is not None, index
        return self._pieces[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise TypeError(f"{function}: a BoxedTensor only says where its pieces lie; compute with the pieces.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{list(piece.shape)} at {list(offset)}" for offset, piece in self._pieces.items())
        return f"BoxedTensor({list(self.shape)}, {self.dtype}, pieces: {boxes or 'none'})"
