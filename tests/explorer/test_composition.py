"""The page's composition, schedules and checks in Node against the search, the schedules and the checks of a run."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron.config.checks import check_run
from megatron.config.parallel import ContextParallelType
from megatron.errors import ConfigError
from megatron.explorer.options import options_of
from megatron.explorer.records import Choices
from megatron.planner.rehearsal.price import StepPrices
from megatron.planner.rehearsal.records import UnitRecords
from megatron.planner.search.enumeration import enumerate_layouts, modules_in
from megatron.planner.search.layout import Job, Layout
from megatron.planner.search.search import step_of, unit_records
from megatron.planner.search.stage_memory import StageMemory
from megatron.planner.step_time.workload import read_cluster
from megatron.schedules.catalog import SCHEDULES, build_schedule
from megatron.training.batch_schedule import build_batches
from tests.explorer.explorer_cases import CASES, CLUSTERS, FEW, Case, data_of, run

Options = dict[str, Any]
MORE = [
    Case("llama3.1-8b", 8192, "bf16", 64, 300, Choices((1, 2, 4, 8), (1, 2, 4), (1,), (1, 2))),
    Case("llama3.1-405b", 8192, "fp8", 1024, 200, Choices((4, 8), (1, 2), (1,), (1,), ("none", "mlp_act", "full"))),
    Case("qwen3-30b-a3b", 4096, "bf16", 128, 300, Choices((1, 2), (1, 2), (1, 4, 8), (1, 2), ("none", "mlp_act"))),
    Case("llama3.2-1b", 8192, "fp8", 16, 100, FEW),
]


def some_layouts(job: Job, choices: Choices, count: int, rng: random.Random) -> Iterator[Layout]:
    """Layouts of the search, and variants that it leaves out: other schedules, no sequence parallelism or overlap."""
    has_experts = job.architecture.num_experts is not None
    recompute = {modules_in(job.architecture, one) for one in choices.recompute}
    found = [
        layout
        for layout in enumerate_layouts(job.config, job.architecture, job.num_gpus, job.cluster, job.given)
        if layout.tp in choices.tensor_parallel
        and layout.cp in choices.context_parallel
        and layout.ep in choices.expert_parallel
        and layout.micro_batch_size in choices.micro_batch_sizes
        and layout.recompute in recompute
        and not (layout.reduces_in_bf16 and job.precision == "fp8")
    ]
    others = {"1f1b": "gpipe", "zb-v": "dualpipe-v"}
    for layout in rng.sample(found, min(count, len(found))):
        if layout.pp > 1 and rng.random() < 0.3:
            layout = replace(layout, schedule=others.get(layout.schedule, layout.schedule))
        if rng.random() < 0.3:
            layout = replace(layout, tp_comm_overlap=False, sequence_parallel=has_experts or rng.random() < 0.5)
        if rng.random() < 0.2 and layout.pp == 1 and layout.dp % 2 == 0 and not has_experts:
            layout = replace(layout, replicas=2, sharding="optim_grads_params")
        if layout.ep > 1 and rng.random() < 0.5:
            ep, etp = rng.choice(choices.expert_parallel), rng.choice((1, layout.tp))
            if layout.tp * layout.cp * layout.dp % (ep * etp * layout.replicas) == 0:
                layout = replace(layout, ep=ep, etp=etp)
        yield layout


def with_exchange(job: Job, exchange: ContextParallelType) -> Job:
    parallel = replace(job.config.parallel, cp_comm_type=(exchange,))
    return replace(job, config=replace(job.config, parallel=parallel))


def possible_exchanges(job: Job, layout: Layout, choices: Choices) -> Sequence[ContextParallelType]:
    heads = job.architecture.num_query_groups // layout.tp
    return [one for one in choices.cp_comm_types if one != "a2a" or heads % layout.cp == 0]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)], ids=str)
def test_layouts_have_the_bytes_and_the_seconds_of_the_search(case: Case) -> None:
    rng, job = random.Random(case.gpus), case.job()
    of_exchange: dict[str, UnitRecords] = {}
    wanted: list[dict[str, Any]] = []
    options = []
    for layout in some_layouts(job, case.choices, case.num_layouts, rng):
        cluster, overlaps = rng.choice(CLUSTERS), rng.random() < 0.8
        exchange = rng.choice(possible_exchanges(job, layout, case.choices))
        without = set() if overlaps else {"overlap_grad_reduce", "overlap_param_gather"}
        of_layout = with_exchange(replace(job, given=job.given | without), exchange)
        records = of_exchange.setdefault(exchange, unit_records(of_layout))
        step = step_of(of_layout, layout, records)
        price = StepPrices(read_cluster(cluster), replace(job, cluster=read_cluster(cluster)).constants).price([step])
        memory = StageMemory(of_layout.config, records, of_layout.given)
        wanted.append(
            {
                "stages": memory.by_stage(layout, job.num_microbatches(layout), step.units),
                "seconds": float(price.total[0]),
                "parts": {name: float(seconds[0]) for name, seconds in price.terms.items()},
            }
        )
        overlap = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), overlaps)
        given = options_of(replace(of_layout, cluster=read_cluster(cluster)), layout)
        options.append({**given, **overlap})
    assert len(wanted) >= min(40, case.num_layouts)
    found = run(
        data_of(case),
        """(data, options) => {
          const problem = refusal(data, options);
          if (problem) return {problem};
          const {memory_by_stage: stages, step_time_s: seconds, parts} = compose(data, options);
          return {stages: stages.map((kinds) => sum(Object.values(kinds))), seconds, parts};
        }""",
        options,
    )
    for given, one, other in zip(options, found, wanted, strict=True):
        assert one.get("stages") == other["stages"], (given, one.get("problem"))
        assert one["seconds"] == pytest.approx(other["seconds"], rel=1e-9), given
        assert one["parts"] == pytest.approx(other["parts"], rel=1e-9, abs=1e-9 * other["seconds"]), given


def shapes() -> Iterator[tuple[str, int, int, int]]:
    for name, spec in SCHEDULES.items():
        for stages in (1, 2, 3, 4, 8):
            for microbatches in (1, 2, 3, 5, 8, 12, 17):
                for chunks in filter(spec.allows, (1, 2, 3)):
                    yield name, stages, microbatches, chunks


def test_schedules_have_the_same_actions() -> None:
    inputs = list(shapes())
    found = run(
        None,
        """(data, [name, stages, microbatches, chunks]) => range(stages).map((stage) =>
          SCHEDULES[name].actions(stage, {stages, microbatches, chunks, groupSize: stages}))""",
        inputs,
    )
    for shape, stages in zip(inputs, found, strict=True):
        wanted = build_schedule(*shape).actions
        names = [["FBW"[kind] + f"{microbatch}.{chunk}" for kind, microbatch, chunk in actions] for actions in stages]
        assert names == [list(map(str, actions)) for actions in wanted], shape


REFUSED: list[tuple[str, dict[str, Any], int | None]] = [
    ("llama3.2-1b", {"tp": 16, "dp": 1}, None),
    ("llama3.2-1b", {"tp": 3}, None),
    ("llama3.2-1b", {"tp": 8}, 12),
    ("llama3.2-1b", {"pp": 5}, None),
    ("llama3.2-1b", {"pp": 32, "dp": 1}, None),
    ("llama3.2-1b", {"pp": 17, "dp": 1}, None),
    ("llama3.2-1b", {"pp": 3, "vp": 2, "schedule": "interleaved"}, None),
    ("llama3.2-1b", {"pp": 4, "vp": 1, "schedule": "interleaved"}, None),
    ("llama3.2-1b", {"pp": 4, "vp": 2, "schedule": "zb-h1"}, None),
    ("llama3.2-1b", {"pp": 4, "vp": 2, "schedule": "zb-v", "counts_ends": True}, None),
    ("llama3.2-1b", {"cp": 3}, None),
    ("llama3.2-1b", {"tp": 2, "tp_comm_overlap": True, "sequence_parallel": False}, None),
    ("llama3.2-1b", {"replicas": 3}, None),
    ("llama3.2-1b", {"replicas": 2, "sharding": "no_shard"}, None),
    ("llama3.2-1b", {"recompute": "full", "recompute_layers": 40}, None),
    ("llama3.2-1b", {"dp": 7}, None),
    ("llama3.2-1b", {"micro_batch_size": 3}, None),
    ("mixtral-8x7b", {"tp": 2, "sequence_parallel": False}, None),
    ("mixtral-8x7b", {"ep": 3, "dp": 12}, None),
    ("mixtral-8x7b", {"ep": 8, "dp": 4}, None),
    ("mixtral-8x7b", {"ep": 8, "etp": 2}, None),
    ("mixtral-8x7b", {"ep": 4, "replicas": 4, "sharding": "optim_grads_params"}, None),
]


def sentence(job: Job, layout: Layout, gpus: int) -> str:
    config = layout.apply(job.config, job.given)
    with pytest.raises(ConfigError) as refused:
        check_run(config, gpus)
        build_batches(config, config.parallel.data_parallel_size(gpus))
    return str(refused.value.sentences[0])


def test_another_number_of_layers_is_that_of_a_run_with_so_many() -> None:
    """The records are of single layers."""
    case = CASES[0]
    job = case.job()
    fewer = replace(job, config=replace(job.config, model=replace(job.config.model, num_layers=6)))
    layout = Layout(2, 3, 1, 2, 1, "1f1b", "optim", 1, "full", recompute_layers=1, tp_comm_overlap=True)
    fewer = fewer.with_gpus(layout.num_gpus)
    step = step_of(fewer, layout, unit_records(fewer))
    stages = StageMemory(fewer.config, unit_records(fewer)).by_stage(layout, fewer.num_microbatches(layout), step.units)
    seconds = float(StepPrices(fewer.cluster, fewer.constants).price([step]).total[0])
    program = """(data, options) => {
      const {needed_bytes: bytes, step_time_s: seconds, mfu} = compose(data, options);
      return {problem: refusal(data, options), bytes, seconds, mfu};
    }"""
    (found,) = run(data_of(case), program, [{**options_of(fewer, layout), "num_layers": 6}])
    rate = fewer.tokens_per_step / seconds / layout.num_gpus * fewer.architecture.flops_per_token(fewer.seq_length)
    assert found["problem"] is None and found["bytes"] == max(stages)
    assert (found["seconds"], found["mfu"]) == pytest.approx((seconds, rate / fewer.peak_flops), rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_impossible_has_the_sentence_of_the_checks_and_something_possible_is_near(case: Case) -> None:
    job = case.job()
    base = Layout(1, 1, 1, 8, 1, "1f1b", "optim", 1, "none")
    wanted, options = [], []
    for model, changes, gpus in REFUSED:
        if model == case.model:
            layout = replace(base, **changes)
            wanted.append(sentence(job, layout, gpus or layout.num_gpus))
            options.append({**options_of(job, layout), "num_gpus": gpus or layout.num_gpus})
    if job.architecture.num_experts is None:
        exchanging, layout = with_exchange(job, "a2a"), replace(base, tp=8, cp=2, dp=1)
        wanted.append(sentence(exchanging, layout, layout.num_gpus))
        options.append(options_of(exchanging, layout))
    found = run(
        data_of(case),
        """(data, options) => {
          const near = nearest(data, options);
          return [refusal(data, options), near && refusal(data, near)];
        }""",
        options,
    )
    assert [problem for problem, _ in found] == wanted
    assert all(of_nearest is None for _, of_nearest in found)


def test_unknown_options_are_named() -> None:
    data = data_of(CASES[0])
    usual = {"model": "llama3.2-1b", "num_gpus": 8, "seq_length": 8192, "global_batch_size": 64}
    wrong: Sequence[tuple[Options, str]] = (
        ({"tensor_parallel": 2}, "tensor_parallel is not an option of this page: use one of account_for"),
        ({"model": "llama9"}, "model llama9 is not on this page: use one of llama3.2-1b."),
        ({"cluster": "h900"}, "cluster h900 is not on this page: use one of h100, h200, b200."),
        ({"num_gpus": 0}, "--num-gpus 0 must be an integer of at least 1."),
        ({"seq_length": 4096}, "This page has no records of llama3.2-1b in bf16 with --seq-length 4096: use 8192."),
        (
            {"micro_batch_size": 2},
            "The layers of this layout were not rehearsed for this page: TP 1, CP 1, microbatches",
        ),
    )
    found = run(data, "refusal", [{**usual, **changes} for changes, _ in wrong])
    for problem, (_, expected) in zip(found, wrong, strict=True):
        assert problem.startswith(expected)
    assert run(data, "refusal", [usual]) == [None]
