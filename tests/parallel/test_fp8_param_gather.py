"""Weights that are gathered in FP8: the numbers of whole master weights, in a byte each."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from megatron.core.communication import CollectiveRecord
from megatron.core.fp8 import Fp8Scaling
from megatron.core.models.transformer import TransformerChunk
from megatron.core.ops.fp8 import E4M3
from megatron.core.parameter import info_of
from tests.parallel.layout_run import (
    MODEL,
    Layout,
    LocalTensor,
    Task,
    assemble,
    boxes_of,
    build,
    grid_of,
    make_steps,
    overflow_on_last_rank,
    topology_of,
    train,
)
from tests.parallel.tasks import DELAYED
from tests.rank_pool import RankPool

TENSORWISE = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise")
TASK = Task(
    OptimizerConfig(), model=replace(MODEL, ffn_hidden_size=64), precision=PrecisionConfig(bf16=True), fp8=TENSORWISE
)
LAYOUT = Layout(dp=4, strategy="optim", bucket_size=3000, overlap_param_gather=True, fp8_param_gather=True)


def weights_of_a_rank() -> tuple[list[LocalTensor], dict[str, tuple[Tensor, float]], int]:
    """After two steps: this rank's master weights, every FP8 weight as bytes with its inverse scale, and the bytes of
    the all-gathers of an update."""
    topology = topology_of(grid_of(LAYOUT))
    executor, data_parallel, optimizer = build(TASK, LAYOUT, topology)
    make_steps(TASK, LAYOUT, topology, executor, data_parallel, optimizer, range(2))
    records: list[CollectiveRecord] = []
    communicator = data_parallel.sharing.dense.shards
    communicator.observer = records.append
    optimizer.publish()
    data_parallel.finish_param_all_gather()
    communicator.observer = None
    gathered = sum(record.num_bytes for record in records if record.kind == "all_gather")
    fp8, (chunk,) = optimizer.fp8, executor.chunks
    assert isinstance(fp8, Fp8Scaling) and isinstance(chunk, TransformerChunk)
    scales = dict(zip((layer.name for layer in fp8._layers), fp8.weight_state.inverse_scale.tolist()))
    weights = {
        info_of(weight).name: (
            weight.detach().view(torch.uint8).clone(),
            scales[info_of(weight).name[: -len(".weight")]],
        )
        for weight in chunk.parameters()
        if weight.dtype == E4M3
    }
    return (
        boxes_of(
            (shard.info, shard.start, shard.weight.double())
            for shard in data_parallel.param_shards
            if shard.weight.itemsize > 2
        ),
        weights,
        gathered,
    )


def test_every_rank_has_the_quantised_master_weights_and_received_a_byte_for_each(four_ranks: RankPool) -> None:
    results = four_ranks.run(weights_of_a_rank)
    masters = assemble([box for boxes, _, _ in results for box in boxes])
    assert len(masters) == 4 * MODEL.num_layers
    for _, weights, gathered in results:
        assert weights.keys() == masters.keys()
        for name, (data, inverse_scale) in weights.items():
            master = masters[name].float()
            scale = 448.0 / master.abs().max()
            assert inverse_scale == pytest.approx(1.0 / float(scale), rel=1e-6)
            assert torch.equal(data, (master * scale).to(E4M3).view(torch.uint8)), name
            assert not torch.equal(master, master.bfloat16().float()), name
        in_fp8 = sum(master.numel() for master in masters.values())
        others = TASK.model.num_parameters() + (MODEL.padded_vocab_size - MODEL.vocab_size) * 2 * 32 - in_fp8
        # Each bucket is padded to 64 elements on each of four ranks.
        assert in_fp8 + 2 * others <= gathered < in_fp8 + 2 * others + 20 * 256


def test_a_skipped_step_gives_the_weights_the_scales_of_the_next(four_ranks: RankPool) -> None:
    """As where they are quantised at the start of every step."""
    task = replace(DELAYED, optimizer=replace(DELAYED.optimizer, clip_grad=0.0))
    layout = Layout(dp=2, strategy="optim")
    plain, gathered, on_host = (
        four_ranks.run(train, task, one, partial(overflow_on_last_rank, 2), world_size=2)
        for one in (layout, replace(layout, fp8_param_gather=True), replace(layout, fp8_param_gather=True, offload=0.5))
    )
    for trace, *others in zip(plain, gathered, on_host, strict=True):
        assert [math.isfinite(norm) for norm in trace.grad_norms] == [True, False, True, True]
        assert all(trace.losses == other.losses for other in others)
