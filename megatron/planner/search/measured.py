"""The level of the step times, corrected by the metrics file of a real run."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.metrics.jsonl import RUN
from megatron.planner.search.accuracy import CORRECTED_ERROR, SAME_MODEL_ERROR, Level, regimes_of
from megatron.planner.search.layout import Job

_WARM_UP = 2
"""Records of a process that are left out, if there are more: compilation, first allocations."""


def measured_level(path: Path, job: Job, flag: str = "--measured") -> Level:
    """How much slower the run of a metrics file was than predicted on the job's cluster; ``flag`` names the file.

    Raises :class:`ConfigError` if the file does not say which flags and how many ranks its run had, or has no times.
    """
    records = _read(path, flag)
    starts = [number for number, record in enumerate(records) if _is_described(record)]
    if not starts:
        raise ConfigError(
            f"{flag} {path} does not state the layout of its run: use a file that --metrics-jsonl wrote, whose "
            "first record has the flags (key run)."
        )
    described, last = records[starts[-1]][RUN], records[-1]
    seconds = _step_time(f"{flag} {path}", records[starts[-1] :])
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
        frozenset(regime.key for regime in regimes_of(config, job.cluster, grid.world_size, units.schedule)),
        f"The level is corrected by {path.name}: {seconds:.4g} s per step on {described['world_size']} GPUs, predicted "
        f"{predicted:.4g} s.",
    )


def _read(path: Path, flag: str) -> list[dict[str, Any]]:
    """The records of the file; a line that is no record is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read ({error.strerror}): check the path.") from error
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _is_described(record: Mapping[str, Any]) -> bool:
    run = record.get(RUN)
    return isinstance(run, dict) and isinstance(run.get("flags"), dict) and isinstance(run.get("world_size"), int)


def _step_time(file: str, records: list[dict[str, Any]]) -> float:
    """The median of the records' step times, in seconds, of a single process."""
    times = [record["iteration_time_ms"] for record in records if _is_number(record.get("iteration_time_ms"))]
    if not times:
        raise ConfigError(f"{file} has no iteration_time_ms after its last start: let the run train on.")
    return median(times[_WARM_UP:] or times) / 1e3


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def config_of(flags: Mapping[str, Any]) -> RunConfig:
    """The configuration from its flags by group. Flags that this version does not have are left out."""
    groups = {}
    for group in fields(RunConfig):
        kind: Any = group.default_factory
        stated = flags.get(group.name, {})
        values = {field.name: stated[field.name] for field in fields(kind) if field.name in stated}
        groups[group.name] = kind(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )
    return RunConfig(**groups)
