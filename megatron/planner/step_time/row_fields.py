"""The cells of a row of published runs, which strangers write: numbers, and what names of models and GPUs state."""

import math
import re
from collections.abc import Mapping
from typing import Any

from megatron.architectures.layer_pattern import parse_layer_pattern
from megatron.architectures.registry import PRESETS
from megatron.planner.step_time.cluster import Cluster

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


def measured_number(row: Row, name: str) -> float | None:
    """A measured value, None if there is none that makes sense."""
    try:
        return real(row, name)
    except Unpriceable:
        return None


def cluster_name(source: str, gpu: str) -> str:
    """The file of a GPU; raises :class:`Unpriceable` for GPUs without measurements."""
    if source == "bloom":
        return "jean-zay-a100"
    if gpu in CLUSTERS:
        return CLUSTERS[gpu]
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


def experts_of(row: Row, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The fields of a run that describe experts: of a model that this project knows by name, empty for a dense model.

    Raises:
        Unpriceable: the columns do not describe the experts, and the model is not known or has another shape.
    """
    name = re.sub(r"[\s_]+", "-", text(row, "model").lower())
    preset = next((PRESETS[known] for known in PRESETS if known in name and PRESETS[known].get("num_experts")), None)
    if preset is None:
        if whole(row, "ep", 1) > 1 or _EXPERTS.search(name):
            raise Unpriceable("the columns do not describe experts")
        return {}
    shape = tuple(preset[field] for field in ("num_layers", "hidden_size", "num_attention_heads"))
    if shape != (layers, hidden, heads):
        raise Unpriceable("the columns do not describe experts, and the shape is not that of the model of this name")
    return {
        "num_experts": preset["num_experts"],
        "moe_topk": preset["moe_router_topk"],
        "moe_ffn": preset["moe_ffn_hidden_size"],
        "moe_layers": sum(parse_layer_pattern(preset.get("moe_layer_freq", "1"), layers)),
        "head_size": preset.get("kv_channels", 0),
        "shared_ffn": preset.get("moe_shared_expert_intermediate_size") or 0,
        "ep": whole(row, "ep", 1),
    }
