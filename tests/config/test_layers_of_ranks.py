"""Every layer is on exactly one virtual stage, in order, and each way of splitting gives the numbers that it promises;
which layers of a chunk are recomputed, in which units, and whose activations go to the host.

Refusals are in test_checks.py, whose table must have one for every line that refuses.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.activations import ActivationConfig, LayerUnit, RecomputeMethod
from megatron.config.command_line import parse_command_line
from megatron.config.parallel import PipelineConfig
from megatron.errors import ConfigError
from megatron.schedules.catalog import ScheduleName
from megatron.schedules.schedule import Placement
from megatron.schedules.stages import (
    PlacementShape,
    VirtualStage,
    check_that_no_rank_idles,
    chunks_of_layers,
    pipeline_rank,
    split_around_ends,
    split_by_layout,
    split_evenly,
    split_nearly_evenly,
)

FLAGS = (False, True)


def counts(stages: Sequence[VirtualStage]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def assert_each_layer_once(stages: Sequence[VirtualStage], num_layers: int) -> None:
    """In order, with the embedding before the first and the head after the last."""
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    last = len(stages) - 1
    assert [number for number, stage in enumerate(stages) if stage.has_embedding] == [0]
    assert [number for number, stage in enumerate(stages) if stage.has_output_layer] == [last]


# Even splits


def even_cases() -> Iterator[tuple[int, int, int, bool, bool]]:
    return itertools.product(range(1, 20), range(1, 6), range(1, 4), FLAGS, FLAGS)


def test_an_even_split_exists_exactly_where_the_units_divide() -> None:
    for layers, ranks, chunks, with_embedding, with_loss in even_cases():
        units = layers + with_embedding + with_loss
        if units % (ranks * chunks):
            with pytest.raises(ConfigError):
                split_evenly(layers, ranks, chunks, with_embedding, with_loss)
            continue
        stages = split_evenly(layers, ranks, chunks, with_embedding, with_loss)
        assert len(stages) == ranks * chunks
        assert_each_layer_once(stages, layers)
        counted = counts(stages)
        counted[0] += with_embedding
        counted[-1] += with_loss
        assert set(counted) == {units // (ranks * chunks)}
        assert not any(stage.is_empty for stage in stages)


def test_adding_the_flags_that_a_refusal_proposes_helps() -> None:
    followed = 0
    for layers, ranks, chunks, with_embedding, with_loss in even_cases():
        try:
            split_evenly(layers, ranks, chunks, with_embedding, with_loss)
        except ConfigError as error:
            advice = re.search(r"add (.*?), which makes", str(error))
            if advice is None:
                continue
            added = ["--account-for-embedding" in advice[1], "--account-for-loss" in advice[1]]
            assert not (added[0] and with_embedding) and not (added[1] and with_loss), "that flag is there already"
            split_evenly(layers, ranks, chunks, with_embedding or added[0], with_loss or added[1])
            followed += 1
    assert followed > 20


def test_chunks_by_layers_are_the_chunks_that_hold_so_many() -> None:
    for layers, ranks, size, with_embedding, with_loss in even_cases():
        try:
            chunks = chunks_of_layers(layers, ranks, size, with_embedding, with_loss)
        except ConfigError:
            assert (layers + with_embedding + with_loss) % (ranks * size) != 0
            continue
        stages = split_evenly(layers, ranks, chunks, with_embedding, with_loss)
        assert len(stages[0].layers) + with_embedding + (with_loss if len(stages) == 1 else 0) == size


# First and last pipeline rank


def test_a_split_around_the_ends_exists_exactly_where_the_rest_divides() -> None:
    ends = (None, 1, 2, 3, 4, 6)
    for layers, ranks, chunks, first, last in itertools.product(range(1, 17), range(2, 6), (1, 2, 3), ends, ends):
        given = [end for end in (first, last) if end is not None]
        others, rest = ranks - len(given), layers - sum(given)
        middle = rest // others if others else 0
        by_rank = [middle] * ranks
        by_rank[0] = first or middle
        by_rank[-1] = last or middle
        fits = sum(by_rank) == layers and min(by_rank) > 0 and not any(count % chunks for count in by_rank)
        if not fits:
            with pytest.raises(ConfigError):
                split_around_ends(layers, ranks, chunks, first, last)
            continue
        stages = split_around_ends(layers, ranks, chunks, first, last)
        assert_each_layer_once(stages, layers)
        for rank, count in enumerate(by_rank):
            of_rank = [n for n in range(len(stages)) if pipeline_rank(n, ranks, "loop") == rank]
            assert counts([stages[n] for n in of_rank]) == [count // chunks] * chunks


# Layout strings


@pytest.mark.parametrize(
    ("layout", "ranks", "expected"),
    [
        # Of Megatron-LM's documentation, without the multi-token prediction that a Llama does not have.
        ("Et*3|(tt|)*29|L", 16, [3, *[2] * 29, 0, 0]),
        ("Et*3|(tt|)*29,t|L", 16, [3, *[2] * 29, 1, 0]),
        ("E|(t|)*3,t|t||L", 4, [0, 1, 1, 1, 1, 1, 0, 0]),
        ("Ettt|(tt|)*2L", 2, [3, 2, 2, 0]),
        # Of the examples in its parser: groups before, after and between, with stages inside.
        ("Et(tt|t|tt)*2,tL", 1, [3, 1, 4, 1, 3]),
        ("E(t)*3L", 1, [3]),
        ("Et,(tt|)*2tL", 3, [3, 2, 1]),
        ("E(|tt)*2,tL", 3, [0, 2, 3]),
        ("Et|*3tL", 4, [1, 0, 0, 1]),
        ("E((t*2|)*2t|)*2L", 7, [2, 2, 1, 2, 2, 1, 0]),
        ("E t, t | t *2, L", 2, [2, 2]),
        ("EttttL", 1, [4]),
        ("Ett*0tL", 1, [2]),
    ],
)
def test_a_layout_means_what_megatron_means_by_it(layout: str, ranks: int, expected: list[int]) -> None:
    stages = split_by_layout(layout, sum(expected), ranks)
    assert counts(stages) == expected
    assert_each_layer_once(stages, sum(expected))


def test_every_split_can_be_written_as_a_layout() -> None:
    for layers, ranks, chunks in itertools.product((4, 7, 12), (1, 2, 3), (1, 2)):
        for per_stage in itertools.product(range(4), repeat=ranks * chunks):
            if sum(per_stage) == layers:
                written = "E" + "|".join(f"t*{count}" if count % 2 else "t" * count for count in per_stage) + "L"
                assert counts(split_by_layout(written, layers, ranks)) == list(per_stage)


@pytest.mark.parametrize("shape", get_args(PlacementShape))
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_virtual_stages_lie_where_the_schedules_expect_them(shape: PlacementShape, ranks: int) -> None:
    placement = Placement(ranks, 2, shape)
    for number in range(2 * ranks):
        assert pipeline_rank(number, ranks, shape) == placement.location(number)[0]


IDLE_RANKS: list[tuple[str, int | None, int | None]] = [
    # Of 4 ranks a loop gives rank 1 the virtual stages 1 and 5, and a V gives it 1 and 6.
    ("Et|t|t|t|t|t|t|tL", None, None),
    ("Et||t|t|t||t|tL", 1, None),
    ("Et||t|t|t|t||tL", None, 1),
    ("Et|t|t|||t|t|tL", None, 3),
    ("E|t||t|t|t||L", 2, None),
    ("E||||||tt|L", 1, 2),
    ("E|||t||t||L", 2, 1),
]


@pytest.mark.parametrize(("layout", "in_a_loop", "in_a_v"), IDLE_RANKS)
def test_a_layout_must_give_every_rank_something_to_hold(
    layout: str, in_a_loop: int | None, in_a_v: int | None
) -> None:
    stages = split_by_layout(layout, layout.count("t"), 4)
    idle: dict[PlacementShape, int | None] = {"loop": in_a_loop, "v": in_a_v}
    for shape, rank in idle.items():
        if rank is None:
            check_that_no_rank_idles(layout, stages, 4, shape)
            continue
        with pytest.raises(ConfigError, match=f"pipeline rank {rank} has no layers"):
            check_that_no_rank_idles(layout, stages, 4, shape)


# The flags


def test_one_rank_holds_everything_whatever_the_schedule() -> None:
    for name in get_args(ScheduleName):
        flags = PipelineConfig(pipeline_schedule=name)
        assert flags.virtual_stages(4, 1) == (VirtualStage(range(4), has_embedding=True, has_output_layer=True),)
        assert (flags.num_chunks(4, 1), flags.schedule(4, 1)) == (1, "1f1b")


@pytest.mark.parametrize(
    ("flags", "schedule", "expected"),
    [
        (PipelineConfig(), "1f1b", [4, 4]),
        (PipelineConfig("gpipe"), "gpipe", [4, 4]),
        (PipelineConfig("zb-v"), "zb-v", [2, 2, 2, 2]),
        (PipelineConfig("dualpipe-v", num_layers_per_virtual_pipeline_stage=2), "dualpipe-v", [2, 2, 2, 2]),
        (PipelineConfig(num_virtual_stages_per_pipeline_rank=1), "1f1b", [4, 4]),
        (PipelineConfig(num_virtual_stages_per_pipeline_rank=4), "interleaved", [1] * 8),
        (PipelineConfig(num_layers_per_virtual_pipeline_stage=1), "interleaved", [1] * 8),
        (PipelineConfig(num_layers_per_virtual_pipeline_stage=4), "1f1b", [4, 4]),
        (PipelineConfig(decoder_first_pipeline_num_layers=3), "1f1b", [3, 5]),
        (PipelineConfig(decoder_last_pipeline_num_layers=3), "1f1b", [5, 3]),
        (
            PipelineConfig(decoder_last_pipeline_num_layers=2, num_virtual_stages_per_pipeline_rank=2),
            "interleaved",
            [3, 1, 3, 1],
        ),
        (PipelineConfig(pipeline_model_parallel_layout="Ettt|tt|ttt|L"), "interleaved", [3, 2, 3, 0]),
        (PipelineConfig("zb-v", pipeline_model_parallel_layout="Ettt|tt|ttt|L"), "zb-v", [3, 2, 3, 0]),
        (PipelineConfig(pipeline_model_parallel_layout="Ettttttt|tL"), "1f1b", [7, 1]),
    ],
    ids=repr,
)
def test_the_flags_choose_the_schedule_and_the_split(
    flags: PipelineConfig, schedule: ScheduleName, expected: list[int]
) -> None:
    flags.check()
    flags.check_stages(num_layers=8, num_stages=2)
    stages = flags.virtual_stages(8, 2)
    assert counts(stages) == expected
    assert_each_layer_once(stages, 8)
    assert (flags.schedule(8, 2), flags.num_chunks(8, 2)) == (schedule, len(expected) // 2)


def test_each_account_flag_lightens_its_own_end() -> None:
    embedding = PipelineConfig(account_for_embedding_in_pipeline_split=True, num_layers_per_virtual_pipeline_stage=2)
    loss = PipelineConfig(account_for_loss_in_pipeline_split=True, num_layers_per_virtual_pipeline_stage=2)
    assert counts(embedding.virtual_stages(15, 4)) == [1, *[2] * 7]
    assert counts(loss.virtual_stages(15, 4)) == [*[2] * 7, 1]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_a_nearly_even_split_has_every_layer_once_and_differs_by_at_most_one(num_stages: int) -> None:
    for num_layers in range(num_stages, 30):
        stages = split_nearly_evenly(num_layers, num_stages)
        assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
        lengths = [len(stage.layers) for stage in stages]
        assert len(lengths) == num_stages and max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


# --- activations ----------------------------------------------------------------------------------------------


def full(method: RecomputeMethod, layers: int, host: int = 0) -> ActivationConfig:
    recompute = ActivationConfig("full", recompute_method=method, recompute_num_layers=layers)
    return replace(recompute, cpu_offloading_num_layers=host)


def spelled(units: tuple[LayerUnit, ...]) -> str:
    """Layers in brackets where they are recomputed, H behind what is on the host: ``[0,1]H 2``."""
    words = []
    for unit in units:
        layers = ",".join(map(str, unit.layers))
        words.append((f"[{layers}]" if unit.is_recomputed else layers) + ("H" if unit.is_offloaded else ""))
    return " ".join(words)


@pytest.mark.parametrize(
    ("activations", "num_layers", "expected"),
    [
        (ActivationConfig(), 3, "0 1 2"),
        (ActivationConfig(recompute_activations=True), 2, "0 1"),
        (ActivationConfig(cpu_offloading_num_layers=2), 3, "0H 1H 2"),
        (full("uniform", 3), 5, "[0,1,2] [3,4]"),
        (full("uniform", 2, host=3), 4, "[0,1]H [2,3]H"),
        (full("block", 1, host=2), 3, "[0]H 1H 2"),
    ],
)
def test_units_of_a_chunk(activations: ActivationConfig, num_layers: int, expected: str) -> None:
    assert spelled(activations.units(num_layers)) == expected


@given(
    method=st.sampled_from(["uniform", "block"]),
    size=st.integers(1, 9),
    host=st.integers(0, 9),
    num_layers=st.integers(0, 20),
)
def test_every_layer_is_in_one_unit(method: RecomputeMethod, size: int, host: int, num_layers: int) -> None:
    units = full(method, size, host).units(num_layers)
    assert [layer for unit in units for layer in unit.layers] == list(range(num_layers))
    recomputed = sum(len(unit.layers) for unit in units if unit.is_recomputed)
    assert recomputed == (num_layers if method == "uniform" else min(size, num_layers))
    assert sum(unit.is_offloaded for unit in units) == len([unit for unit in units if unit.layers.start < host])


def test_selective_means_core_attention_unless_told_otherwise() -> None:
    def modules(arguments: str) -> frozenset[str]:
        return parse_command_line(arguments.split()).activations.modules

    assert modules("") == frozenset()
    assert modules("--recompute-activations") == {"core_attn"}
    assert modules("--recompute-granularity selective") == {"core_attn"}
    assert modules("--recompute-activations --recompute-modules layernorm mlp") == {"layernorm", "mlp"}
    assert modules("--recompute-granularity full --recompute-method block --recompute-num-layers 1") == frozenset()
