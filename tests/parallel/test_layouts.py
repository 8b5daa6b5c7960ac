"""Every layout computes the same training run as one process, to 1e-9, step after step, in fp64.

Compared: the loss, the gradient norm, every parameter's gradient and the weights after each step, on batches
whose ranks and microbatches have very different numbers of unmasked tokens. :mod:`tests.parallel.rows` says which rows
run when.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from megatron.config.activations import ActivationConfig, RecomputeModule
from megatron.config.parallel import Exchange, ShardingStrategy
from megatron.core.models.parallelize import build_model
from megatron.core.parameter import info_of
from megatron.core.topology import single_process
from megatron.schedules.catalog import SCHEDULES, ScheduleName
from tests.covering import combinations_of
from tests.parallel.comparison import TOLERANCE, compare_with_one_process, one_process
from tests.parallel.layout_run import (
    BATCH,
    DEEP_MODEL,
    DEEP_TIED_MODEL,
    MODEL,
    SEED,
    SEQUENCE,
    TIED_MODEL,
    Layout,
    Task,
    assemble,
    context,
    microbatches,
    train,
)
from tests.parallel.rows import MOST_RANKS, Case, factors_of, identifier, rows_of
from tests.parallel.tasks import (
    ADAM,
    ADAM_CLIPPED_HARD,
    ADAM_UNCLIPPED,
    BLOCKWISE,
    CAPPED,
    CONTEXT,
    CONTEXT_IN_DOCUMENTS,
    DEEP_ADAM,
    DEEP_SGD,
    DEEP_TIED,
    DELAYED,
    EMA,
    MUON,
    MUON_OTHER,
    MUON_TIED,
    MUP_ADAM,
    MUP_MUON,
    MUP_SGD,
    OFF_BY_ONE,
    QWEN2,
    QWEN3,
    QWEN3_1P,
    SGD,
    SGD_UNCLIPPED,
    SINKS,
    TENSORWISE,
    TIED,
    UNEVEN,
    WINDOWS,
    YARN,
    Z_LOSS,
    full,
    selective,
)
from tests.rank_pool import RankPool


def tensor_product() -> Iterator[Case]:
    """Every layout of tensor and data parallelism once with each of two tasks."""
    for tp in (1, 2, 4):
        for dp in (1, 2):
            for sequence_parallel in (False, True) if tp > 1 else (False,):
                for strategy in ("no_shard", "optim"):
                    for count in (1, 4):
                        layout = Layout(tp, dp, sequence_parallel, strategy, microbatches=count)
                        yield ADAM_CLIPPED_HARD, layout
                        yield SGD_UNCLIPPED, layout


def matrix() -> Iterator[Case]:
    """Other tasks on the layouts that cross everything."""
    for task in (ADAM, ADAM_UNCLIPPED, SGD, TIED):
        for sequence_parallel in (False, True):
            yield task, Layout(2, 2, sequence_parallel, strategy="optim", microbatches=2)
    yield SGD, Layout(1, 4, strategy="optim", instances=2)
    yield SGD, Layout(1, 4, strategy="optim", microbatches=2)
    yield ADAM, Layout(2, 2, True, strategy="optim", order="dp-tp-cp-ep-pp")
    for buckets in (1, 3000):
        yield SGD, Layout(1, 2, microbatches=4, bucket_size=buckets, overlap_grad_reduce=True)
        yield ADAM, Layout(1, 4, strategy="optim", instances=2, bucket_size=buckets, overlap_grad_reduce=True)


def pipeline_product() -> Iterator[Case]:
    """Every schedule with every number of stages, ranks and microbatches; half of the rows have sequence parallelism,
    the others sharded optimizer state and overlapped reduction of small buckets."""
    for schedule, pp, tp, dp, count in product(SCHEDULES, (2, 4), (1, 2), (1, 2), (1, 2, 4, 8)):
        overlap = count in (2, 8)
        strategy: ShardingStrategy = "optim" if overlap else "no_shard"
        layout = Layout(tp, dp, tp > 1 and not overlap, strategy, microbatches=count, pp=pp, schedule=schedule)
        yield DEEP_SGD, replace(layout, bucket_size=3000, overlap_grad_reduce=True) if overlap else layout


def pipeline_matrix() -> Iterator[Case]:
    """Every schedule with other tasks, and stages that are cut in other ways."""
    for schedule in SCHEDULES:
        yield DEEP_ADAM, Layout(pp=4, schedule=schedule, microbatches=8)
        yield DEEP_TIED, Layout(pp=4, schedule=schedule, microbatches=4, overlap_p2p=False)
        yield DEEP_TIED, Layout(2, 2, True, "optim", pp=2, schedule=schedule, microbatches=2, overlap_grad_reduce=True)
    yield DEEP_ADAM, Layout(pp=2, schedule="interleaved", chunks=4, microbatches=8)
    yield DEEP_ADAM, Layout(1, 2, pp=2, schedule="zb-v", microbatches=4, order="pp-dp-tp-cp-ep")
    yield DEEP_ADAM, Layout(pp=4, schedule="zb-v", microbatches=4, overlap_p2p=False)
    yield DEEP_TIED, Layout(1, 4, pp=2, strategy="optim", instances=2, microbatches=2, bucket_size=3000)
    # The ends of the model alone, a stage with no layers between others, and with nothing at all in one chunk.
    yield DEEP_TIED, Layout(pp=4, schedule="zb-h1", split="E|tttt|ttt|tL", microbatches=4)
    yield DEEP_ADAM, Layout(2, pp=4, sequence_parallel=True, split="Et|tttt|ttt|L", microbatches=4)
    yield DEEP_ADAM, Layout(pp=2, schedule="interleaved", split="E|tttt||ttttL", microbatches=4)
    yield DEEP_ADAM, Layout(pp=2, schedule="zb-v", split="Et||ttttt|ttL", microbatches=4)


def bucket_size(strategy: ShardingStrategy) -> int | None:
    return None if strategy == "optim_grads_params" else 3000


def data_parallel_product() -> Iterator[Case]:
    """Every strategy with instances, tensor and pipeline parallelism, overlap and accumulation; on sixteen ranks, which
    two cores take seconds for, only with both of the latter."""
    for strategy, dp, tp, pp, overlap, count in product(
        get_args(ShardingStrategy), (2, 4), (1, 2), (1, 2), (False, True), (1, 4)
    ):
        if dp * tp * pp == 16 and not (overlap and count == 4):
            continue
        for instances in (1, 2) if strategy != "no_shard" else (1,):
            layout = Layout(tp, dp, tp > 1, strategy, instances, count, pp, bucket_size=bucket_size(strategy))
            gathers = overlap and strategy != "no_shard"
            yield SGD, replace(layout, overlap_grad_reduce=overlap, overlap_param_gather=gathers)


def data_parallel_matrix() -> Iterator[Case]:
    """ZeRO-2 and FSDP under every schedule, and what FSDP divides unevenly or does at other times."""
    zero2 = Layout(1, 2, strategy="optim_grads", microbatches=4, pp=2, bucket_size=3000)
    fsdp = Layout(1, 2, strategy="optim_grads_params", microbatches=4, pp=2)
    for schedule, traits in SCHEDULES.items():
        reduces, gathers = schedule != "gpipe", schedule != "1f1b"
        layout = replace(zero2, schedule=schedule, overlap_grad_reduce=reduces, overlap_param_gather=gathers)
        yield DEEP_TIED, layout
        task = DEEP_SGD if traits.placement == "v" else DEEP_TIED
        for reshard, defer in ((True, False), (False, False), (True, True)):
            layout = replace(fsdp, schedule=schedule, reshard_after_forward=reshard, defer_grad_reduce=defer)
            yield task, replace(layout, overlap_grad_reduce=reshard, overlap_param_gather=defer)
    for reshard in (True, False):
        # Rows that ranks divide unevenly, so that the last of seven has none; weights that embedding and head share.
        for ranks in (3, 7):
            uneven = Layout(1, ranks, strategy="optim_grads_params", reshard_after_forward=reshard)
            yield UNEVEN, replace(uneven, overlap_grad_reduce=reshard, overlap_param_gather=reshard)
        yield ADAM, Layout(1, 2, strategy="optim_grads_params", microbatches=2, reshard_after_forward=reshard)
        for overlap in (False, True):
            fsdp = Layout(1, 4, strategy="optim_grads_params", microbatches=2, reshard_after_forward=reshard)
            yield TIED, replace(fsdp, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
            yield TIED, replace(fsdp, dp=2, tp=2, sequence_parallel=True, overlap_param_gather=overlap)


def muon_product() -> Iterator[Case]:
    """Muon, whose matrices lie across ranks in every way: rows and columns, ranges cut anywhere, stages, replicas."""
    for task, strategy, dp, tp, pp in product(
        (MUON, MUON_TIED, MUON_OTHER), get_args(ShardingStrategy), (2, 4), (1, 2), (1, 2)
    ):
        for instances in (1, 2) if strategy != "no_shard" and dp * tp * pp < 16 else (1,):
            layout = Layout(tp, dp, tp > 1, strategy, instances, 2, pp, bucket_size=bucket_size(strategy))
            yield task, replace(layout, overlap_param_gather=strategy != "no_shard")


def muon_matrix() -> Iterator[Case]:
    """Both ways of tensor parallelism, every strategy, stages, and ranks without a row of some matrices."""
    yield MUON, Layout(4, sequence_parallel=True)
    yield MUON_TIED, Layout(2, 1, True, "optim", cp=2, microbatches=2, order="dp-cp-tp-ep-pp")
    yield replace(MUON_TIED, model=UNEVEN.model, batch=UNEVEN.batch), Layout(1, 7, strategy="optim_grads_params")
    yield replace(MUON, model=DEEP_MODEL), Layout(1, 2, pp=2, schedule="zb-v", microbatches=4, strategy="optim_grads")
    yield MUON_OTHER, Layout(1, 4, strategy="optim", instances=2, microbatches=2, bucket_size=3000)
    yield MUON, Layout(2, 4, True, "optim_grads_params", instances=2, microbatches=2)
    yield MUON_TIED, Layout(2, 2, True, "optim", pp=2, microbatches=2, bucket_size=3000, overlap_param_gather=True)


def context_parallel_product() -> Iterator[Case]:
    """Every way to attend with tensor and pipeline parallelism, in documents and without them."""
    for task, cp, kind, tp, pp in product((CONTEXT, CONTEXT_IN_DOCUMENTS), (2, 4), get_args(Exchange), (1, 2), (1, 2)):
        yield task, Layout(tp, 1, tp > 1, cp=cp, cp_comm_type=(kind,), pp=pp, microbatches=2)


def context_parallel_matrix() -> Iterator[Case]:
    """Context parallelism with other ranks that share weights, under every schedule, and documents without it."""
    # Other ranks share keys than share heads, layers differ, and gradients add up over both kinds of ranks.
    grouped = replace(CONTEXT_IN_DOCUMENTS, model=MODEL)
    for strategy, instances in (*((strategy, 1) for strategy in get_args(ShardingStrategy)), ("optim_grads_params", 2)):
        layout = Layout(1, 2, strategy=strategy, instances=instances, microbatches=2, cp=2, overlap_grad_reduce=True)
        yield grouped, replace(layout, cp_comm_type=("allgather", "p2p"))
        yield grouped, replace(layout, order="dp-cp-tp-ep-pp")
    for schedule in SCHEDULES:
        layout = Layout(pp=2, cp=2, schedule=schedule, microbatches=4, strategy="optim")
        yield replace(DEEP_SGD, masks_documents=True), layout
    for positions, masks in ((True, False), (False, True)):
        only_one = replace(CONTEXT, masks_documents=masks, resets_positions=positions)
        yield only_one, Layout(2, 2, True, microbatches=2)
        yield only_one, Layout(cp=4, microbatches=2)
    yield YARN, Layout(2, 1, True, cp=2, pp=2, microbatches=2)
    yield YARN, Layout(cp=2, cp_comm_type=("a2a",), activations=full("uniform", 1), microbatches=2)
    # Two levels, beside everything that divides heads, sequences and weights.
    levels = Layout(cp=4, cp_comm_type=("a2a+p2p",), cp_sizes=(2, 2), microbatches=2)
    for task in (CONTEXT, CONTEXT_IN_DOCUMENTS):
        yield task, levels
        yield task, replace(levels, tp=2, sequence_parallel=True)
    yield grouped, replace(levels, dp=2, strategy="optim", order="dp-cp-tp-ep-pp")
    yield grouped, replace(levels, dp=2, strategy="optim_grads_params")
    yield grouped, replace(levels, dp=2, strategy="optim_grads_params", tp=2, sequence_parallel=True)
    yield grouped, replace(levels, cp=8, cp_sizes=(2, 4), cp_comm_type=("a2a+p2p", "allgather"))
    yield grouped, replace(levels, cp=8, cp_sizes=(4, 2), activations=selective("core_attn"))
    yield DEEP_SGD, replace(levels, pp=2, schedule="zb-h1", microbatches=4)


def varlen_matrix() -> Iterator[Case]:
    """One varlen call for all documents, with what runs again, is on the host, or is deferred; one process has a tile
    for each document."""
    in_documents, one_call = replace(DEEP_SGD, masks_documents=True), Layout(attention="unfused", microbatches=2)
    yield in_documents, one_call
    yield in_documents, replace(one_call, microbatches=BATCH)
    yield in_documents, replace(one_call, tp=2, sequence_parallel=True, activations=selective("core_attn"))
    yield in_documents, replace(one_call, activations=full("uniform", 2, cpu_offloading_num_layers=2))
    yield in_documents, replace(one_call, pp=2, schedule="zb-v", microbatches=4)
    yield CONTEXT_IN_DOCUMENTS, replace(one_call, cp=2, cp_comm_type=("a2a",))


def activation_matrix() -> Iterator[Case]:
    """Every way not to keep activations, with what else runs or communicates in a backward pass."""
    host = ActivationConfig(cpu_offloading_num_layers=1)
    segments = selective("core_attn", "layernorm", "mlp_act")
    for module in get_args(RecomputeModule):
        yield SGD, Layout(activations=selective(module))
    yield SGD, Layout(activations=selective("layernorm", "mlp"))
    for activations in (full("uniform", 1), full("uniform", 2), full("block", 1), segments, selective("mlp"), host):
        yield SGD, Layout(2, 1, True, microbatches=2, activations=activations)
    yield TIED, Layout(2, activations=full("uniform", 2, distribute_saved_activations=True))
    pipelines: tuple[tuple[ScheduleName, ActivationConfig], ...] = (
        ("1f1b", full("uniform", 3)),
        ("zb-h1", full("block", 3)),
        ("zb-h1", selective("layernorm", "mlp", cpu_offloading_num_layers=4)),
        ("zb-v", segments),
        ("zb-v", full("uniform", 2, cpu_offloading_num_layers=2)),
        ("interleaved", replace(host, cpu_offloading_num_layers=2)),
    )
    for schedule, activations in pipelines:
        yield DEEP_SGD, Layout(pp=2, schedule=schedule, microbatches=4, activations=activations)
    distributed = full("block", 3, distribute_saved_activations=True, cpu_offloading_num_layers=2)
    yield DEEP_SGD, Layout(2, pp=2, microbatches=4, activations=distributed)
    fsdp = Layout(1, 2, strategy="optim_grads_params", microbatches=2, overlap_grad_reduce=True)
    for number, activations in enumerate((full("uniform", 1), full("uniform", 3), full("block", 3), segments, host)):
        layout = replace(fsdp, activations=activations, overlap_param_gather=True, reshard_after_forward=number != 2)
        yield DEEP_TIED, layout
    yield DEEP_SGD, replace(fsdp, pp=2, schedule="zb-h1", activations=full("uniform", 2))
    gathered = Layout(1, 2, strategy="optim", overlap_param_gather=True, bucket_size=3000)
    yield DEEP_TIED, replace(gathered, activations=full("uniform", 3))
    for kind in get_args(Exchange):
        yield CONTEXT_IN_DOCUMENTS, Layout(cp=2, cp_comm_type=(kind,), activations=selective("core_attn"))
    yield CONTEXT_IN_DOCUMENTS, Layout(2, 1, True, cp=2, activations=full("uniform", 2))
    yield CONTEXT, Layout(cp=2, cp_comm_type=("a2a", "p2p"), activations=replace(host, cpu_offloading_num_layers=2))


def loss_chunk_matrix() -> Iterator[Case]:
    """The loss a few tokens at a time, with whatever divides the output layer, its tokens or its gradient."""
    chunks = ActivationConfig(loss_chunk_size=37)
    yield SGD, Layout(activations=chunks, microbatches=2)
    yield TIED, Layout(4, activations=chunks, microbatches=2)
    yield TIED, Layout(2, 2, True, "optim", microbatches=2, overlap_grad_reduce=True, activations=chunks)
    yield ADAM_CLIPPED_HARD, Layout(4, 1, True, activations=chunks)
    yield SGD, Layout(2, 1, True, tp_overlap="pipelined", activations=chunks)
    yield DELAYED, Layout(2, 1, True, microbatches=2, activations=chunks)
    yield CONTEXT_IN_DOCUMENTS, Layout(2, 1, True, cp=2, activations=chunks)
    schedules: tuple[ScheduleName, ...] = ("1f1b", "zb-h1", "zb-v")
    for schedule in schedules:
        yield DEEP_SGD, Layout(2, pp=2, schedule=schedule, microbatches=4, activations=chunks)
    yield DEEP_TIED, Layout(1, 2, pp=2, schedule="zb-h1", microbatches=4, strategy="optim", activations=chunks)
    strategies: tuple[ShardingStrategy, ...] = ("optim_grads", "optim_grads_params")
    for strategy in strategies:
        layout = Layout(1, 2, strategy=strategy, microbatches=2, overlap_grad_reduce=True, activations=chunks)
        yield TIED, layout
        yield SGD, replace(layout, tp=2, sequence_parallel=True, overlap_param_gather=True)
    everything = full("uniform", 1, cpu_offloading_num_layers=1, loss_chunk_size=37)
    yield SGD, Layout(2, 1, True, microbatches=2, activations=everything)


def z_loss_matrix() -> Iterator[Case]:
    """The z-loss of the output layer, with whatever divides its tokens or its vocabulary, and in both kinds of loss."""
    deep = replace(DEEP_TIED, z_loss_multiplier=0.1)
    yield Z_LOSS, Layout(4, microbatches=4)
    yield replace(CONTEXT_IN_DOCUMENTS, z_loss_multiplier=0.1), Layout(2, 1, True, cp=2)
    for chunk_size in (None, 37):
        activations = ActivationConfig(loss_chunk_size=chunk_size)
        yield Z_LOSS, Layout(2, 2, True, "optim", microbatches=2, activations=activations)
        yield Z_LOSS, Layout(1, 4, strategy="optim_grads_params", instances=2, activations=activations)
        yield deep, Layout(2, 1, pp=2, schedule="zb-v", microbatches=4, activations=activations)


def average_matrix() -> Iterator[Case]:
    """The moving average of the weights under every strategy, also in host memory, and where both ends of a pipeline
    have a weight."""
    for strategy, offload in zip(get_args(ShardingStrategy), (0.0, 0.5, 1.0, 0.5)):
        yield EMA, Layout(2, 2, True, strategy, microbatches=2, offload=offload)
    yield EMA, Layout(1, 4, strategy="optim_grads_params", instances=2, offload=1.0)
    yield replace(EMA, model=DEEP_TIED_MODEL), Layout(1, 2, pp=2, schedule="zb-h1", microbatches=2, strategy="optim")


def fp8_matrix() -> Iterator[Case]:
    """What divides a tensor, or delays a product of it. Under delayed scaling no division changes a scale; under
    tensorwise scaling only the batch does that; under block scaling what divides a block, which no row does."""
    for sequence_parallel in (False, True):
        yield TENSORWISE, Layout(2, 1, sequence_parallel)
        yield DELAYED, Layout(2, 1, sequence_parallel, microbatches=2)
    yield TENSORWISE, Layout(2, 1, True, pp=2, schedule="zb-h1")
    yield BLOCKWISE, Layout(2, 1)
    yield BLOCKWISE, Layout(2, 1, True, cp=2)
    yield BLOCKWISE, Layout(2, 1, True, pp=2, schedule="zb-h1", microbatches=4)
    yield BLOCKWISE, Layout(1, 2, strategy="optim_grads_params", microbatches=2, activations=full("uniform", 1))
    yield BLOCKWISE, Layout(2, 1, True, tp_overlap="pipelined", activations=selective("layernorm", "mlp_act"))
    yield DELAYED, Layout(cp=2)
    yield DELAYED, Layout(pp=2, microbatches=4)
    yield DELAYED, Layout(2, 1, True, pp=2, schedule="zb-h1", microbatches=4)
    for strategy in ("optim_grads", "optim_grads_params"):
        yield DELAYED, Layout(1, 2, strategy=strategy, microbatches=2)
    yield DELAYED, Layout(2, 2, True, strategy="optim_grads_params", microbatches=2, overlap_param_gather=True)
    # What runs again in the backward pass has the scales and the rounding of the first time.
    segments = selective("layernorm", "mlp_act")
    yield DELAYED, Layout(microbatches=2, activations=full("uniform", 1))
    yield TENSORWISE, Layout(2, 1, True, activations=segments)
    yield DELAYED, Layout(pp=2, schedule="zb-h1", microbatches=4, activations=full("block", 1))
    yield DELAYED, Layout(1, 2, strategy="optim_grads_params", microbatches=2, activations=full("uniform", 2))
    yield DELAYED, Layout(2, 1, True, microbatches=2, activations=replace(segments, cpu_offloading_num_layers=2))
    # Master weights are quantised, which in fp64 are the weights.
    gathered = Layout(1, 2, strategy="optim", microbatches=2, fp8_param_gather=True)
    overlapped = replace(gathered, bucket_size=3000, overlap_grad_reduce=True, overlap_param_gather=True)
    yield TENSORWISE, replace(gathered, tp=2, dp=1, microbatches=1)
    yield BLOCKWISE, replace(overlapped, tp=2, sequence_parallel=True)
    yield DELAYED, replace(gathered, dp=1)
    yield DELAYED, gathered
    yield DELAYED, replace(overlapped, dp=4)
    yield DELAYED, replace(overlapped, tp=2, sequence_parallel=True)
    yield DELAYED, replace(gathered, strategy="optim_grads")
    yield DELAYED, replace(overlapped, dp=4, instances=2)
    yield DELAYED, replace(overlapped, cp=2, activations=full("uniform", 1))
    yield DELAYED, replace(overlapped, pp=2, schedule="zb-h1", microbatches=4)


def tensor_parallel_overlap_matrix() -> Iterator[Case]:
    """Both overlaps, beside whatever runs, delays or repeats a product, or divides the sequence a second time."""
    pipelined = Layout(2, 1, True, tp_overlap="pipelined")
    yield TIED, replace(pipelined, tp=4, microbatches=2)
    yield TENSORWISE, pipelined
    yield DELAYED, replace(pipelined, pp=2, schedule="zb-h1", microbatches=4)
    yield SGD, replace(pipelined, dp=2, strategy="optim_grads_params", activations=full("uniform", 1))
    yield CONTEXT_IN_DOCUMENTS, replace(pipelined, cp=2, activations=selective("layernorm", "mlp_act"))
    staged = replace(pipelined, tp=4, pp=2, microbatches=2, strategy="optim")
    yield DEEP_SGD, staged
    yield DEEP_SGD, replace(staged, tp=2, schedule="zb-v")
    symmetric = replace(pipelined, tp_overlap="symmetric memory", microbatches=2)
    yield SGD, symmetric
    yield SGD, replace(symmetric, tp=4)
    yield TENSORWISE, replace(symmetric, microbatches=1)


def transformer_engine_matrix() -> Iterator[Case]:
    """What meets layers of another make: who divides them, when their gradients are due and where they go, what runs
    again."""
    theirs = Layout(transformer_engine=True)
    yield SGD, theirs
    yield ADAM, replace(theirs, microbatches=4)
    yield SGD, replace(theirs, tp=2, microbatches=2, activations=full("uniform", 2))
    yield SGD, replace(theirs, microbatches=2, activations=selective("core_attn", "mlp_act"))
    for strategy in get_args(ShardingStrategy):
        buckets = Layout(2, 2, True, strategy, microbatches=2, bucket_size=3000, overlap_grad_reduce=True)
        yield SGD, replace(buckets, transformer_engine=True)
    # Once a step and once a microbatch is the same with one microbatch.
    yield DELAYED, Layout(2, 2, True, "optim_grads", transformer_engine=True)
    yield DELAYED, replace(theirs, pp=2, dp=2)
    yield TENSORWISE, replace(theirs, activations=full("uniform", 1))
    yield DEEP_TIED, replace(theirs, pp=2, schedule="interleaved", microbatches=4, activations=full("block", 1))


def architecture_matrix() -> Iterator[Case]:
    """QK-norm, whose gains every tensor-parallel rank has for its own heads, and the bias of query, key and value."""
    yield QWEN3, Layout(2, microbatches=2)
    yield QWEN3, Layout(4, sequence_parallel=True, microbatches=2)
    yield QWEN3, Layout(2, 2, True, "optim", microbatches=2, overlap_grad_reduce=True)
    yield QWEN3, Layout(2, pp=2, schedule="zb-v", microbatches=4)
    yield QWEN3, Layout(2, pp=2, schedule="1f1b", microbatches=4, sequence_parallel=True, strategy="optim")
    for kind in get_args(Exchange):
        yield QWEN3, Layout(2, cp=2, cp_comm_type=(kind,), sequence_parallel=kind == "p2p")
    yield QWEN3, Layout(dp=4, strategy="optim_grads_params", microbatches=2)
    yield QWEN3, Layout(2, 2, True, "optim_grads_params", overlap_param_gather=True)
    yield QWEN3, Layout(2, dp=2, strategy="optim", instances=2, activations=selective("core_attn", "layernorm", "mlp"))
    yield QWEN3, Layout(2, activations=full("uniform", 2, cpu_offloading_num_layers=2))
    yield QWEN3_1P, Layout(2, 2, True, "optim", microbatches=2, overlap_grad_reduce=True, overlap_param_gather=True)
    yield QWEN3_1P, Layout(4, activations=selective("layernorm"))
    yield QWEN3_1P, Layout(2, pp=2, schedule="zb-v", microbatches=4)
    yield QWEN3_1P, Layout(2, 2, True, "optim_grads_params")
    yield QWEN3_1P, Layout(2, 2, True, "optim", transformer_engine=True)
    yield WINDOWS, Layout(cp=4, microbatches=2)
    yield WINDOWS, Layout(tp=2, sequence_parallel=True, cp=2, cp_comm_type=("allgather",))
    yield WINDOWS, Layout(pp=2, schedule="zb-v", microbatches=4, cp=2)
    yield WINDOWS, Layout(dp=2, cp=2, cp_comm_type=("a2a",), strategy="optim_grads_params")
    yield CAPPED, Layout(cp=4, cp_comm_type=("allgather",))
    yield CAPPED, Layout(tp=2, pp=2, microbatches=2, activations=selective("core_attn"))
    yield CAPPED, Layout(cp=2, cp_comm_type=("a2a",), attention="unfused")
    yield CAPPED, Layout(dp=2, cp=2, strategy="optim")
    yield SINKS, Layout(cp=4, microbatches=2)
    yield SINKS, Layout(tp=2, sequence_parallel=True, cp=2, cp_comm_type=("allgather",))
    yield SINKS, Layout(tp=2, pp=2, microbatches=2, schedule="zb-h1", activations=selective("core_attn"))
    yield SINKS, Layout(dp=2, strategy="optim_grads_params", activations=full("uniform", 1))
    yield OFF_BY_ONE, Layout(tp=2, cp=2)
    yield QWEN2, Layout(4, sequence_parallel=True, microbatches=2)
    yield QWEN2, Layout(2, 2, pp=2, schedule="zb-h1", strategy="optim", microbatches=2)
    yield QWEN2, Layout(2, 2, True, "optim_grads_params", activations=selective("core_attn", "layernorm"))


def mup_matrix() -> Iterator[Case]:
    """muP, whose multipliers are applied to what each layout divides, and whose learning rates to each shard."""
    yield MUP_SGD, Layout(4, sequence_parallel=True, microbatches=2)
    yield MUP_SGD, Layout(2, 1, True, cp=2, activations=ActivationConfig(loss_chunk_size=37))
    yield MUP_ADAM, Layout(2, 2, True, "optim", pp=2, schedule="1f1b", microbatches=2, bucket_size=3000)
    yield MUP_ADAM, Layout(1, 2, pp=2, schedule="zb-v", microbatches=4, strategy="optim_grads")
    yield MUP_ADAM, Layout(1, 4, strategy="optim_grads_params", activations=selective("core_attn", "layernorm", "mlp"))
    yield MUP_ADAM, Layout(2, 2, True, "optim_grads_params", transformer_engine=True)
    yield MUP_MUON, Layout(2, 2, True, "optim", microbatches=2)


NAMED: tuple[Callable[[], Iterator[Case]], ...] = (
    matrix,
    pipeline_matrix,
    context_parallel_matrix,
    varlen_matrix,
    data_parallel_matrix,
    muon_matrix,
    activation_matrix,
    loss_chunk_matrix,
    z_loss_matrix,
    average_matrix,
    tensor_parallel_overlap_matrix,
    fp8_matrix,
    transformer_engine_matrix,
    mup_matrix,
    architecture_matrix,
)
PRODUCTS: tuple[Callable[[], Iterator[Case]], ...] = (
    tensor_product,
    pipeline_product,
    context_parallel_product,
    data_parallel_product,
    muon_product,
)
ROWS = rows_of(chain.from_iterable(rows() for rows in NAMED), *(rows() for rows in PRODUCTS))


@pytest.mark.parametrize(("task", "layout"), ROWS, ids=identifier)
def test_layout_equals_one_process(sixteen_ranks: RankPool, task: Task, layout: Layout) -> None:
    compare_with_one_process(sixteen_ranks, task, layout)


def test_every_weight_has_a_moving_average() -> None:
    """Which all layouts are compared in."""
    trace = one_process(EMA)
    assert assemble(trace.averages[-1]).keys() == assemble(trace.weights[-1]).keys()


@pytest.mark.parametrize("task", [DELAYED, TENSORWISE, BLOCKWISE], ids=identifier)
def test_gathering_fp8_changes_no_bit_of_weights_that_are_master_weights(four_ranks: RankPool, task: Task) -> None:
    """The amax of a weight, or of one of its blocks, is the maximum over its shards. Without clipping: shards add up to
    the norm in another order."""
    task = replace(task, optimizer=replace(task.optimizer, clip_grad=0.0))
    layout = Layout(2, 2, strategy="optim", microbatches=2, bucket_size=3000, overlap_param_gather=True)
    plain, gathered = (
        four_ranks.run(train, task, replace(layout, fp8_param_gather=gathers), world_size=4)
        for gathers in (False, True)
    )
    for trace, other in zip(plain, gathered, strict=True):
        assert trace.losses == other.losses
    for step in range(task.steps):
        wanted, found = (assemble([part for trace in run for part in trace.weights[step]]) for run in (plain, gathered))
        assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize(
    "task",
    [SGD_UNCLIPPED, replace(SGD_UNCLIPPED, model=TIED_MODEL), replace(SGD_UNCLIPPED, z_loss_multiplier=0.1)],
    ids=["untied", "tied", "z-loss"],
)
def test_one_process_takes_the_step_of_the_definition(task: Task) -> None:
    """The gradient of the mean over unmasked tokens, by autograd, with the z-loss (PaLM, arXiv 2204.02311, section 5),
    which is not part of the reported loss. Independent of step, buffers and optimizer: what all layouts agree on must
    also be right."""
    trace, multiplier = one_process(task), task.z_loss_multiplier or 0.0
    model = build_model(task.model, context(single_process(), Layout()), SEED)
    (batch,) = microbatches(0, Layout(), 0)
    unmasked = batch["loss_mask"] > 0
    assert 0 < unmasked.sum() < BATCH * SEQUENCE
    logits = model.transformer_chunks[0](batch["tokens"])[..., : MODEL.vocab_size].transpose(0, 1)[unmasked]  # [n, v]
    cross_entropy = F.cross_entropy(logits, batch["labels"][unmasked])
    z_loss = torch.logsumexp(logits, dim=-1).square().mean()
    (cross_entropy + multiplier * z_loss).backward()
    assert trace.losses[0] == pytest.approx(cross_entropy.item(), rel=TOLERANCE)
    assert trace.auxiliary[0] == ({"lm_z_loss": pytest.approx(z_loss.item(), rel=TOLERANCE)} if multiplier else {})
    gradients, weights, squares = assemble(trace.gradients[0]), assemble(trace.weights[0]), 0.0
    for parameter in model.parameters():
        info = info_of(parameter)
        assert parameter.grad is not None
        before, wanted = (one[: info.global_shape[0]] for one in (parameter.detach(), parameter.grad))
        assert (gradients[info.name] - wanted).abs().max() < TOLERANCE * wanted.abs().max(), info.name
        # The first step of SGD is the gradient itself; momentum has nothing to remember yet.
        decay = task.optimizer.weight_decay if info.weight_decay else 0.0
        updated = before - task.learning_rate * (wanted + decay * before)
        assert (weights[info.name] - updated).abs().max() < TOLERANCE, info.name
        squares += float(wanted.square().sum())
    assert trace.grad_norms[0] == pytest.approx(math.sqrt(squares), rel=TOLERANCE)


def test_gains_of_one_plus_a_weight_train_as_gains_do() -> None:
    """Norms have no weight decay, so both forms have the same updates."""
    gains, weights = one_process(QWEN3), one_process(QWEN3_1P)
    assert weights.losses == pytest.approx(gains.losses, rel=TOLERANCE)
    assert weights.grad_norms == pytest.approx(gains.grad_norms, rel=TOLERANCE)
    trained, wanted = assemble(weights.weights[-1]), assemble(gains.weights[-1])
    norms = [name for name in wanted if "layernorm" in name]
    assert len(norms) == 4 * QWEN3.model.num_layers + 1
    for name, tensor in wanted.items():
        found = 1.0 + trained[name] if name in norms else trained[name]
        assert (found - tensor).abs().max() < TOLERANCE * tensor.abs().max(), name
        assert name not in norms or (tensor != 1.0).any(), name


def test_the_run_trains_and_clips() -> None:
    """The comparison means nothing if the loss stands still or no gradient is ever clipped."""
    trace = one_process(replace(ADAM_CLIPPED_HARD, steps=4))
    assert trace.losses[-1] < trace.losses[0] - 0.05
    assert min(trace.grad_norms) > ADAM_CLIPPED_HARD.optimizer.clip_grad


def test_rows_that_run_by_default_show_every_two_factors_that_few_ranks_can() -> None:
    wanted = [*chain.from_iterable(rows() for rows in NAMED)]
    wanted += [case for rows in PRODUCTS for case in rows() if case[1].world_size <= MOST_RANKS]
    cases = [(row.values[0], replace(row.values[1], late=False)) for row in ROWS if not row.marks]
    assert len(cases) < len(wanted) / 4
    factors = factors_of(wanted + cases)
    shown = set().union(*(combinations_of(row, 2) for row in factors[len(wanted) :]))
    assert all(combinations_of(row, 2) <= shown for row in factors)


def test_every_schedule_runs_by_default_with_each_other_way_to_divide() -> None:
    """Tensor, data and sequence parallelism, and each strategy that shards."""
    default = [row.values[1] for row in ROWS if not row.marks]
    for schedule in SCHEDULES:
        layouts = [layout for layout in default if layout.pp > 1 and layout.schedule == schedule]
        assert {layout.tp for layout in layouts} >= {1, 2}, schedule
        assert {layout.dp for layout in layouts} >= {1, 2}, schedule
        assert {layout.sequence_parallel for layout in layouts} == {False, True}, schedule
        assert {layout.strategy for layout in layouts if layout.dp > 1} >= set(get_args(ShardingStrategy)[1:]), schedule
