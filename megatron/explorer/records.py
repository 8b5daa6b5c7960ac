"""What the explorer's page carries of a model: the records of the units of all its layouts, as JSON.

The page composes them as the search does (``composition.js``), so it has no account of a layer of its own. What records
have in common (parameters, the launches of a pass) is written once, and records refer to it by number.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch

from megatron.config.checks import check_run
from megatron.config.parallel import ContextParallelType
from megatron.core.parameter import ParameterInfo
from megatron.errors import ConfigError
from megatron.planner.launches import Launch, axis_of
from megatron.planner.plan import parallel_map
from megatron.planner.rehearsal.launch_prices import TERM_OF_AXIS, exposure
from megatron.planner.rehearsal.records import LayerKind, Unit, UnitRecords, UnitsOfRun, layer_kinds_of
from megatron.planner.rehearsal.unit import Ends, UnitRecord
from megatron.planner.search.enumeration import LONGEST_MICROBATCH, RECOMPUTE, SHORTEST_PART, modules_in
from megatron.planner.search.layout import Job, Layout
from megatron.planner.search.search import Report, no_report, unit_records
from megatron.planner.step_time.prices import load_fitted
from megatron.planner.step_time.workload import Cluster
from megatron.training.initialize import rank_grid

Json = Any

PRECISIONS: Mapping[str, str] = {"bf16": "--bf16", "fp8": "--bf16 --fp8-format hybrid"}
_DTYPES = {torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 1, torch.float32: 2}


@dataclass(frozen=True)
class Choices:
    """Sizes of the layouts whose units are rehearsed; those that a model does not divide by are left out."""

    tensor_parallel: Sequence[int] = (1, 2, 4, 8)
    context_parallel: Sequence[int] = (1, 2, 4, 8, 16)
    expert_parallel: Sequence[int] = (1, 2, 4, 8, 16, 32)
    micro_batch_sizes: Sequence[int] = (1, 2, 4)
    recompute: Sequence[str] = (*RECOMPUTE, "full")
    cp_comm_types: Sequence[ContextParallelType] = ("p2p", "a2a", "allgather")


class Shared:
    """Values that are written once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.values: list[Json] = []

    def number(self, value: Json) -> int:
        key = repr(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def variants(job: Job, choices: Choices) -> Iterator[Layout]:
    """One layout for each set of units; a run may refuse some of them."""
    layers, experts = job.architecture.num_layers, job.architecture.num_experts
    # A schedule that defers weight gradients needs two stages; of these any number does that divides the layers.
    several = next(size for size in range(2, layers + 1) if layers % size == 0)
    usual, deferring = Layout(1, 1, 1, 1, 1, "1f1b", "optim", 1, "none"), {"pp": several, "schedule": "zb-h1"}
    # FSDP keeps no quantised weights; it does not go with a pipeline.
    kinds = [{}, deferring, *[{"sharding": "optim_grads_params"}] * (job.precision == "fp8")]
    for tp, cp, size in product(choices.tensor_parallel, choices.context_parallel, choices.micro_batch_sizes):
        if cp > 1 and (job.seq_length // cp < SHORTEST_PART or size > 1):
            continue
        if size > 1 and size * job.seq_length > LONGEST_MICROBATCH:
            continue
        parallels = [
            (True, False),
            *[(True, True)] * (job.precision == "bf16" and tp > 1),
            *[(False, False)] * (tp > 1),
        ]
        sizes = product(choices.expert_parallel, sorted({1, tp})) if experts else [(1, 1)]
        for (ep, etp), (sp, overlap), recompute in product(sizes, parallels, choices.recompute):
            # As few replicas as the experts need, and two shards.
            dp = 2 * next(dp for dp in range(1, ep * etp + 1) if tp * cp * dp % (ep * etp) == 0)
            layout = replace(
                usual, tp=tp, cp=cp, dp=dp, micro_batch_size=size, ep=ep, etp=etp, sequence_parallel=sp,
                tp_comm_overlap=overlap, recompute=modules_in(job.architecture, recompute),
                recompute_layers=int(recompute == "full"),
            )  # fmt: skip
            for kind in kinds:
                yield replace(layout, **kind)  # type: ignore[arg-type]
            if job.precision == "bf16" and recompute == "none":
                # Of layers the page computes what narrower main gradients change.
                yield replace(layout, reduces_in_bf16=True)


def variant_key(units: UnitsOfRun, modules: Sequence[str]) -> str:
    """What the records of a layout's units depend on; ``composition.js`` writes it, too."""
    grid, parallel = units.grid, units.config.parallel
    drops_weights = units.is_fully_sharded and units.config.precision.fp8_format is not None
    numbers = (
        *(grid.tp, parallel.sequence_parallel, parallel.tp_comm_overlap, grid.cp, units.config.micro_batch_size),
        *(grid.ep, grid.etp, units.splits_backward, drops_weights),
    )
    exchange = parallel.cp_comm_type[0] if grid.cp > 1 else ""
    return ",".join([exchange, *(str(int(one)) for one in numbers), *sorted(modules)])


def ends_key(units: UnitsOfRun) -> str:
    """The same for the ends of the model."""
    grid, parallel, config = units.grid, units.config.parallel, units.config
    in_bf16 = config.precision.grad_reduce_in_bf16
    numbers = grid.tp, parallel.sequence_parallel, parallel.tp_comm_overlap, grid.cp, config.micro_batch_size, in_bf16
    return ",".join(str(int(one)) for one in numbers)


def runs_of(job: Job, choices: Choices, records: UnitRecords) -> Iterator[tuple[Layout, UnitsOfRun]]:
    """Runs of which each has units that no run before has."""
    seen = set()
    for layout in variants(job, choices):
        config = layout.apply(job.config, job.given)
        try:
            check_run(config, layout.num_gpus)
        except ConfigError:
            continue
        units = UnitsOfRun(records, config, rank_grid(config.parallel, layout.num_gpus))
        key = variant_key(units, layout.modules), ends_key(units), layout.recompute
        if key not in seen:
            seen.add(key)
            yield layout, units


def job_data(job: Job, choices: Choices, parameters: Shared, passes: Shared, report: Report = no_report) -> Json:
    """The facts and the records of ``job``, which refer to ``parameters`` and launches of ``passes``."""
    runs: list[tuple[Layout, UnitsOfRun]] = []
    with parallel_map() as map_in_parallel:

        def reporting(function: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
            rehearsals = list(items)
            for number, record in enumerate(map_in_parallel(function, rehearsals), start=1):
                if number % 100 == 0 or number == len(rehearsals):
                    report(f"layers of {job.name} in {job.precision}", number, len(rehearsals))
                yield record

        for exchange in choices.cp_comm_types:
            parallel = replace(job.config.parallel, cp_comm_type=(exchange,))
            of_exchange = replace(job, config=replace(job.config, parallel=parallel))
            records = unit_records(of_exchange)
            found = [run for run in runs_of(of_exchange, choices, records) if not runs or run[0].cp > 1]
            records.rehearse((units for _, units in found), reporting)
            runs += found
    layers: dict[str, dict[str, Json]] = {}
    ends: dict[str, Json] = {}
    for layout, units in runs:
        ends[ends_key(units)] = _ends(units.ends, parameters, passes)
        if not layout.reduces_in_bf16:
            of_variant = layers.setdefault(variant_key(units, layout.modules), {})
            for unit in units.division.different_units:
                of_variant[_kind(unit)] = _record(units.unit(unit), parameters, passes)
    return {**facts(job), "layers": layers, "ends": ends}


def facts(job: Job) -> Json:
    """What the page says and checks of the model, and what the composition needs of the job."""
    model = job.architecture
    sizes = "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts"
    kinds = [_digits(kind) for kind in layer_kinds_of(model)]
    return {
        **{name: getattr(model, name) for name in sizes},
        "name": job.name,
        # For other numbers of layers.
        "flops_of_output": model.flops_of_layers((), job.seq_length, has_output_layer=True),
        "flops_of_layer": {
            kind: model.flops_of_layers((kinds.index(kind),), job.seq_length, has_output_layer=False)
            for kind in set(kinds)
        },
        "seq_length": job.seq_length,
        "precision": job.precision,
        "layer_kinds": kinds,
        "flops_per_token": model.flops_per_token(job.seq_length),
    }


def cluster_data(cluster: Cluster) -> Json:
    """The rates of a cluster, and the constants of its prices."""
    numbers = {name: value for name, value in vars(cluster).items() if isinstance(value, int | float | str | None)}
    return {**numbers, "sources": dict(cluster.sources), "constants": {**load_fitted(), **cluster.constants}}


def _kind(unit: Unit) -> str:
    """Whether a layer is recomputed, and its kind, as digits."""
    assert len(unit.layers) == 1 and isinstance(unit.kind, tuple)
    layer, *_ = unit.kind[1]
    assert isinstance(layer, LayerKind)
    return f"{int(unit.is_recomputed)}{_digits(layer)}"


def _digits(layer: LayerKind) -> str:
    return "".join(str(int(fact)) for fact in vars(layer).values())


def _record(record: UnitRecord, parameters: Shared, passes: Shared) -> Json:
    """``[bytes of the memory's fields, parameters, passes, layers]``."""
    infos = parameters.number([_parameter(info) for info in record.parameters])
    launches = [passes.number(_launches(of_pass)) for of_pass in record.launches]
    return [list(vars(record.memory).values()), infos, launches, record.num_layers]


def _ends(ends: Ends, parameters: Shared, passes: Shared) -> Json:
    tables = {info.name for info in ends.embedding.parameters}
    is_tied = any(info.name in tables for info in ends.output.parameters)
    embedding, output = (_record(one, parameters, passes) for one in (ends.embedding, ends.output))
    return [embedding, output, ends.position_tables, ends.shard, is_tied]


def _parameter(info: ParameterInfo) -> Json:
    """``[rows, elements of a row, of experts, of the vocabulary]``."""
    rows, *others = info.local_shape
    return [rows, prod(others), int(info.is_expert), int(info.is_vocabulary)]


def _launches(launches: Sequence[Launch]) -> Json:
    """What the prices need of a pass, equal launches together, for launches that run first and that run again::

    [bytes between products, [[attention's FLOPs, length], ...],
     [[times, rows, columns, depth, bytes, dtype, count, is accumulated], ...],
     [[times, kind, axes, bytes, exposure, the rehearsed ranks of context parallelism], ...]]
    """
    return [_launches_once([one for one in launches if one.is_recomputed == again]) for again in (False, True)]


def _launches_once(launches: Sequence[Launch]) -> Json:
    num_bytes = sum(one.num_bytes for one in launches if one.kind == "elementwise" and one.product is None)
    attention: dict[tuple[Json, ...], int] = {}
    products: dict[tuple[Json, ...], int] = {}
    collectives: dict[tuple[Json, ...], int] = {}
    for one in launches:
        shape, group = one.product, one.group
        if shape is not None:
            sizes = shape.rows, shape.columns, shape.depth, one.num_bytes, _DTYPES[shape.dtype], shape.count
            product = *sizes, int(shape.is_accumulated)
            products[product] = products.get(product, 0) + 1
        elif one.kind == "attention":
            attention[one.flops, one.length] = attention.get((one.flops, one.length), 0) + 1
        elif group is not None and TERM_OF_AXIS.get(axis_of(group.axes)) is not None and group.kind != "receive":
            ranks = group.ranks if group.axes == "cp" else ()
            collective = group.kind, group.axes, one.num_bytes, exposure(group, one.during), ranks
            collectives[collective] = collectives.get(collective, 0) + 1
    tables = ([[times, *key] for key, times in found.items()] for found in (attention, products, collectives))
    return [num_bytes, *tables]
