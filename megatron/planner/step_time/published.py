"""Published runs: a table with columns like those of ``published_runs.csv``, as :class:`Run` to price.

A row states shapes and layout. What else its time depends on (kernels, sharding, overlap) follows from the software of
its source, which is described here.
"""

import csv
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.planner.step_time.cluster import Cluster, read_cluster
from megatron.planner.step_time.row_fields import (
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
from megatron.planner.step_time.workload import Recompute, Run, Schedule, Software

TABLE = Path(__file__).with_name("published_runs.csv")
_MEASURED = ("tflops_per_gpu", "mfu", "step_time_s", "tokens_per_s_per_gpu", "memory_gb")
_HELD_BACK = 5
"""One row in so many is not fitted, but predicted."""

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
_CUDA_GRAPHS = {
    "b200": ("Llama3-8B", "Llama3-70B", "Nemotron4-15B", "Nemotron4-340B"),
    "gb200": ("Llama3-8B", "Llama3-70B", "Nemotron4-15B", "Nemotron4-340B", "GPT3-175B"),
}
"""By cluster: models of NeMo's performance pages that run without FSDP and with CUDA graphs, by
scripts/performance/recommended_model_configs of NVIDIA/NeMo, 2025."""
_RELEASE = re.compile(r"NeMo [\d.]+(?:/[\d.]+)?|v25[\d.]*\d|\d\d\.\d\d page|June 2025|MP mode [A-Z]+")
_ZERO_BUBBLE: Mapping[str, Schedule] = {"ZB-1p": "zb-h1", "ZB-2p": "zb-2p"}
_OTHER_SCHEDULE = re.compile(r"\b(?:ZB(?:-\w+)?|V-Half|V-Min|DualPipe\w*)\b")
_DAY_OF_BLOOM = re.compile(r"; (\d\d-\d\d)\b")
_VOCAB = {"bloom": 250880}
_USUAL_VOCAB = 50304  # GPT-2's, padded


@dataclass(frozen=True)
class PublishedRun:
    """A row of a table."""

    number: int
    """From 0."""
    row: Row
    run: Run | None
    """None if the row cannot be priced."""
    reason: str
    """Why not."""
    seconds: float | None
    """The measured time of a step, if the row has one."""
    is_held_back: bool
    """Whether the fit does not use the row."""

    @property
    def source(self) -> str:
        return text(self.row, "source")

    @property
    def precision(self) -> str:
        """As stated; of rows without one fp16 of Megatron-LM before 2023, else bf16, which take the same time."""
        is_old = self.run is not None and self.run.software.elementwise == "megatron-2021"
        return text(self.row, "precision") or ("fp16" if is_old else "bf16")

    @property
    def release(self) -> str:
        """Release of the software, as far as the row states it."""
        where = text(self.row, "where")
        if self.source == "bloom":
            return _release_of_bloom(where)
        _, _, own = where.partition("; ")  # after the name of the document
        return ", ".join(dict.fromkeys(_RELEASE.findall(own)))


def read_published(path: Path = TABLE) -> list[PublishedRun]:
    """The rows of a table, in order; raises :class:`ConfigError` if it is no such table."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = {"source", "model", "layers", "hidden", "gpu", "gpus"} - set(table.fieldnames or ())
            rows = list(table)
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a CSV file ({error}): check the path.") from error
    if missing:
        raise ConfigError(f"{path} has no column {', '.join(sorted(missing))}: use the columns of {TABLE.name}.")
    return [_published(number, row) for number, row in enumerate(rows)]


def fitted_and_held_back(runs: Sequence[PublishedRun]) -> tuple[list[PublishedRun], list[PublishedRun]]:
    """The measured runs that can be priced: those to fit, and those to predict."""
    usable = [one for one in runs if one.run is not None and one.seconds is not None]
    return [one for one in usable if not one.is_held_back], [one for one in usable if one.is_held_back]


def _published(number: int, row: Row) -> PublishedRun:
    try:
        run: Run | None = _run_of(row)
        reason = ""
    except Unpriceable as error:
        run, reason = None, str(error)
    return PublishedRun(number, row, run, reason, None if run is None else _seconds(row, run), _is_held_back(row))


def _is_held_back(row: Row) -> bool:
    """By a digest of what describes the run, without what was measured."""
    stated = "|".join(f"{name}={value}" for name, value in row.items() if name not in _MEASURED and name != "where")
    return int(hashlib.sha256(stated.encode()).hexdigest(), 16) % _HELD_BACK == 0


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
    software = replace(software, has_cuda_graphs=_has_cuda_graphs(software, row, cluster.name))
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
    """The software of a source; of one that is not known, what its text suggests, else Megatron Core's."""
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
    if "SHARD_GRAD_OP" in where:
        return replace(software, keeps_weights_gathered=True)
    if source == "nemo-25xx" and "FSDP" in where and "without FSDP" not in where:
        return replace(software, sharding="fsdp2", main_grad_bytes=2)
    return software


def _has_cuda_graphs(software: Software, row: Row, cluster: str) -> bool:
    """Whether a run of NeMo's performance pages uses CUDA graphs, which its recipes state."""
    models = _CUDA_GRAPHS.get(cluster, ()) if text(row, "source") == "nemo-25xx" else ()
    return software.sharding != "fsdp2" and text(row, "model") in models


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


def _release_of_bloom(where: str) -> str:
    """Its logbook says that the adapters of the nodes became faster on 25 February, and not to compare across."""
    day = _DAY_OF_BLOOM.search(where)
    return "" if day is None else "from 02-25" if day.group(1) >= "02-25" else "before 02-25"


def _schedule(where: str) -> Schedule:
    """1F1B unless the text names another schedule; raises :class:`Unpriceable` for one without measurements."""
    label = _OTHER_SCHEDULE.search(where)
    if label is None:
        return "1f1b"
    if label[0] not in _ZERO_BUBBLE:
        raise Unpriceable(f"there are no measurements of schedule {label[0]}")
    return _ZERO_BUBBLE[label[0]]


def sources(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """The sources, in the order of their first rows."""
    yield from dict.fromkeys(one.source for one in runs)
