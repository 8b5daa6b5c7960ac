"""The layouts of the search are the valid ones: each passes the checks of a run, and none of a grid is missing."""

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.search.enumeration import LONGEST_MICROBATCH, SHORTEST_PART, enumerate_layouts
from megatron.planner.search.layout import Layout
from megatron.planner.step_time.workload import read_cluster

REQUIRED = "--mock-data --train-iters 10 --lr 1e-3 --micro-batch-size 1"
DENSE = (
    "--num-layers 12 --hidden-size 64 --num-attention-heads 8 --num-query-groups 4 --vocab-size 1000 --bf16 "
    "--ffn-hidden-size 128 --seq-length 8192 --global-batch-size 16"
)
NODE = 8


def config_of(flags: str) -> RunConfig:
    return parse_command_line(f"{REQUIRED} {flags}".split())


@cache
def layouts_of(flags: str, num_gpus: int, given: tuple[str, ...] = (), cluster: str = "h100") -> list[Layout]:
    config = config_of(flags)
    architecture = config.model.resolve(config.mock_vocab_size or 1, 1, config.seq_length)
    return enumerate_layouts(config, architecture, num_gpus, read_cluster(cluster), given)


RUNS = {
    "70B": ("--model llama3.1-70b --bf16 --seq-length 8192 --global-batch-size 128", 64),
    "405B on many": ("--model llama3.1-405b --bf16 --seq-length 8192 --global-batch-size 2048", 16384),
    "8B in FP8": ("--model llama3-8b --bf16 --fp8-format hybrid --seq-length 4096 --global-batch-size 64", 8),
    "experts": ("--model mixtral-8x22b --bf16 --seq-length 4096 --global-batch-size 1024", 128),
    "tied, fp32": ("--model tiny --vocab-size 1000 --seq-length 256 --global-batch-size 24", 4),
    "Transformer Engine": (
        "--model llama3-8b --bf16 --seq-length 4096 --global-batch-size 64 --transformer-impl transformer_engine",
        16,
    ),
    "its delayed FP8": (
        "--model llama3-8b --bf16 --fp8-format hybrid --fp8-recipe delayed --seq-length 4096 --global-batch-size 64 "
        "--transformer-impl transformer_engine",
        8,
    ),
    "long": ("--model llama3.1-405b --bf16 --seq-length 131072 --global-batch-size 128", 2048),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_layout_is_valid(name: str) -> None:
    flags, num_gpus = RUNS[name]
    config, layouts = config_of(flags), layouts_of(flags, num_gpus)
    assert len(set(layouts)) == len(layouts) > 0
    for layout in random.Random(1).sample(layouts, min(len(layouts), 60)):
        applied = layout.apply(config)
        check_run(applied, num_gpus)
        assert layout.num_gpus == num_gpus
        assert applied.training.global_batch_size is not None
        assert applied.training.global_batch_size % (layout.dp * layout.micro_batch_size) == 0


GIVEN: dict[str, tuple[str, dict[str, object]]] = {
    "tensor_model_parallel_size": ("--tensor-model-parallel-size 4", {"tp": 4}),
    "pipeline_schedule": ("--pipeline-schedule zb-h1", {"schedule": "zb-h1"}),
    "num_virtual_stages_per_pipeline_rank": ("--num-virtual-stages-per-pipeline-rank 3", {"vp": 3}),
    "num_layers_per_virtual_pipeline_stage": ("--num-layers-per-virtual-pipeline-stage 1", {}),
    "use_distributed_optimizer": ("--use-distributed-optimizer", {"sharding": "optim"}),
    "use_torch_fsdp2": ("--use-torch-fsdp2", {"sharding": "optim_grads_params"}),
    "micro_batch_size": ("--micro-batch-size 4", {"micro_batch_size": 4}),
    "recompute_activations": ("--recompute-activations", {"recompute": "core_attn"}),
    "grad_reduce_in_bf16": ("--grad-reduce-in-bf16", {"reduces_in_bf16": True}),
    "sequence_parallel": ("--no-sequence-parallel", {"sequence_parallel": False}),
    "context_parallel_size": ("--context-parallel-size 8", {"cp": 8}),
}


@pytest.mark.parametrize("field", GIVEN)
def test_a_given_flag_is_a_constraint(field: str) -> None:
    extra, expected = GIVEN[field]
    config, layouts = config_of(f"{DENSE} {extra}"), layouts_of(f"{DENSE} {extra}", 8, (field,))
    assert layouts
    for layout in layouts:
        # Without interleaving there is one chunk.
        values = {name: value for name, value in expected.items() if layout.pp > 1 or name not in ("schedule", "vp")}
        assert {name: getattr(layout, name) for name in values} == values
    for layout in random.Random(2).sample(layouts, min(len(layouts), 10)):
        check_run(layout.apply(config, (field,)), 8)


def test_the_flags_of_a_layout_parse_to_its_configuration() -> None:
    config = config_of(DENSE)
    for layout in random.Random(3).sample(layouts_of(DENSE, 8), 25):
        words: list[str] = []
        for name, value in layout.flags().items():
            words += [f"--{name}", *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
        without_size = f"{REQUIRED} {DENSE}".replace("--micro-batch-size 1", "")
        assert parse_command_line([*without_size.split(), *words]) == layout.apply(config)


def grid(num_gpus: int) -> Iterator[Layout]:
    """All combinations, valid or not, without recompute and with fp32 gradients."""
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    pipelines = [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), *(("interleaved", vp) for vp in range(2, 9))]
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    for tp, pp, cp, (schedule, vp), ends, sharding, size in product(
        sizes, sizes, sizes, pipelines, (False, True), strategies, (1, 2, 4)
    ):
        if num_gpus % (tp * pp * cp) == 0 and (pp > 1 or (schedule, ends) == ("1f1b", False)):
            dp = num_gpus // (tp * pp * cp)
            layout = Layout(tp, pp, cp, dp, vp, schedule, sharding, size, "none", counts_ends=ends)  # type: ignore[arg-type]
            yield replace(layout, tp_comm_overlap=tp > 1)


def is_valid(layout: Layout, config: RunConfig) -> bool:
    batch = config.training.global_batch_size
    assert batch is not None
    try:
        check_run(layout.apply(config), layout.num_gpus)
    except ConfigError:
        return False
    return batch % (layout.dp * layout.micro_batch_size) == 0


def longest_chunk(layout: Layout, config: RunConfig) -> int:
    stages = layout.apply(config).pipeline.virtual_stages(config.model.num_layers or 0, layout.pp)
    return max(len(stage.layers) for stage in stages)


def is_sensible(layout: Layout, config: RunConfig) -> bool:
    """The documented exclusions."""
    count = (config.training.global_batch_size or 0) // (layout.dp * layout.micro_batch_size)
    size, length = layout.micro_batch_size, config.seq_length
    return (
        layout.tp <= NODE
        and (layout.cp == 1 or length // layout.cp >= SHORTEST_PART)
        and (size == 1 or (layout.cp == 1 and size * length <= LONGEST_MICROBATCH and count >= layout.pp))
        and (layout.schedule != "interleaved" or count >= layout.pp)
        and (layout.sharding == "no_shard") == (layout.dp * layout.cp == 1)
        and (layout.sharding != "optim_grads_params" or layout.pp == 1)
        and (layout.vp == 1 or longest_chunk(layout, config) > 1)
    )


def test_every_valid_layout_of_a_grid_is_found() -> None:
    config, found = config_of(DENSE), layouts_of(DENSE, 8)
    found_here = {one for one in found if one.recompute == "none" and not one.reduces_in_bf16}
    expected = {layout for layout in grid(8) if is_valid(layout, config) and is_sensible(layout, config)}
    # The ends count as layers only where the layers alone cannot be divided.
    even = {(one.pp, one.vp) for one in expected if not one.counts_ends}
    expected = {one for one in expected if not one.counts_ends or (one.pp, one.vp) not in even}
    assert len(expected) > 50
    assert found_here == expected


def choices(layouts: Collection[Layout], **sizes: object) -> set[tuple[str, int, bool]]:
    mine = [one for one in layouts if all(getattr(one, name) == value for name, value in sizes.items())]
    return {(one.recompute, one.recompute_layers, one.reduces_in_bf16) for one in mine}


def test_each_division_has_every_recompute_and_gradient_format() -> None:
    selective = ["none", "layernorm", "mlp_act", "layernorm+mlp_act", "core_attn"]
    recomputes = [*((name, 0) for name in selective), ("full", 3), ("full", 6)]
    found = choices(layouts_of(DENSE, 8), tp=2, pp=2, cp=1, schedule="1f1b", sharding="optim", micro_batch_size=1)
    assert found == {(*recompute, narrow) for recompute in recomputes for narrow in (False, True)}


def test_chunks_of_one_layer_and_deep_pipelines_are_searched_only_if_given() -> None:
    flags, num_gpus = RUNS["405B on many"]
    found = layouts_of(flags, num_gpus)
    # 126 layers and both ends are 128: 8 chunks of one layer on 16 stages are Llama 3's.
    assert {one.vp for one in found if (one.pp, one.schedule) == (16, "interleaved")} == {2, 4}
    assert max(one.pp for one in found) == 32
    eight = f"{flags} --num-virtual-stages-per-pipeline-rank 8"
    assert 16 in {one.pp for one in layouts_of(eight, num_gpus, ("num_virtual_stages_per_pipeline_rank",))}
    deep = layouts_of(f"{flags} --pipeline-model-parallel-size 64", num_gpus, ("pipeline_model_parallel_size",))
    assert {one.pp for one in deep} == {64}


@pytest.mark.parametrize(
    ("flags", "given", "cluster", "overlapping"),
    [
        ("", (), "h100", {2, 4}),
        ("", (), "gb200", {2, 4}),
        # Messages between parts of products.
        ("", (), "a100-80gb", set()),
        ("--fp8-format hybrid", (), "h100", set()),
        ("--fp8-format hybrid --fp8-recipe tensorwise --transformer-impl transformer_engine", (), "h100", {2, 4}),
        ("--tp-comm-overlap", ("tp_comm_overlap",), "a100-80gb", {1, 2, 4}),
        ("--no-tp-comm-overlap", ("tp_comm_overlap",), "h100", set()),
        ("--no-sequence-parallel", ("sequence_parallel",), "h100", set()),
        # Transformer Engine sends a quarter of the hidden size in vectors of eight.
        ("--transformer-impl transformer_engine", (), "h100", {2, 4}),
        ("--transformer-impl transformer_engine --hidden-size 48", (), "h100", set()),
    ],
)
def test_tensor_parallel_communication_overlaps_where_it_costs_nothing(
    flags: str, given: tuple[str, ...], cluster: str, overlapping: set[int]
) -> None:
    """All layouts of a tensor-parallel size overlap it, or none."""
    found = layouts_of(f"{DENSE} {flags}", 8, given, cluster)
    assert {one.tp for one in found} == {1, 2, 4}
    assert {one.tp for one in found if one.tp_comm_overlap} == overlapping
    assert not overlapping & {one.tp for one in found if not one.tp_comm_overlap}
    config = config_of(f"{DENSE} {flags}")
    for layout in random.Random(4).sample(found, 10):
        check_run(layout.apply(config, given), 8)


SCOUT = "--model llama4-scout --bf16 --seq-length 8192 --global-batch-size 256"


@pytest.mark.parametrize(
    ("flags", "num_gpus", "given", "sizes"),
    [
        (RUNS["experts"][0], 128, (), {(1, 1), (8, 1)}),
        (RUNS["experts"][0], 64, (), {(1, 1), (8, 1)}),
        (RUNS["experts"][0], 32, (), {(1, 1), (4, 1)}),
        (f"{RUNS['experts'][0]} --expert-model-parallel-size 2", 128, ("expert_model_parallel_size",), {(2, 1)}),
        (
            f"{RUNS['experts'][0]} --expert-tensor-parallel-size 4",
            128,
            ("expert_tensor_parallel_size",),
            {(1, 4), (2, 4), (4, 4)},
        ),
        (SCOUT, 128, (), {(1, 1), (8, 1), (16, 1)}),
    ],
)
def test_experts_are_on_all_ranks_of_a_node_on_several_nodes_or_not_divided(
    flags: str, num_gpus: int, given: tuple[str, ...], sizes: set[tuple[int, int]]
) -> None:
    """Of a pipeline with eight stages, or as given."""
    found = layouts_of(flags, num_gpus, given)
    assert {(one.ep, one.etp) for one in found if (one.tp, one.pp, one.cp) == (4, 8, 1)} == sizes
