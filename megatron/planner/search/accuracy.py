"""How far a predicted step time may be off: the model's own error, or more where nothing like it was measured."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from megatron.config.run import RunConfig
from megatron.planner.step_time.cluster import Cluster
from megatron.planner.step_time.prices import load_record

_ERRORS, _MEASURED = load_record()["errors"], load_record()["measured"]


def _in_percent(error: float) -> float:
    """Rounded up to a whole percentage."""
    return ceil(100 * error) / 100


KNOWN_ERROR = _in_percent(_ERRORS["left_out"])
"""Of software that the fit does not know: the 90th percentile of the source that is predicted worst if it is left out,
without doubtful rows (docs/planner.md, by source)."""
CORRECTED_ERROR = _in_percent(_ERRORS["same_software"])
"""After one run of the same software: 90th percentile of all sources (docs/planner.md, after one run)."""
SAME_MODEL_ERROR = _in_percent(_ERRORS["same_software_and_model"])
"""After one run of the same software, model and sequence length: the same."""
OWN_ERROR = 0.2
"""Of this code without a measured run: ``KNOWN_ERROR``, and the 90th percentile between two releases of one software
(6 %, docs/planner.md, after one run), rounded up. No run of this code on GPUs has been measured."""
UNKNOWN_ERROR = 0.3
"""Where the GPU or the regime has no measurements."""


@dataclass(frozen=True)
class Regime:
    """Something on which a step time depends, and that has been measured or not."""

    key: tuple[str, ...]
    description: str


def regimes(
    cluster: Cluster, is_fp8: bool, sharding: str, schedule: str, gpus: int, cp: int, has_experts: bool
) -> Iterator[Regime]:
    """What must have been measured elsewhere for the usual error of a run."""
    generation = cluster.generation
    yield Regime(("gpu", generation, str(cluster.bf16_flops)), f"the GPU of {cluster.name}")
    yield Regime(("precision", generation, str(is_fp8)), f"{'FP8' if is_fp8 else 'bf16'} on {generation}")
    yield Regime(("sharding", sharding), f"the sharding {sharding}")
    yield Regime(("schedule", schedule), f"the schedule {schedule}")
    if gpus > largest_measured():
        yield Regime(("gpus",), f"more than {largest_measured():,} GPUs")
    if cp > 1:
        yield Regime(("cp", generation), f"context parallelism on {generation}")
    if has_experts:
        yield Regime(("experts",), "models with experts")


_SHARDING = {"no_shard": "none", "optim_grads_params": "fsdp2"}
"""Names of published runs; other strategies shard the optimizer's state."""
_SCHEDULES = {"interleaved": "1f1b"}


def regimes_of(config: RunConfig, cluster: Cluster, gpus: int, schedule: str) -> Iterator[Regime]:
    """Those of a run of this project; ``schedule`` is its pipeline schedule."""
    parallel = config.parallel
    sharding = _SHARDING.get(parallel.sharding_strategy, "optimizer")
    is_fp8, has_experts = config.precision.fp8_format is not None, bool(config.model.num_experts)
    schedule = _SCHEDULES.get(schedule, schedule)
    return regimes(cluster, is_fp8, sharding, schedule, gpus, parallel.context_parallel_size, has_experts)


def largest_measured() -> int:
    """The most GPUs of a published run."""
    largest: int = _MEASURED["most_gpus"]
    return largest


def measured_regimes() -> frozenset[tuple[str, ...]]:
    """The keys of the regimes of published runs of dense models."""
    return frozenset(tuple(key) for key in _MEASURED["regimes"])


def unmeasured(found: Iterable[Regime], cluster: Cluster, measured: frozenset[tuple[str, ...]]) -> list[str]:
    """Descriptions of the regimes of a run without measurements."""
    return [
        regime.description
        for regime in found
        if regime.key not in measured and not (regime.key[0] == "gpu" and cluster.constants)
    ]


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


def basis_warnings(cluster: Cluster, gpus: Sequence[int], level: Level) -> list[str]:
    """Sentences on what the times of plans on these numbers of GPUs rest on."""
    found = []
    if not level.source and not cluster.constants:
        found.append(
            f"The prices are those of {_MEASURED['runs']} runs of other software: no run of this code on GPUs has "
            f"been measured, so times are at best +-{OWN_ERROR:.0%}. A measured run of yours corrects "
            "them (--measured)."
        )
    if max(gpus) > largest_measured():
        found.append(
            f"No measured run has more than {largest_measured():,} GPUs: the times on {max(gpus):,} GPUs are "
            "extrapolated."
        )
    return found
