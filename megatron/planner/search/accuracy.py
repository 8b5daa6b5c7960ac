"""The error of a predicted step time: that of the model, or more where nothing like it was measured; and the level of
all step times, corrected by the metrics file of a real run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.metrics.jsonl import RUN, Record, read_history
from megatron.planner.search.layout import Job, Layout
from megatron.planner.step_time.prices import load_record
from megatron.planner.step_time.workload import Cluster

_ERRORS, _MEASURED = load_record()["errors"], load_record()["measured"]


def _in_percent(error: float) -> float:
    """Rounded up to a whole percentage."""
    return ceil(100 * error) / 100


KNOWN_ERROR = _in_percent(_ERRORS["left_out"])
"""The error of software that the fit does not know: the 90th percentile of the source that is predicted worst if it is
left out, without doubtful rows (docs/step_times.md, by source)."""
CORRECTED_ERROR = _in_percent(_ERRORS["same_software"])
"""The error after one run of the same software: the 90th percentile of all sources (docs/step_times.md)."""
SAME_MODEL_ERROR = _in_percent(_ERRORS["same_software_and_model"])
"""The error after one run of the same software, model and sequence length: the same percentile."""
OWN_ERROR = 0.2
"""The error of this code without a measured run: ``KNOWN_ERROR``, and the 90th percentile between two releases of one
software (6 %, docs/step_times.md, after one run), rounded up. No run of this code on GPUs has been measured."""
UNKNOWN_ERROR = 0.3
"""The error where the GPU or the regime has no measurements."""
LARGEST_MEASURED: int = _MEASURED["most_gpus"]
"""The most GPUs of a published run."""
_MEASURED_REGIMES = frozenset(tuple(key) for key in _MEASURED["regimes"])
"""The keys of the regimes of published runs of dense models."""


Regimes = dict[tuple[str, ...], str]
"""Descriptions, by key, of what a step time depends on, and what has been measured or not."""


def regimes(
    cluster: Cluster, is_fp8: bool, sharding: str, schedule: str, gpus: int, cp: int, has_experts: bool
) -> Regimes:
    """What must have been measured elsewhere for the usual error of a run."""
    generation = cluster.generation
    found: Regimes = {
        ("gpu", generation, str(cluster.bf16_flops)): f"the GPU of {cluster.name}",
        ("precision", generation, str(is_fp8)): f"{'FP8' if is_fp8 else 'bf16'} on {generation}",
        ("sharding", sharding): f"the sharding {sharding}",
        ("schedule", schedule): f"the schedule {schedule}",
    }
    if gpus > LARGEST_MEASURED:
        found["gpus",] = f"more than {LARGEST_MEASURED:,} GPUs"
    if cp > 1:
        found["cp", generation] = f"context parallelism on {generation}"
    if has_experts:
        found["experts",] = "models with experts"
    return found


_SHARDING = {"no_shard": "none", "optim_grads_params": "fsdp2"}
"""Names of published runs; other strategies shard the optimizer's state."""
_SCHEDULES = {"interleaved": "1f1b"}


def regimes_of(config: RunConfig, cluster: Cluster, gpus: int, schedule: str) -> Regimes:
    """The regimes of a run of this project; ``schedule`` is its pipeline schedule."""
    parallel = config.parallel
    sharding = _SHARDING.get(parallel.sharding_strategy, "optimizer")
    is_fp8, has_experts = config.precision.fp8_format is not None, bool(config.model.num_experts)
    schedule = _SCHEDULES.get(schedule, schedule)
    return regimes(cluster, is_fp8, sharding, schedule, gpus, parallel.context_parallel_size, has_experts)


@dataclass(frozen=True)
class Level:
    """A correction of all step times by a measured run."""

    factor: float = 1.0
    error: float = OWN_ERROR
    regimes: frozenset[tuple[str, ...]] = frozenset()
    """Keys of what the measured run has measured."""
    source: str = ""
    """A sentence about the run; empty without one."""


def level_of(cluster: Cluster) -> Level:
    """The level without a measured run. A calibrated cluster has measured the kernels of this code."""
    return Level(error=KNOWN_ERROR if cluster.constants else OWN_ERROR)


def unmeasured(job: Job, layout: Layout, level: Level) -> list[str]:
    """Descriptions of what of a layout has been measured neither elsewhere nor for the level."""
    measured, cluster = _MEASURED_REGIMES | level.regimes, job.cluster
    if cluster.constants:
        measured |= {("gpu", cluster.generation, str(cluster.bf16_flops))}
    found = regimes_of(layout.apply(job.config, job.given), cluster, job.num_gpus, layout.schedule)
    return [description for key, description in found.items() if key not in measured]


def basis_warnings(cluster: Cluster, gpus: Sequence[int], level: Level) -> list[str]:
    """Sentences on what the times of plans on these numbers of GPUs rest on."""
    found = []
    if not level.source and not cluster.constants:
        found.append(
            f"The prices are those of {_MEASURED['runs']} runs of other software: no run of this code on GPUs has "
            f"been measured, so times are at best +-{OWN_ERROR:.0%}. A measured run of yours corrects "
            "them (--measured)."
        )
    if max(gpus) > LARGEST_MEASURED:
        found.append(
            f"No measured run has more than {LARGEST_MEASURED:,} GPUs: the times on {max(gpus):,} GPUs are "
            "extrapolated."
        )
    return found


_WARM_UP = 2
"""Records of a process that are left out, if there are more: compilation, first allocations."""


def measured_level(path: Path, job: Job, flag: str = "--measured") -> Level:
    """The level by the run of a metrics file: its time over that predicted on the cluster. ``flag`` names the file.

    Raises :class:`UserError` if the file does not say which flags and how many ranks its run had, or has no times.
    """
    history = read_history(str(path), flag)
    records = history.iterations
    starts = [number for number, record in enumerate(records) if _is_described(record)]
    if not starts:
        raise ConfigError(
            f"{flag} {path} does not state the layout of its run: use a file that --metrics-jsonl wrote, whose "
            "first record has the flags (key run)."
        )
    described, last = records[starts[-1]][RUN], records[-1]
    # Only the records of the last process count.
    of_process = replace(history, iterations=records[starts[-1] :], evaluations=())
    times = [milliseconds for _, milliseconds in of_process.curve("iteration_time_ms", in_tokens=False)]
    if not times:
        raise ConfigError(f"{flag} {path} has no iteration_time_ms after its last start: let the run train on.")
    seconds = median(times[_WARM_UP:] or times) / 1e3
    # Only now: torch is not needed to refuse a file.
    from megatron.planner.rehearsal.price import PlannedStep, StepPrices, attention_kind
    from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
    from megatron.training.initialize import rank_grid

    config = config_of(described["flags"])
    architecture = config.model.resolve(job.vocabulary.size, 1, config.seq_length)
    grid = rank_grid(config.parallel, described["world_size"])
    units = UnitsOfRun(UnitRecords(job.vocabulary.size, attention_kind(config, job.cluster)), config, grid)
    step = PlannedStep(units, last["global_batch_size"])
    is_same_model = (architecture, config.seq_length) == (job.architecture, job.seq_length)
    predicted = float(StepPrices(job.cluster, job.constants).price([step]).total[0])
    return Level(
        seconds / predicted,
        SAME_MODEL_ERROR if is_same_model else CORRECTED_ERROR,
        frozenset(regimes_of(config, job.cluster, grid.world_size, units.schedule)),
        f"The level is corrected by {path.name}: {seconds:.4g} s per step on {described['world_size']} GPUs, predicted "
        f"{predicted:.4g} s.",
    )


def _is_described(record: Record) -> bool:
    run = record.get(RUN)
    return isinstance(run, dict) and isinstance(run.get("flags"), dict) and isinstance(run.get("world_size"), int)


def config_of(flags: Mapping[str, Any]) -> RunConfig:
    """The configuration from its flags by group. Flags that this version does not have are left out."""
    groups = {}
    for group in fields(RunConfig):
        kind: Any = group.default_factory
        stated = flags.get(group.name, {})
        known = {field.name for field in fields(kind)} & stated.keys()
        groups[group.name] = kind(
            **{name: tuple(stated[name]) if isinstance(stated[name], list) else stated[name] for name in known}
        )
    return RunConfig(**groups)
