"""Published runs: a table with columns like those of ``benchmarks/published/runs.csv``, as :class:`Run` to price.

A row states shapes and layout. What else its time depends on (kernels, sharding, overlap) follows from the software of
its source, which is described here.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.planner.step_time.cluster import Cluster, read_cluster
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.prices import Constants
from megatron.planner.step_time.published import (
    Row,
    Unpriceable,
    cluster_name,
    experts_of,
    is_fp8,
    is_gated,
    measured_number,
    real,
    text,
    whole,
)
from megatron.planner.step_time.workload import Array, Recompute, Run, Schedule, Software, Workload

_REQUIRED = {"source", "model", "layers", "hidden", "gpu", "gpus"}
"""Columns without which a file is no table of runs."""

MEGATRON_2021 = Software(attention="unfused", elementwise="megatron-2021")
NEMO = Software(
    attention="cudnn",
    elementwise="transformer-engine",
    sharding="optimizer",
    main_grad_bytes=8,
    overlaps_tensor_parallel=True,
    overlaps_data_parallel=True,
)
TORCHTITAN = Software(
    attention="flash", elementwise="eager", sharding="fsdp2", main_grad_bytes=2, recomputes_products=True
)
LLM_FOUNDRY = Software(attention="flash", elementwise="eager", sharding="fsdp1", main_grad_bytes=2)
SOFTWARE: Mapping[str, Software] = {
    "megatron-sc21": MEGATRON_2021,
    "korthikanti-2022": MEGATRON_2021,
    "zero-bubble": MEGATRON_2021,
    "bloom": replace(MEGATRON_2021, sharding="optimizer", has_deepspeed_pipeline=True),
    "nemo-25xx": NEMO,
    "dgxc-benchmarking": NEMO,
    "torchtitan": TORCHTITAN,
    "llm-foundry": LLM_FOUNDRY,
}
"""By source."""
_ZERO_BUBBLE: Mapping[str, Schedule] = {
    "ZB-1p": "zb-h1",
    "ZB-2p": "zb-2p",
    "ZB (handcrafted": "zb-2p",
    "ZB (auto": "zb-2p",
}
"""By label; without a limit of the memory the schedules of the zero-bubble paper have next to no bubble."""
_OTHER_SCHEDULE = re.compile(r"\b(?:ZB(?:-\w+| \((?:handcrafted|auto))?|V-Half|V-Min|DualPipe\w*)\b")
_VOCAB = {"bloom": 250880}
_USUAL_VOCAB = 50304  # GPT-2's, padded


@dataclass(frozen=True)
class PublishedRun:
    """A row of a table."""

    row: Row
    run: Run | None
    """None if the row cannot be priced."""
    reason: str
    """Why not."""
    seconds: float | None
    """The measured time of a step, if the row has one."""

    @property
    def source(self) -> str:
        return text(self.row, "source")


def read_published(path: Path) -> list[PublishedRun]:
    """The rows of a table, in order; raises :class:`ConfigError` if it is no such table."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = _REQUIRED - set(table.fieldnames or ())
            rows = list(table)
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a CSV file ({error}): check the path.") from error
    if missing:
        raise ConfigError(f"{path} has no column {', '.join(sorted(missing))}: the table needs it.")
    return [_published(row) for row in rows]


def predict(runs: Sequence[PublishedRun], constants: Constants) -> Array:
    """The seconds of a step of runs that can be priced; ``[runs]``."""
    return StepTimeModel(Workload([one.run for one in runs if one.run is not None])).price(constants).total


def _published(row: Row) -> PublishedRun:
    try:
        run: Run | None = _run_of(row)
        reason = ""
    except Unpriceable as error:
        run, reason = None, str(error)
    return PublishedRun(row, run, reason, None if run is None else _seconds(row, run))


def _seconds(row: Row, run: Run) -> float | None:
    seconds, rate = measured_number(row, "step_time_s"), measured_number(row, "tokens_per_s_per_gpu")
    if seconds is None and rate is not None:
        seconds = run.global_batch_size * run.seq_length / rate / run.gpus
    return seconds


def _run_of(row: Row) -> Run:
    """The run of a row; raises :class:`Unpriceable`."""
    missing = [name for name in ("layers", "hidden", "heads", "seq", "gpu", "gpus", "gbs") if not text(row, name)]
    if missing:
        raise Unpriceable(f"{', '.join(missing)} is not stated")
    source, where = text(row, "source"), text(row, "where")
    cluster = _cached_cluster(cluster_name(source, text(row, "gpu")))
    software = _software(source, where)
    layers, hidden, heads = (whole(row, name, 1) for name in ("layers", "hidden", "heads"))
    ffn = whole(row, "ffn", 4 * hidden)
    layout = _layout(row, source)
    is_nemo = software.elementwise == "transformer-engine"
    return Run(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=whole(row, "kv_heads", heads),
        ffn=ffn,
        is_gated=is_gated(text(row, "model"), ffn if text(row, "ffn") else None, hidden),
        vocab=whole(row, "vocab", _VOCAB.get(source, _USUAL_VOCAB)),
        seq_length=whole(row, "seq", 1),
        vp=whole(row, "vp", 2 if "Interleaved" in where else 1),
        is_fp8=is_fp8(row, cluster),
        recompute=_recompute(text(row, "recompute")),
        sequence_parallel=text(row, "sp") == "yes" or (is_nemo and layout["tp"] > 1),
        schedule=_schedule(where),
        software=software,
        cluster=cluster,
        **layout,
        **_experts(row, layers, hidden, heads, layout),
    )


def _layout(row: Row, source: str) -> dict[str, Any]:
    """The fields of a run that describe its parallel sizes and batches; raises :class:`Unpriceable`."""
    gpus, tp, pp, cp, batch = (whole(row, name, 1) for name in ("gpus", "tp", "pp", "cp", "gbs"))
    dp = whole(row, "dp", max(1, gpus // (tp * pp * cp)))
    if tp * pp * cp * dp != gpus:
        raise Unpriceable(f"tp x pp x cp x dp is {tp * pp * cp * dp}, but gpus is {gpus}")
    micro_batch_size = real(row, "mbs")
    if micro_batch_size is None:
        if source != "torchtitan":
            raise Unpriceable("mbs is not stated")
        micro_batch_size = max(1.0, batch / dp / pp)  # its default: as many microbatches as stages
    if micro_batch_size * dp > batch:
        raise Unpriceable(f"gbs {batch} is less than mbs x dp")
    names = ("gpus", "tp", "pp", "cp", "dp", "micro_batch_size", "global_batch_size")
    return dict(zip(names, (gpus, tp, pp, cp, dp, micro_batch_size, batch)))


def _experts(row: Row, layers: int, hidden: int, heads: int, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run that describe experts; raises :class:`Unpriceable`."""
    found = experts_of(row, layers, hidden, heads)
    ranks = layout["tp"] * layout["cp"] * layout["dp"]
    if found and (ranks % found["ep"] or found["num_experts"] % found["ep"]):
        raise Unpriceable(f"ep {found['ep']} does not divide {ranks} ranks and {found['num_experts']} experts")
    return found


def _software(source: str, where: str) -> Software:
    """The software of a source; of one that is not known, what its text suggests, else Megatron Core's.

    Raises:
        Unpriceable: sharding that has no measurements with this software.
    """
    hint = f"{source} {where}".lower()
    similar = (
        "torchtitan" if "titan" in hint else "llm-foundry" if "foundry" in hint or "fsdp1" in hint else "nemo-25xx"
    )
    source = source if source in SOFTWARE else similar
    software = SOFTWARE[source]
    if source == "torchtitan":
        is_compiled = "compile" in where or "June 2025" in where
        return replace(
            software,
            elementwise="compiled" if is_compiled else "eager",
            overlaps_tensor_parallel="async TP" in where,
        )
    of_row = where.partition("; ")[2] or where  # without the name of the document
    if software.elementwise == "megatron-2021" and "ZeRO-3" in of_row:
        raise Unpriceable("there are no measurements of ZeRO-3 with Megatron-LM of 2021")
    if "SHARD_GRAD_OP" in where:
        return replace(software, keeps_weights_gathered=True)
    if source == "nemo-25xx" and "FSDP" in where and "without FSDP" not in where:
        return replace(software, sharding="fsdp2", main_grad_bytes=2)
    return software


@cache
def _cached_cluster(name: str) -> Cluster:
    return read_cluster(name)


def _recompute(value: str) -> Recompute:
    stated = value.lower()
    if stated in ("full", "selective"):
        return "full" if stated == "full" else "selective"
    if stated in ("", "no"):  # "none" states nothing to recompute
        return "none"
    raise Unpriceable(f"recompute {value} is not known: none, selective or full")


def _schedule(where: str) -> Schedule:
    """1F1B unless the text names another schedule; raises :class:`Unpriceable` for one without measurements."""
    label = _OTHER_SCHEDULE.search(where)
    if label is None:
        return "1f1b"
    if label[0] not in _ZERO_BUBBLE:
        raise Unpriceable(f"there are no measurements of schedule {label[0]}")
    return _ZERO_BUBBLE[label[0]]
