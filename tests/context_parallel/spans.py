"""The spans of attention in documents and chunks."""

import torch
from torch import Tensor

from megatron.core.ops.documents import AttentionSpans, Documents, chunked_attention

CPU = torch.device("cpu")
Marks = tuple[bool, bool] | None
"""Whether documents mask attention, and whether they reset positions; None: the run does not mark documents."""
MARKS: list[Marks] = [None, (False, False), (True, False), (False, True), (True, True)]


def attention_spans(starts: Tensor, marks: Marks, chunk: int | None) -> AttentionSpans | None:
    """Of a batch ``[b, s]`` whose documents begin at ``starts``."""
    documents = None if marks is None else Documents(starts, *marks, device=CPU)
    if chunk is None:
        return None if documents is None else documents.attention
    rows, length = starts.shape
    return chunked_attention(documents, chunk, rows, length, CPU)
