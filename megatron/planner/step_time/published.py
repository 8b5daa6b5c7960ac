"""Published runs: a table with columns like those of ``benchmarks/published/runs.csv``, as :class:`Run` to price.

A row states shapes and layout, in cells that strangers write. What else its time depends on (kernels, sharding,
overlap) follows from the software of its source, which is described here.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.architectures.catalog import PRESETS
from megatron.architectures.layer_pattern import parse_layer_pattern
from megatron.errors import ConfigError
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.prices import Constants
from megatron.planner.step_time.workload import (
    Array,
    Cluster,
    Recompute,
    Run,
    Schedule,
    Software,
    Workload,
    read_cluster,
)

Row = Mapping[str, str]

CLUSTERS = {
    "A100-80GB": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "H100-80GB": "h100",
    "H100-96GB-500W": "h100-500w",
    "H200-141GB": "h200",
    "B200": "b200",
    "GB200": "gb200",
}
"""Names of cluster files by GPU."""
_NOT_STATED = {"", "-", "--", "n/a", "na", "none", "null", "nan", "?"}
_GATED = ("lama", "mistral", "mixtral", "qwen", "gemma", "olmo", "deepseek", "internlm", "granite", "phi-3", "phi-4")
_UNGATED = ("gpt", "bloom", "mpt", "opt-", "falcon", "nemotron", "pythia", "bert")
_EXPERTS = re.compile(r"\d+x\d+\.?\d*b|-a\d+(\.\d+)?b|moe|mixtral|deepseek-?v[23]|gpt-?oss|dbrx|scout|maverick|kimi")


class Unpriceable(Exception):
    """The row does not state enough, or what no measurement is like; the message is a sentence part."""


def text(row: Row, name: str) -> str:
    """A cell without surrounding blanks; empty if it is missing or says that nothing is stated."""
    value = row.get(name)
    stripped = value.strip() if isinstance(value, str) else ""
    return "" if stripped.lower() in _NOT_STATED else stripped


def real(row: Row, name: str) -> float | None:
    """A positive number, None if it is not stated; raises :class:`Unpriceable`."""
    stated = text(row, name)
    if not stated:
        return None
    try:
        value = float(stated)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e15:  # not for NaN
        raise Unpriceable(f"{name} {stated} is not a positive number")
    return value


def whole(row: Row, name: str, default: int) -> int:
    """A positive whole number; raises :class:`Unpriceable`."""
    value = real(row, name)
    if value is None:
        return default
    if value != int(value):
        raise Unpriceable(f"{name} {text(row, name)} is not a whole number")
    return int(value)


def cluster_name(source: str, gpu: str) -> str:
    """The file of a GPU; raises :class:`Unpriceable` for GPUs without measurements."""
    if source == "bloom":
        return "jean-zay-a100"
    if gpu in CLUSTERS:
        return CLUSTERS[gpu]
    # "DGX-H100 80GB": the family must be known; the memory chooses among its members.
    words = re.findall(r"[A-Z]+\d+[A-Z]*|\d+GB|PCIE|NVL$", gpu.upper())
    known = dict.fromkeys(name for name in CLUSTERS if name.partition("-")[0] in words)
    if not known or "PCIE" in words or "NVL" in words:
        raise Unpriceable(f"there are no measurements of GPU {gpu}")
    same_memory = (name for name in known if name.partition("-")[2] in words)
    return CLUSTERS[next(same_memory, next(iter(known)))]


def is_fp8(row: Row, cluster: Cluster) -> bool:
    """Whether products are computed in FP8; raises :class:`Unpriceable` for a precision without measurements."""
    precision = text(row, "precision").lower()
    if "fp8" in precision or "float8" in precision:
        if not cluster.fp8_flops:
            raise Unpriceable(f"{text(row, 'gpu')} has no FP8")
        return True
    if precision not in ("", "bf16", "fp16", "bfloat16", "float16", "mixed"):
        raise Unpriceable(f"there are no measurements of precision {text(row, 'precision')}")
    if not precision and cluster.generation == "blackwell":
        raise Unpriceable(f"the precision is not stated, and runs on {text(row, 'gpu')} use FP8 as often as bf16")
    return False


def is_gated(model: str, ffn: int | None, hidden: int) -> bool:
    """Whether the MLP has three products: by the model's name, else if its width is not the usual 4 h."""
    name = model.lower()
    if any(word in name for word in _GATED):
        return True
    return not any(word in name for word in _UNGATED) and ffn is not None and ffn != 4 * hidden


def experts_of(row: Row, layers: int, hidden: int, heads: int, ranks: int) -> dict[str, Any]:
    """The fields of a run that describe experts: of a model that this project knows by name, empty for a dense model.
    ``ranks`` are those of a pipeline stage.

    Raises:
        Unpriceable: the columns do not describe the experts, and the model is not known or has another shape; or their
            ranks do not divide.
    """
    # "Mixtral 8x7B" is the preset mixtral-8x7b.
    name = re.sub(r"[\s_]+", "-", text(row, "model").lower())
    preset = next((PRESETS[known] for known in PRESETS if known in name and PRESETS[known].get("num_experts")), None)
    if preset is None:
        if whole(row, "ep", 1) > 1 or _EXPERTS.search(name):
            raise Unpriceable("the columns do not describe experts")
        return {}
    shape = tuple(preset[field] for field in ("num_layers", "hidden_size", "num_attention_heads"))
    if shape != (layers, hidden, heads):
        raise Unpriceable("the columns do not describe experts, and the shape is not that of the model of this name")
    ep = whole(row, "ep", 1)
    if ranks % ep or preset["num_experts"] % ep:
        raise Unpriceable(f"ep {ep} does not divide {ranks} ranks and {preset['num_experts']} experts")
    return {
        "num_experts": preset["num_experts"],
        "moe_topk": preset["moe_router_topk"],
        "moe_ffn": preset["moe_ffn_hidden_size"],
        "moe_layers": sum(parse_layer_pattern(preset.get("moe_layer_freq", "1"), layers)),
        "head_size": preset.get("kv_channels", 0),
        "shared_ffn": preset.get("moe_shared_expert_intermediate_size") or 0,
        "ep": ep,
    }


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
"""The software of each source."""
_ZERO_BUBBLE: Mapping[str, Schedule] = {
    "ZB-1p": "zb-h1",
    "ZB-2p": "zb-2p",
    "ZB (handcrafted": "zb-2p",
    "ZB (auto": "zb-2p",
}
"""Schedules by label; without a limit of the memory the schedules of the zero-bubble paper have next to no bubble."""
_OTHER_SCHEDULE = re.compile(r"\b(?:ZB(?:-\w+| \((?:handcrafted|auto))?|V-Half|V-Min|DualPipe\w*)\b")
_VOCAB = {"bloom": 250880}
_cached_cluster = cache(read_cluster)
_USUAL_VOCAB = 50304  # GPT-2's, padded


@dataclass(frozen=True)
class PublishedRun:
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
    """The measured time of a step; None if none is stated that makes sense."""
    for name in ("step_time_s", "tokens_per_s_per_gpu"):
        with suppress(Unpriceable):
            value = real(row, name)
            if value is not None:
                is_time = name == "step_time_s"
                return value if is_time else run.global_batch_size * run.seq_length / value / run.gpus
    return None


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
        **experts_of(row, layers, hidden, heads, layout["tp"] * layout["cp"] * layout["dp"]),
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


def _software(source: str, where: str) -> Software:
    """The software of a source; of one that is not known, what its text suggests, else Megatron Core's.

    Raises:
        Unpriceable: sharding that has no measurements with this software.
    """
    # An unknown source is priced by the software that its text names, else as NeMo.
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
