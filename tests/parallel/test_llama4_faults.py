"""Planted faults of Llama 4's attention: each one is seen by a comparison that runs by default.

What is wrong in one process, too, is seen against the definition; what only a layout gets wrong, against one process.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.context_parallel.attention import UlyssesAttention
from megatron.core.context_parallel.split import ContextSplit
from megatron.core.models import transformer
from megatron.core.models.layer import (
    BuildContext,
    HeadL2Norm,
    NoPositions,
    RotaryPositions,
    SelfAttention,
    SequencePositions,
)
from megatron.core.models.transformer import PositionTables
from megatron.core.ops import documents
from megatron.core.ops.attention import AttentionInputs
from megatron.core.ops.attention_interface import AttentionOutput, Gradients
from megatron.core.ops.documents import AttentionSpans, Documents, Span, chunked_attention
from megatron.core.ops.query_scale import query_scales
from tests.parallel.layout_run import SEQUENCE, Layout, Task, Trace, train
from tests.parallel.test_expert_layouts import compare_balance
from tests.parallel.test_layouts import compare_traces, one_process
from tests.parallel.test_llama4_layouts import (
    CHUNKS,
    POSITIONS,
    RESTARTED,
    TASKS,
    UNEVEN,
    compare_with_definition,
    first_step,
    llama4_matrix,
)
from tests.rank_pool import RankPool

Patch = AbstractContextManager[Any]


def chunks_begin_one_later() -> Patch:
    right = documents._chunks

    def wrong(span: Span, size: int, restarts: bool) -> Iterator[Span]:
        for chunk in right(replace(span, start=span.start - 1, stop=span.stop - 1), size, restarts):
            yield replace(chunk, start=chunk.start + 1, stop=chunk.stop + 1)

    return mock.patch.object(documents, "_chunks", wrong)


def chunks_do_not_restart() -> Patch:
    """Documents reset rotations, and chunks are those of the sequence."""

    def wrong(marks: Documents | None, *arguments: Any) -> AttentionSpans | None:
        return chunked_attention(marks and replace(marks, resets_positions=False), *arguments)

    return mock.patch.object(transformer, "chunked_attention", wrong)


def chunks_without_rotation() -> Patch:
    """Layers without a rotation attend inside chunks, too."""
    return mock.patch.object(NoPositions, "spans", lambda layer, positions: positions.chunks)


def with_attention(change: Callable[[SelfAttention, int, TransformerConfig, BuildContext], None]) -> Patch:
    """Every attention is changed after it is built."""
    right = SelfAttention.__init__

    def wrong(attention: SelfAttention, layer: int, config: TransformerConfig, context: BuildContext) -> None:
        right(attention, layer, config, context)
        change(attention, layer, config, context)

    return mock.patch.object(SelfAttention, "__init__", wrong)


def norm_without_rotation() -> Patch:
    """Layers without a rotation norm queries and keys, too."""

    def change(attention: SelfAttention, layer: int, config: TransformerConfig, context: BuildContext) -> None:
        if isinstance(attention.embed_positions, NoPositions):
            attention.qk_norm = HeadL2Norm(attention.shape, config, context)  # type: ignore[assignment]

    return with_attention(change)


def rotation_in_every_layer() -> Patch:
    """Layers without a rotation have one beside the temperature."""

    def change(attention: SelfAttention, layer: int, config: TransformerConfig, context: BuildContext) -> None:
        scaling = attention.embed_positions
        if isinstance(scaling, NoPositions):
            rotary = RotaryPositions(attention.shape, replace(config, qk_l2_norm=False), context)
            scaling.forward = lambda qkv, positions: rotary(  # type: ignore[method-assign]
                NoPositions.forward(scaling, qkv, positions), positions
            )

    return with_attention(change)


def no_norm() -> Patch:
    return mock.patch.object(HeadL2Norm, "forward", lambda norm, qkv: qkv)


def temperature_by_positions(change: Callable[[Tensor], Tensor]) -> Patch:
    def wrong(positions: Tensor, *arguments: Any) -> Tensor:
        return query_scales(change(positions), *arguments)

    return mock.patch.object(transformer, "query_scales", wrong)


def temperature_counts_from_zero() -> Patch:
    """The floor divides the position, not the number of positions so far."""
    return temperature_by_positions(lambda positions: positions - 1)


def temperature_of_local_positions() -> Patch:
    """A rank counts its own tokens, wherever they are in the sequence."""
    return temperature_by_positions(lambda positions: torch.arange(len(positions)))


def chunks_of_local_positions() -> Patch:
    """A chunk begins wherever the rank that has the token has counted its own tokens up to a multiple of the size."""
    right = PositionTables._with_spans

    def wrong(tables: PositionTables, found: SequencePositions, rows: int, marks: Documents | None) -> Any:
        size, ranks = tables._config.attention_chunk_size, tables._context.context_parallel.split.size
        length = found.rotary.shape[0] * ranks
        parts = [ContextSplit(rank, ranks).positions(length) for rank in range(ranks)]
        borders = {0, length, *torch.cat([part[::size] for part in parts]).tolist()}
        spans = [Span(slice(None), *span) for span in pairwise(sorted(borders))]
        chunks = AttentionSpans(spans, rows, length, tables._context.device)
        return replace(right(tables, found, rows, marks), chunks=chunks)

    return mock.patch.object(PositionTables, "_with_spans", wrong)


def pattern_of_local_layers() -> Patch:
    """A pipeline stage counts its layers from 0 in the pattern of layers without a rotation."""
    local = count()

    def change(attention: SelfAttention, layer: int, config: TransformerConfig, context: BuildContext) -> None:
        is_rotated = config.rope_layers()[next(local)]
        shape = attention.shape
        attention.embed_positions = RotaryPositions(shape, config, context) if is_rotated else NoPositions(shape)

    return with_attention(change)


def scales_of_all_ranks_queries() -> Patch:
    """The width of the queries is that of all tensor-parallel ranks, so that keys are scaled, too."""

    def change(attention: SelfAttention, layer: int, config: TransformerConfig, context: BuildContext) -> None:
        if isinstance(attention.embed_positions, NoPositions):
            attention.embed_positions.query_size = config.query_size

    return with_attention(change)


def exchanged_heads_lose_chunks_backwards() -> Patch:
    """The backward pass of an all-to-all of heads differentiates attention to whole sequences."""
    right = UlyssesAttention.backward

    def wrong(
        attention: UlyssesAttention, grad: Tensor, inputs: AttentionInputs, attended: AttentionOutput, out: Any = None
    ) -> Gradients:
        whole = AttentionSpans([Span(slice(None), 0, SEQUENCE)], grad.shape[0], SEQUENCE, grad.device)
        return right(attention, grad, replace(inputs, spans=whole), attended, out)

    return mock.patch.object(UlyssesAttention, "backward", wrong)


OF_ONE_PROCESS: dict[Callable[[], Patch], Task] = {
    chunks_begin_one_later: CHUNKS,
    chunks_do_not_restart: POSITIONS,
    chunks_without_rotation: CHUNKS,
    norm_without_rotation: CHUNKS,
    rotation_in_every_layer: UNEVEN,
    no_norm: RESTARTED,
    temperature_counts_from_zero: UNEVEN,
}
OF_LAYOUTS: dict[Callable[[], Patch], tuple[Task, Layout]] = {
    temperature_of_local_positions: (CHUNKS, Layout(cp=2, microbatches=2)),
    chunks_of_local_positions: (UNEVEN, Layout(cp=4)),
    pattern_of_local_layers: (CHUNKS, Layout(pp=2, microbatches=4)),
    scales_of_all_ranks_queries: (RESTARTED, Layout(2, 1, True, cp=2, cp_comm_type=("a2a",), microbatches=2)),
    exchanged_heads_lose_chunks_backwards: (
        RESTARTED,
        Layout(2, 1, True, cp=2, cp_comm_type=("a2a",), microbatches=2),
    ),
}


@pytest.mark.parametrize("fault", OF_ONE_PROCESS, ids=lambda fault: fault.__name__)
def test_the_definition_shows_a_planted_fault(fault: Callable[[], Patch]) -> None:
    task = OF_ONE_PROCESS[fault]
    with fault():
        trace = first_step(task)
    with pytest.raises(AssertionError):
        compare_with_definition(task, trace)


def train_with(fault: Callable[[], Patch], task: Task, layout: Layout) -> Trace:
    with fault():
        return train(task, layout)


@pytest.mark.parametrize("fault", OF_LAYOUTS, ids=lambda fault: fault.__name__)
def test_a_row_shows_a_planted_fault(sixteen_ranks: RankPool, fault: Callable[[], Patch]) -> None:
    task, layout = OF_LAYOUTS[fault]
    traces = sixteen_ranks.run(train_with, fault, task, layout, world_size=layout.world_size)
    expected = one_process(task)
    with pytest.raises(AssertionError):
        compare_traces(traces, expected)
        compare_balance(traces, expected)


def test_what_shows_faults_runs_by_default() -> None:
    cases = list(llama4_matrix())
    assert all(case in cases for case in OF_LAYOUTS.values())
    assert all(task in TASKS.values() for task in OF_ONE_PROCESS.values())
