"""What is particular to ZeRO-3 on FSDP2: how rows are divided, and models that are built without memory."""

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from megatron.core.data_parallel.buffered import shards_weights, wrap_data_parallel
from megatron.core.data_parallel.fully_sharded import split_rows
from megatron.core.models.parallelize import build_model
from megatron.core.models.transformer import TransformerModel
from megatron.core.parameter import ParameterInfo, info_of, sharded_boxes
from megatron.core.precision import NumberFormats, number_formats
from megatron.core.topology import single_process
from tests.parallel.layout_run import MODEL, SEED, Layout, LocalTensor, assemble, boxes_of, context, place_in
from tests.rank_pool import RankPool


@given(rows=st.integers(1, 40), width=st.integers(1, 5), shards=st.integers(1, 9))
def test_row_parts_are_the_chunks_of_torch(rows: int, width: int, shards: int) -> None:
    info = ParameterInfo("w", *sharded_boxes([rows], [width], 0, 1), None, True, False)
    chunks = torch.arange(rows).chunk(shards)
    split = split_rows(info, shards)
    assert split.part == len(chunks[0]) * width
    for rank in range(shards):
        start, stop = split.range_of(rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start // width, stop // width)) == expected and (stop - start) % width == 0


FORMATS = {
    "fp64": NumberFormats.uniform(torch.float64),
    "bf16": number_formats(PrecisionConfig(bf16=True), OptimizerConfig()),
}


def initial_weights(strategy: ShardingStrategy, formats: NumberFormats) -> tuple[list[LocalTensor], int, bool]:
    """This rank's part of the weights of a model built as a run builds it, the bytes it needed for weights until its
    shards were there, and whether it was built without memory."""
    config = ParallelConfig(data_parallel_sharding_strategy=strategy)
    layout = Layout(dp=4, strategy=strategy)
    topology = place_in(layout)
    is_sharded = shards_weights(config, topology, has_experts=False)
    device = torch.device("meta") if is_sharded else None
    model = TransformerModel(MODEL, replace(context(topology, layout, formats.weight), weights_device=device))
    allocated = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    data_parallel = wrap_data_parallel(model, formats, topology, config)
    data_parallel.initialize(SEED)
    parts = boxes_of((weight.info, weight.start, weight.tensor.double()) for weight in data_parallel.local_params)
    return parts, allocated, is_sharded


def expected_weights(formats: NumberFormats) -> dict[str, Tensor]:
    model = build_model(MODEL, context(single_process(), Layout(), formats.weight), SEED)
    return {
        info_of(parameter).name: parameter.detach()[: info_of(parameter).global_shape[0]].double()
        for parameter in model.parameters()
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_every_strategy_starts_from_the_same_weights(
    four_ranks: RankPool, strategy: ShardingStrategy, name: str
) -> None:
    """In bf16, too, where sharded weights are kept in fp32; and no rank has memory for weights it does not keep."""
    results = four_ranks.run(initial_weights, strategy, FORMATS[name])
    found = assemble([part for parts, _, _ in results for part in parts])
    expected = expected_weights(FORMATS[name])
    assert found.keys() == expected.keys()
    for weight, tensor in expected.items():
        assert torch.equal(found[weight], tensor), weight
    for parts, allocated, is_sharded in results:
        kept = sum(prod(box.shape) for _, _, box, _ in parts)
        assert is_sharded == (strategy == "optim_grads_params")
        if is_sharded:
            assert allocated == 0
            assert kept < 0.3 * sum(tensor.numel() for tensor in expected.values())
