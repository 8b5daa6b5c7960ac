"""The search of layouts: pruning, ranking, dry runs, cost, and the correction by a measured run."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatron.config.command_line import CommandLine, parse_command_line
from megatron.errors import ConfigError, DataError, UserError
from megatron.planner.plan import parallel_map
from megatron.planner.rehearsal.records import UnitRecords
from megatron.planner.search import accuracy, search
from megatron.planner.search.accuracy import Level, measured_level
from megatron.planner.search.enumeration import enumerate_layouts, require_layout
from megatron.planner.search.layout import Job, Layout, Operation
from megatron.planner.search.result import TIE, PlannedLayout, command, first_of_families, num_dimensions, rank
from megatron.planner.search.search import find_layouts, price_layouts, unit_records
from megatron.planner.search.stage_memory import StageMemory
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.prices import load_fitted
from megatron.planner.step_time.published import NEMO
from megatron.planner.step_time.workload import Run, Workload, read_cluster
from tests.tools import sample_search

LLAMA_70B = ("--model", "llama3.1-70b", "--seq-length", "8192", "--global-batch-size", "128", "--bf16")
TINY = ("--model", "tiny", "--vocab-size", "1024", "--seq-length", "256", "--global-batch-size", "16", "--bf16")
GIB = 2**30
LAYOUT = Layout(
    tp=4, pp=4, cp=2, dp=2, vp=5, schedule="interleaved", sharding="optim", micro_batch_size=1, recompute="none"
)


def job(arguments: Sequence[str] = LLAMA_70B, num_gpus: int = 64, cluster: str = "h100", **operation: Any) -> Job:
    return Job.of(CommandLine.of(arguments), read_cluster(cluster), num_gpus, Operation(**operation))


@cache
def records(arguments: Sequence[str], num_gpus: int) -> UnitRecords:
    return unit_records(job(arguments, num_gpus))  # each unit is rehearsed once for all tests


def planned(layout: Layout, seconds: float, memory: float = 40.0) -> PlannedLayout:
    """A priced layout that takes so many seconds and GiB."""
    return replace(sample_search.planned(0, layout), step_time_s=seconds, memory_bytes=int(memory * GIB), is_tie=False)


# Ranking.


def test_layouts_within_two_percent_are_ties_and_the_rest_follow_by_time() -> None:
    seconds = [1.3, 1.021, 1.0, 1.019, 1.5, 1.2]
    ranked = rank([planned(LAYOUT, one) for one in seconds], 80 * GIB)
    assert {one.step_time_s for one in ranked if one.is_tie} == {1.0, 1.019}
    assert [one.step_time_s for one in ranked if not one.is_tie] == [1.021, 1.2, 1.3, 1.5]
    assert [one.is_tie for one in ranked] == [True, True, False, False, False, False]


def test_ties_are_listed_from_the_simplest_on() -> None:
    """Few dimensions, then few chunks, then free memory."""
    tight = planned(replace(LAYOUT, vp=1, schedule="1f1b"), 1.0, 78.0)
    many_chunks = planned(replace(LAYOUT, vp=2 * LAYOUT.vp), 1.0, 20.0)
    chunks = planned(LAYOUT, 1.01, 30.0)
    simple = planned(replace(LAYOUT, vp=1, schedule="1f1b"), 1.015, 30.5)
    expected = (simple, tight, chunks, many_chunks)
    assert rank([tight, many_chunks, chunks, simple], 80 * GIB) == tuple(replace(one, is_tie=True) for one in expected)


def test_a_change_of_numerics_ranks_behind_layouts_without_one() -> None:
    narrow = [planned(replace(LAYOUT, reduces_in_bf16=True), seconds) for seconds in (0.9, 0.8)]
    exact = [planned(LAYOUT, seconds) for seconds in (1.4, 1.0)]
    assert [one.step_time_s for one in rank([*narrow, *exact], 80 * GIB)] == [1.0, 1.4, 0.8, 0.9]
    assert [one.is_tie for one in rank([*narrow, *exact], 80 * GIB)] == [True, False, False, False]
    assert [one.is_tie for one in rank(narrow, 80 * GIB)] == [True, False]  # there is nothing else


def test_dimensions_are_counted_from_sharded_data_parallelism_on() -> None:
    simplest = replace(LAYOUT, tp=1, pp=1, cp=1, dp=64, vp=1, schedule="1f1b")
    assert num_dimensions(simplest) == 0
    changes: list[dict[str, Any]] = [{"tp": 2}, {"recompute": "full"}, {"sharding": "optim_grads_params"}]
    changes += [{"schedule": "zb-h1"}, {"reduces_in_bf16": True}, {"replicas": 2}, {"counts_ends": True}]
    assert [num_dimensions(replace(simplest, **change)) for change in changes] == [1] * len(changes)


def test_the_recipe_of_nemo_is_a_tie_for_first_with_its_software() -> None:
    """Llama 3 70B on 64 H100 as NVIDIA publishes it, without recompute: TP4 PP4 VP5 CP2."""
    found = job()
    model, memory = found.architecture, StageMemory(found.config, records(LLAMA_70B, 64), found.given)
    layouts = [
        layout
        for layout in enumerate_layouts(found.config, model, 64, found.cluster, found.given)
        if layout.recompute == "none" and layout.sharding == "optim" and layout.schedule in ("1f1b", "interleaved")
        if not layout.reduces_in_bf16 and not layout.counts_ends
        if max(memory.by_stage(layout, found.num_microbatches(layout))) <= 80 * GIB
    ]
    steps = [
        Run(
            layers=model.num_layers, hidden=model.hidden_size, heads=model.num_attention_heads,
            kv_heads=model.num_query_groups, ffn=model.ffn_hidden_size, is_gated=True, vocab=model.padded_vocab_size,
            seq_length=found.seq_length, gpus=64, tp=layout.tp, pp=layout.pp, vp=layout.vp, cp=layout.cp, dp=layout.dp,
            micro_batch_size=layout.micro_batch_size, global_batch_size=128, sequence_parallel=layout.tp > 1,
            software=NEMO, cluster=found.cluster,
        )
        for layout in layouts
    ]  # fmt: skip
    seconds = StepTimeModel(Workload(steps)).price(load_fitted()).total
    ties = {layout.name for layout, one in zip(layouts, seconds) if one <= TIE * seconds.min()}
    assert "TP4 PP4 VP5 CP2 DP2" in ties and len(layouts) > 50 and len(ties) <= 10


# Limits.


def test_a_layout_is_limited_by_its_largest_term_besides_products() -> None:
    terms = {"products": 6.0, "attention": 0.5, "tensor parallelism": 1.0, "output layer": 2.0, "bubble": 0.5}
    alone = replace(LAYOUT, pp=1, vp=1)
    assert search.describe_limit(terms, LAYOUT, job())[0].startswith("output layer")  # for which the other stages wait
    limits, advice = search.describe_limit(terms, alone, job((*LLAMA_70B, "--no-tp-comm-overlap")))
    assert limits == "tensor parallelism: 10% of the step"
    assert advice.startswith("--tp-comm-overlap")
    assert "--tp-comm-overlap" not in search.describe_limit(terms, alone, job())[1]


# Cost.


def test_cost_follows_from_the_step_time_and_the_failures() -> None:
    """Against a slow search of the save interval and the formulas written out."""
    of_run = job(tokens=2e12, price_per_gpu_hour=3.0, save_s=7.0, restart_s=200.0)
    of_run = replace(of_run, cluster=replace(of_run.cluster, gpu_hours_per_failure=30_000.0))
    point = search.scale_point(of_run, LAYOUT, 11.0)
    between_failures = 30_000 / 64 * 3600

    def kept(interval: float) -> float:
        lost = between_failures * math.exp(200 / between_failures)
        return interval / (lost * (math.exp((interval + 7) / between_failures) - 1))

    best = max(range(100, 30_000, 5), key=kept)
    assert point.save_interval_s == pytest.approx(best, rel=0.01)
    assert point.goodput == pytest.approx(kept(best), rel=1e-6)
    assert 0.9 < point.goodput < 1
    seconds = 2e12 / (128 * 8192) * 11 / point.goodput
    assert point.days == pytest.approx(seconds / 86_400)
    assert point.gpu_hours == pytest.approx(seconds * 64 / 3600)
    assert point.price == pytest.approx(point.gpu_hours * 3)
    assert point.tokens_per_s_per_gpu == pytest.approx(128 * 8192 / 11 / 64)


# Search.


def test_a_search_prunes_by_memory_and_keeps_the_constraints() -> None:
    arguments = ("--model", "llama3.2-1b", "--seq-length", "8192", "--global-batch-size", "16", "--bf16")
    of_run = job((*arguments, "--tensor-model-parallel-size", "2", "--micro-batch-size", "1"), num_gpus=4)
    found = find_layouts(of_run, Level())
    assert found.num_enumerated > 50
    assert {one.layout.tp for one in found.planned} == {2}
    most = max(one.memory_bytes for one in found.planned)
    limited = replace(of_run.config.dry_run, gpu_memory_gb=(most - 1) / GIB)
    smaller = find_layouts(replace(of_run, config=replace(of_run.config, dry_run=limited)), Level()).planned
    assert len(smaller) < len(found.planned)
    assert max(one.memory_bytes for one in smaller) * 1.02 <= most
    # Layers of Transformer Engine cannot be built without a GPU; local layers stand for them.
    assert find_layouts(job((*TINY, "--transformer-impl", "transformer_engine"), num_gpus=2), Level()).planned


def test_units_that_are_rehearsed_in_other_processes_have_the_same_records() -> None:
    of_run = job(TINY, num_gpus=4)
    layouts = enumerate_layouts(of_run.config, of_run.architecture, 4, of_run.cluster, of_run.given)[::16]
    alone = price_layouts(of_run, layouts, records(TINY, 4))
    with parallel_map() as map_in_parallel:
        found = price_layouts(of_run, layouts, unit_records(of_run), map_in_parallel)
    assert found.layouts == alone.layouts
    assert (found.seconds == alone.seconds).all()


def test_70b_on_64_gpus_has_thousands_of_priced_layouts() -> None:
    of_run = job()
    layouts = enumerate_layouts(of_run.config, of_run.architecture, 64, of_run.cluster, of_run.given)
    assert 1000 <= len(layouts) == len(set(layouts)) <= 10_000
    assert replace(LAYOUT, tp_comm_overlap=True) in layouts
    # All of them have some hundred units; these have the units that the test above has rehearsed.
    some = [layout for layout in layouts if layout.recompute == "none" and layout.sharding == "optim"]
    priced = price_layouts(of_run, some, records(LLAMA_70B, 64))
    assert set(priced.layouts) == set(some)
    assert (priced.seconds[1:] >= priced.seconds[:-1]).all()


def test_what_has_no_measurements_is_said() -> None:
    known, experts = job(), job(("--model", "mixtral-8x7b", *LLAMA_70B[2:]))
    assert search.accuracy_warnings(known, LAYOUT, Level()) == []
    (sentence,) = search.accuracy_warnings(experts, replace(LAYOUT, vp=4), Level())
    assert sentence == "There are no measurements of models with experts: times are +-30%."
    assert search.accuracy_warnings(experts, replace(LAYOUT, vp=4), Level(regimes=frozenset({("experts",)}))) == []
    other = replace(known, cluster=replace(known.cluster, name="h300", bf16_flops=2e15))
    assert search.accuracy_warnings(other, LAYOUT, Level()) == [
        "There are no measurements of the GPU of h300: times are +-30%."
    ]
    largest = accuracy.LARGEST_MEASURED
    large = job((*LLAMA_70B[:5], "2048", "--bf16"), 4 * largest)
    layout = replace(LAYOUT, tp=8, pp=8, vp=5, cp=1, dp=128)
    assert search.accuracy_warnings(large, layout, Level()) == [
        f"There are no measurements of more than {largest:,} GPUs: times are +-30%."
    ]


def test_what_the_times_rest_on_is_said_until_a_run_is_measured() -> None:
    cluster = job().cluster
    (sentence,) = accuracy.basis_warnings(cluster, [64, 256], accuracy.level_of(cluster))
    assert "no run of this code on GPUs has been measured, so times are at best +-20%" in sentence
    assert accuracy.level_of(cluster).error == accuracy.OWN_ERROR
    calibrated = replace(cluster, constants={"network": 0.85})
    assert not accuracy.basis_warnings(calibrated, [64, 256], accuracy.level_of(calibrated))
    assert accuracy.level_of(calibrated).error == accuracy.KNOWN_ERROR
    measured = Level(1.1, accuracy.SAME_MODEL_ERROR, source="The level is corrected by run.jsonl.")
    assert not accuracy.basis_warnings(cluster, [64, 2048], measured)
    (sentence,) = accuracy.basis_warnings(cluster, [4096, 16384], measured)
    assert sentence == "No measured run has more than 2,048 GPUs: the times on 16,384 GPUs are extrapolated."


def test_a_search_that_finds_nothing_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"^--expert-model-parallel-size needs --num-experts"):
        job((*TINY, "--expert-model-parallel-size", "4"), 8)
    with pytest.raises(ConfigError, match=r"No layout on --num-gpus 8 .* flags: remove one that fixes the layout\.$"):
        find_layouts(job((*TINY, "--tensor-model-parallel-size", "3"), 8), Level())
    with pytest.raises(ConfigError, match=r"No layout on --num-gpus 6 .* the layout, or use 4 or 8 GPUs\.$"):
        find_layouts(job((*TINY, "--tensor-model-parallel-size", "4"), 6), Level())
    with pytest.raises(ConfigError, match=r"satisfies the flags: --num-distributed-.*-instances 7 does not divide"):
        require_layout(job((*LLAMA_70B, "--num-distributed-optimizer-instances", "7")))
    with pytest.raises(ConfigError, match=r"^--global-batch-size 128 is not divisible by --micro-batch-size 3"):
        require_layout(job((*LLAMA_70B, "--micro-batch-size", "3")))
    with pytest.raises(ConfigError, match=r"None of \d+ layouts fits 4\.5 GiB, the smallest needs .* --num-gpus 8"):
        find_layouts(job((*LLAMA_70B, "--gpu-memory-gb", "4.5", "--tensor-model-parallel-size", "8"), 8), Level())


@pytest.mark.parametrize(("num_gpus", "below", "above"), [(17, 16, 20), (3, 2, 4), (10_000, 8192, 10_240)])
def test_a_number_of_gpus_without_layouts_is_told_why_and_its_neighbours(num_gpus: int, below: int, above: int) -> None:
    """No flag is to blame."""
    with pytest.raises(ConfigError) as refused:
        find_layouts(job(num_gpus=num_gpus), Level())
    assert str(refused.value) == (
        f"--num-gpus {num_gpus} has no layout: the tensor-parallel size must divide the 64 attention heads, the "
        "pipeline size the 80 layers, and the data-parallel size --global-batch-size 128: "
        f"use {below:,} or {above:,} GPUs."
    )
    for count in (below, above):
        require_layout(job(num_gpus=count))
    for count in {below + 1, above - 1}:
        with pytest.raises(ConfigError, match="has no layout"):
            require_layout(job(num_gpus=count))


@pytest.mark.parametrize(("num_gpus", "idle"), [(4, None), (8, None), (64, None), (12, 4), (65, 7)])
def test_gpus_that_do_not_fill_a_node_are_remarked(num_gpus: int, idle: int | None) -> None:
    found = search.node_warnings(job(num_gpus=num_gpus))
    assert [f"{num_gpus} GPUs leave {idle} of the 8 GPUs of the last node idle" in one for one in found] == (
        [] if idle is None else [True]
    )


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (TINY[:4] + TINY[6:], "--seq-length"),
        (TINY[:6] + TINY[8:], "--global-batch-size"),
        (TINY[:2] + TINY[4:], "--vocab-size"),
        ((*TINY, "--hidden-sise", "9"), "--hidden-size"),
    ],
)
def test_a_job_names_the_flag_that_it_needs(arguments: tuple[str, ...], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        job(arguments, 8)


def test_terms_add_up_and_the_level_scales_them() -> None:
    of_run = job(TINY, num_gpus=4)
    plain, scaled = (find_layouts(of_run, level, records(TINY, 4)).planned for level in (Level(), Level(2.0, 0.05)))
    assert len(plain) == len(scaled)
    for one, other in zip(plain, scaled):
        assert sum(one.terms.values()) == pytest.approx(one.step_time_s)
        assert other.step_time_s == pytest.approx(2 * one.step_time_s)
        tokens_per_s = one.tokens_per_s_per_gpu * 4
        assert tokens_per_s == pytest.approx(16 * 256 / one.step_time_s)
        assert one.mfu == pytest.approx(tokens_per_s / 4 * of_run.architecture.flops_per_token(256) / 9.89e14)
    for found, usual in ((plain, accuracy.OWN_ERROR), (scaled, 0.05)):
        errors = {round(one.interval_s[1] / one.step_time_s - 1, 6) for one in found}
        assert errors <= {usual, accuracy.UNKNOWN_ERROR}


def test_the_pasted_command_gives_the_layout() -> None:
    of_run = job((*TINY, "--use-distributed-optimizer", "--recompute-granularity=selective"), num_gpus=4)
    for one in find_layouts(of_run, Level()).planned[:20]:
        words = command(of_run, one)
        assert words[0] == "pretrain_llama.py"
        pasted = parse_command_line(words[1:])
        wanted = one.layout.apply(of_run.config, of_run.given)
        for group in ("parallel", "pipeline", "activations"):
            found, asked = getattr(pasted, group), getattr(wanted, group)
            differing = {name for name, value in vars(asked).items() if getattr(found, name) != value}
            assert differing <= {"use_distributed_optimizer"}  # the same as the strategy optim
        assert pasted.training.micro_batch_size == one.layout.micro_batch_size


def test_a_layout_that_does_not_fit_in_its_dry_run_is_left_out() -> None:
    """Memory of a dry run as if the records had missed something in some of the best layouts."""
    of_run = job(TINY, num_gpus=4)
    ranked = find_layouts(of_run, Level(), records(TINY, 4)).planned
    limit = of_run.config.dry_run.gpu_memory
    first, second = (one.layout for one in islice(first_of_families(ranked), 2))
    simulated: list[Layout] = []

    def simulate(_: Job, layout: Layout) -> search.Memory:
        simulated.append(layout)
        return {"weights": 1}, {"weights": limit, "allowance": int(layout in too_large)}

    too_large = {first, second}
    found = search.simulate_best(of_run, ranked, 3, records(TINY, 4), simulate=simulate, in_parallel=False)
    assert [one.layout for one in found] == [one.layout for one in ranked if one.layout not in too_large]
    assert too_large < set(simulated) and len(simulated) == len(set(simulated)) >= 5
    kept = [one for one in found if one.is_simulated]
    assert len(kept) == 3 and {(one.memory_bytes, one.tightest_stage) for one in kept} == {(limit, 1)}
    too_large = {one.layout for one in ranked}
    simulated.clear()
    found = search.simulate_best(of_run, ranked, 1, records(TINY, 4), simulate=simulate, in_parallel=False)
    assert len(simulated) == 4  # then it stops
    assert len(found) == len(ranked) - 4 and not any(one.is_simulated for one in found)


# A measured run.


def log(path: Path, of_run: Job, layout: Layout, seconds: float) -> Path:
    """A metrics file of a run: an earlier process, then the run, whose first records are slow."""
    flags = asdict(layout.apply(of_run.config, of_run.given))
    run = {"world_size": of_run.num_gpus, "flags": flags}
    common = {"lm_loss": 3.0, "global_batch_size": of_run.global_batch_size}
    times = [9e6, 9e5, *(1e3 * seconds * factor for factor in (0.5, 1.0, 1.0, 1.0, 7.0))]
    rows: list[dict[str, Any]] = [{"iteration": 1, "run": {**run, "world_size": 1}, "iteration_time_ms": 1, **common}]
    rows += [{"iteration": number, "iteration_time_ms": one, **common} for number, one in enumerate(times, 1)]
    rows[1]["run"] = run
    path.write_text("".join(json.dumps(record) + "\n" for record in rows) + '{"iteration": 8, "ite')
    return path


def test_a_measured_run_corrects_the_level(tmp_path: Path) -> None:
    of_run = job(TINY, num_gpus=4)
    plain = find_layouts(of_run, Level(), records(TINY, 4)).planned
    one = plain[len(plain) // 2]
    level = measured_level(log(tmp_path / "run.jsonl", of_run, one.layout, 1.7 * one.step_time_s), of_run)
    assert level.factor == pytest.approx(1.7)
    usual, unknown = accuracy.OWN_ERROR, accuracy.UNKNOWN_ERROR
    assert level.error == accuracy.SAME_MODEL_ERROR < accuracy.CORRECTED_ERROR < accuracy.KNOWN_ERROR < usual < unknown
    longer = job((*TINY[:5], "512", *TINY[6:]), num_gpus=4)
    assert measured_level(tmp_path / "run.jsonl", longer).error == accuracy.CORRECTED_ERROR
    corrected = find_layouts(of_run, level, records(TINY, 4)).planned
    same = next(found for found in corrected if found.layout == one.layout)
    assert same.step_time_s == pytest.approx(1.7 * one.step_time_s)
    low, high = same.interval_s
    assert (low / same.step_time_s, high / same.step_time_s) == pytest.approx((1 - level.error, 1 + level.error))
    # Flags survive the metrics file.
    of_run = job((*LLAMA_70B, "--recompute-modules", "layernorm", "mlp_act", "--recompute-granularity", "selective"))
    assert accuracy.config_of(json.loads(json.dumps(asdict(of_run.config)))) == of_run.config


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"iteration": 1, "lm_loss": 3.0, "iteration_time_ms": 5.0}\n', "does not state the layout of its run"),
        ('{"iteration": 1, "lm_loss": 3.0, "run": {"flags": {}}}\n', "does not state the layout of its run"),
        ('{"iteration": 1, "lm_loss": 3.0, "run": {"flags": {}, "world_size": 4}}\n', "has no iteration_time_ms"),
        ("\0\0 no JSON [[[\n", "has no losses: name the file"),
    ],
)
def test_a_log_that_says_too_little_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=f"--measured .*run.jsonl {sentence}"):
        measured_level(path, job(TINY, 4))
    with pytest.raises(DataError, match=r"--measured .* cannot be read"):
        measured_level(tmp_path / "missing.jsonl", job(TINY, 4))
