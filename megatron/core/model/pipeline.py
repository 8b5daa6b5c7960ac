"""Llama in a pipeline: which chunks a rank holds, and the executor that runs them."""

from collections.abc import Callable, Sequence
from typing import cast

from megatron.config.stages import VirtualStage
from megatron.core.model.llama import LlamaModel
from megatron.core.pipeline_parallel.executor import ActivationFormat, Chunk, PipelineExecutor, ReadDocuments
from megatron.core.pipeline_parallel.schedule import Placement, Schedule
from megatron.core.topology import Topology


def stage_chunks(virtual_stages: Sequence[VirtualStage], placement: Placement, stage: int) -> list[VirtualStage]:
    """What the chunks of ``stage`` hold."""
    return [virtual_stages[placement.virtual_stage(stage, chunk)] for chunk in range(placement.num_chunks)]


def activation_format(model: LlamaModel, seq_length: int, micro_batch_size: int) -> ActivationFormat:
    """What stages send each other: under sequence parallelism the rank's own part of the sequence."""
    parallel, context = model.context.parallel, model.context
    length = seq_length // context.context_parallel.split.size
    length = length // parallel.size if parallel.sequence_parallel else length
    return ActivationFormat((length, micro_batch_size, model.config.hidden_size), context.dtype, context.device)


def build_executor(
    model: LlamaModel,
    topology: Topology,
    schedule: Callable[[int], Schedule],
    seq_length: int,
    micro_batch_size: int,
    overlap: bool = True,
    documents: ReadDocuments | None = None,
) -> PipelineExecutor:
    """What runs this rank's chunks; ``schedule`` makes the schedule of a number of microbatches, and ``documents``
    reads where documents begin, if microbatches say so.

    All ranks of a pipeline call it: it makes the process groups of their channels.
    """
    return PipelineExecutor(
        cast(Sequence[Chunk], list(model.chunks)),
        None if model.head is None else model.head.token_losses,
        topology.pipeline_parallel.rank,
        schedule,
        topology.pipeline_channel,
        activation_format(model, seq_length, micro_batch_size),
        model.context.weight_gradients,
        overlap,
        documents,
    )
