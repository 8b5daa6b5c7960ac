"""Published runs: a table with columns like those of ``published_runs.csv``, as :class:`Run` to price.

A row states shapes and layout. What else its time depends on (kernels, sharding, overlap) follows from the software of
its source, which is described here.
"""

import csv
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron.errors import ConfigError
from megatron.planner.step_time.cluster import Cluster, read_cluster
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
_CLUSTERS = {
    "A100-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "H100-80GB": "h100",
    "H100-96GB-500W": "h100-500w",
    "H200-141GB": "h200",
    "B200": "b200",
    "GB200": "gb200",
}
_VOCAB = {"bloom": 250880}
_USUAL_VOCAB = 50304  # GPT-2's, padded

Row = Mapping[str, str]


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
        return self.row.get("source", "")


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
    except _Unpriceable as error:
        run, reason = None, str(error)
    return PublishedRun(number, row, run, reason, None if run is None else _seconds(row, run), _is_held_back(row))


class _Unpriceable(Exception):
    """The row does not state enough."""


def _is_held_back(row: Row) -> bool:
    """By a digest of what describes the run, without what was measured."""
    stated = "|".join(f"{name}={value}" for name, value in row.items() if name not in _MEASURED and name != "where")
    return int(hashlib.sha256(stated.encode()).hexdigest(), 16) % _HELD_BACK == 0


def _seconds(row: Row, run: Run) -> float | None:
    if row.get("step_time_s"):
        return float(row["step_time_s"])
    if row.get("tokens_per_s_per_gpu"):
        return run.global_batch_size * run.seq_length / float(row["tokens_per_s_per_gpu"]) / run.gpus
    return None


def _run_of(row: Row) -> Run:
    """The run of a row; raises :class:`_Unpriceable`."""
    source, where = row.get("source", ""), row.get("where", "")
    software = _software(source, where)
    missing = [name for name in ("layers", "hidden", "heads", "seq", "gpu", "gpus", "gbs") if not row.get(name)]
    if missing:
        raise _Unpriceable(f"{', '.join(missing)} is not stated")
    if row.get("ep") not in (None, "", "1"):
        raise _Unpriceable("the columns do not describe experts")

    def number(name: str, default: int) -> int:
        try:
            return int(float(row[name])) if row.get(name) else default
        except ValueError as error:
            raise _Unpriceable(f"{name} {row[name]} is not a number") from error

    hidden, heads, batch, pp = (number(name, 1) for name in ("hidden", "heads", "gbs", "pp"))
    dp = number("dp", number("gpus", 1) // (number("tp", 1) * pp * number("cp", 1)))
    vp = number("vp", 2 if "Interleaved" in where else 1)
    if row.get("mbs"):
        micro_batch_size = float(row["mbs"])
    elif source == "torchtitan":
        micro_batch_size = max(1.0, batch / dp / pp)  # its default: as many microbatches as stages
    else:
        raise _Unpriceable("mbs is not stated")
    is_nemo = software.elementwise == "transformer-engine"
    return Run(
        layers=number("layers", 1),
        hidden=hidden,
        heads=heads,
        kv_heads=number("kv_heads", heads),
        ffn=number("ffn", 4 * hidden),
        is_gated="lama" in row["model"],
        vocab=number("vocab", _VOCAB.get(source, _USUAL_VOCAB)),
        seq_length=number("seq", 1),
        gpus=number("gpus", 1),
        tp=number("tp", 1),
        pp=pp,
        vp=vp,
        cp=number("cp", 1),
        dp=dp,
        micro_batch_size=micro_batch_size,
        global_batch_size=batch,
        is_fp8=row.get("precision") == "fp8",
        recompute=_recompute(row.get("recompute", "")),
        sequence_parallel=row.get("sp") == "yes" or (is_nemo and number("tp", 1) > 1),
        schedule=_schedule(where),
        software=software,
        cluster=_cluster(source, row["gpu"]),
    )


def _software(source: str, where: str) -> Software:
    """The software of a source; of one that is not known, what its text suggests, else Megatron Core's."""
    text = f"{source} {where}".lower()
    similar = (
        "torchtitan" if "titan" in text else "llm-foundry" if "foundry" in text or "fsdp1" in text else "nemo-25xx"
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


def _cluster(source: str, gpu: str) -> Cluster:
    similar = (name for known, name in _CLUSTERS.items() if known.partition("-")[0] == gpu.partition("-")[0])
    name = "jean-zay-a100" if source == "bloom" else _CLUSTERS.get(gpu) or next(similar, None)
    if name is None:
        raise _Unpriceable(f"there are no measurements of GPU {gpu}")
    return _cached_cluster(name)


@cache
def _cached_cluster(name: str) -> Cluster:
    return read_cluster(name)


def _recompute(text: str) -> Recompute:
    return {"full": "full", "selective": "selective"}.get(text, "none")  # type: ignore[return-value]


def _schedule(where: str) -> Schedule:
    return "zb-h1" if "ZB-1p" in where else "zb-h2" if "ZB-2p" in where else "1f1b"


def sources(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """The sources, in the order of their first rows."""
    yield from dict.fromkeys(one.source for one in runs)
