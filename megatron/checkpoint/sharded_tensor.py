"""The shards of a global tensor on one rank, in the form that ``torch.distributed.checkpoint`` plans with.

Every way to shard a tensor (tensor parallelism by rows or columns, fused sections, flat ranges of a distributed
optimizer) gives a rank some boxes: rectangles of the global tensor. A checkpoint written as boxes can be read as any
other boxes, so it does not depend on the layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint.boxes import DividedBox, divided_boxes
from megatron.core.parameter import ParameterInfo, RowDivision, flat_range_boxes
from megatron.torch_compat import wrapper_subclass


class BoxedTensor(Tensor):
    """A global tensor of which this rank holds some boxes, or none.

    ``size()`` and ``dtype`` describe the global tensor. It has no memory: the boxes are views of local tensors, which a
    save reads and a load fills in place. Computing with it fails.
    """

    _boxes: dict[tuple[int, ...], Tensor]
    holders: Sequence[int]
    """The ranks that hold exactly these boxes, if that is known: then they divide the boxes at a save without asking
    each other, and the coordinator does not receive them from all. Ranks of ``torch.distributed``."""
    divided: Sequence[DividedBox]
    """The boxes of all ranks that divide the rows of the tensor. Every rank writes its own rows, and only the owner
    of a box lists it in the plan of a save. Empty if no ranks divide the rows."""

    @staticmethod
    def __new__(
        cls,
        global_shape: Sequence[int],
        dtype: torch.dtype,
        boxes: dict[tuple[int, ...], Tensor],
        holders: Sequence[int] = (),
        divided: Sequence[DividedBox] = (),
    ) -> "BoxedTensor":
        """Use the ``from_...`` constructors instead."""
        device = next((box.device for box in boxes.values()), torch.device("cpu"))
        tensor: BoxedTensor = wrapper_subclass(cls, torch.Size(global_shape), dtype, device)
        tensor._boxes = boxes
        tensor.holders = holders
        tensor.divided = divided
        return tensor

    @classmethod
    def from_boxes(
        cls,
        global_shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Iterable[tuple[Sequence[int], Tensor]],
        holders: Sequence[int] = (),
        divided: Sequence[DividedBox] = (),
    ) -> "BoxedTensor":
        """From ``(global offset, local view)`` pairs; a load fills the views in place. Empty boxes are dropped. Boxes
        must not overlap."""
        kept: dict[tuple[int, ...], Tensor] = {}
        for offset, box in boxes:
            assert len(offset) == box.dim() == len(global_shape), (offset, box.shape, global_shape)
            for start, length, size in zip(offset, box.shape, global_shape):
                assert start + length <= size, (offset, box.shape, global_shape)
            assert box.dtype == dtype, (box.dtype, dtype)
            # A global tensor without elements needs its empty box: otherwise no rank would write it.
            if box.numel() > 0 or prod(global_shape) == 0:
                assert tuple(offset) not in kept, offset
                kept[tuple(offset)] = box.detach()
        return cls(global_shape, dtype, kept, holders, divided)

    @classmethod
    def from_whole(cls, tensor: Tensor, holders: Sequence[int] = ()) -> "BoxedTensor":
        """From a tensor that is the whole global tensor, replicated on every rank that passes it."""
        return cls.from_boxes(tensor.shape, tensor.dtype, [((0,) * tensor.dim(), tensor)], holders)

    @classmethod
    def from_flat_range(
        cls,
        info: ParameterInfo,
        flat_tensor: Tensor,
        start: int,
        holders: Sequence[int] = (),
        division: RowDivision | None = None,
    ) -> "BoxedTensor":
        """From a 1-D tensor with elements ``[start, start + numel)`` of the flattened local parameter: this rank's rows
        under a ``division``."""
        assert flat_tensor.dim() == 1, (info.name, flat_tensor.shape)
        boxes = [
            (box.global_offset, flat_tensor[begin - start : end - start].view(box.shape))
            for box, begin, end in flat_range_boxes(info, start, start + flat_tensor.numel())
        ]
        divided = () if division is None else divided_boxes(info, division)
        return cls.from_boxes(info.global_shape, flat_tensor.dtype, boxes, holders, divided)

    @property
    def boxes(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The ``(global offset, local view)`` pairs of this rank."""
        return list(self._boxes.items())

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """One write item per box."""
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
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=box.size()) for offset, box in self._boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The box at ``index.offset``; boxes do not overlap, so the offset identifies it."""
        assert index.offset is not None, index
        return self._boxes[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise TypeError(f"{function}: a BoxedTensor only says where its boxes lie; compute with the boxes.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{list(box.shape)} at {list(offset)}" for offset, box in self._boxes.items())
        return f"BoxedTensor({list(self.shape)}, {self.dtype}, boxes: {boxes or 'none'})"


def boxed(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor as a :class:`BoxedTensor` or DTensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor), (name, type(tensor))  # what is not a tensor belongs in the state
        found[name] = tensor if hasattr(tensor, "__create_write_items__") else BoxedTensor.from_whole(tensor)
    return found
