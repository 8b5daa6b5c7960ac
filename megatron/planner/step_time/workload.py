"""One training step to price: shapes, layout and software, and the cluster that it runs on.

:class:`Run` is one step. :class:`Workload` has many of them as arrays, so that one evaluation of the formulas prices
thousands of layouts, or all published runs at once.

A :class:`Cluster` describes GPUs and the networks between them, and is read from a TOML file with the fields of the
class but its name. ``base`` names another file, or several: their values apply where the file has none, of the last one
first. The table ``[sources]`` has a line for each constant, with a date. The table ``[constants]`` replaces fitted
constants (:mod:`megatron.planner.step_time.prices`); a calibration writes it.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

Attention = Literal["unfused", "flash", "cudnn"]
Elementwise = Literal["megatron-2021", "transformer-engine", "compiled", "eager"]
Sharding = Literal["none", "optimizer", "fsdp1", "fsdp2"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "zb-h1", "zb-2p"]


TERMS = (
    "products",
    "attention",
    "between products",
    "recompute",
    "tensor parallelism",
    "context parallelism",
    "expert parallelism",
    "gaps",
    "output layer",
    "pipeline messages",
    "bubble",
    "data parallelism",
    "optimizer",
)
"""Causes of a step's time, in the order in which they are shown."""

CLUSTERS = Path(__file__).parents[1] / "clusters"
"""The files of the clusters that are known by name."""

GENERATIONS = ("ampere", "hopper", "blackwell", "cpu")
"""Architectures that efficiencies belong to. There are fitted ones of GPUs; a calibrated file has those of ``cpu``."""

_TABLES = ("sources", "constants")
_LARGEST = 1e30  # no figure of a machine is as large; products of several stay finite


@dataclass(frozen=True)
class Cluster:
    """One kind of GPU and its links.

    Rates are the vendor's figures, per GPU and direction. The fitted constants are the shares of them that training
    reaches.
    """

    name: str
    generation: str
    """Architecture of the GPU, one of :data:`GENERATIONS`."""
    bf16_flops: float
    """Dense tensor-core FLOP/s in bf16 and fp16."""
    fp8_flops: float
    """Dense tensor-core FLOP/s in FP8; 0 if the GPU has none."""
    hbm_bytes_per_s: float
    multiprocessors: int
    memory_gib: float
    node_size: int
    """GPUs that the fast link connects."""
    link_bytes_per_s: float
    """NVLink."""
    network_bytes_per_s: float
    """Network adapters."""
    price_per_gpu_hour: float | None = None
    """US dollars; None where no public price is known."""
    gpu_hours_per_failure: float | None = None
    """GPU-hours of a run between failures that stop it."""
    oversubscription: float = 1.0
    """The rate of the adapters of a pod, divided by that of its links to other pods."""
    pod_size: int | None = None
    """GPUs between which the network has its full rate; None for all."""
    host_link_bytes_per_s: float = 6.4e10
    """Between a GPU and its host; the default is PCIe 5 (NVIDIA H100 data sheet, 2023)."""
    host_memory_bytes_per_s: float = 7.68e10
    """A GPU's share of the host's memory; the default is sixteen channels of DDR5-4800 for eight GPUs (DGX H100 user
    guide, 2022)."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The source of each constant, with a date."""
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Values that replace fitted constants."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """What the time of a step depends on besides shapes and layout."""

    attention: Attention
    """Kernels of attention: batched products and a softmax; FlashAttention 2 or Triton; cuDNN."""
    elementwise: Elementwise
    """The fusion of operations between the products."""
    sharding: Sharding = "none"
    """Sharded over the data-parallel ranks: nothing, optimizer state, or everything by FSDP 1 or 2."""
    main_grad_bytes: int = 4
    """Bytes per parameter that a weight gradient reads and writes when it is accumulated."""
    overlaps_tensor_parallel: bool = False
    overlaps_data_parallel: bool = False
    keeps_weights_gathered: bool = False
    """FSDP that does not gather the weights again for the backward pass."""
    recomputes_products: bool = False
    """Whether selective recompute runs half of the products again, and not attention alone."""
    has_deepspeed_pipeline: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training step."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    is_gated: bool
    """Whether the MLP has three products (SwiGLU) instead of two."""
    vocab: int
    seq_length: int
    gpus: int
    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Chunks of a stage; 1 without interleaving."""
    cp: int = 1
    dp: int = 1
    micro_batch_size: float = 1.0
    global_batch_size: int
    is_fp8: bool = False
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"
    head_size: int = 0
    """Head size of attention; 0 means ``hidden / heads``."""
    num_experts: int = 0
    """Experts of a MoE layer; 0 for a dense model."""
    moe_topk: int = 0
    """Experts that a token uses."""
    moe_ffn: int = 0
    """Width of an expert."""
    shared_ffn: int = 0
    """Width of the expert that every token uses; 0 without one."""
    moe_layers: int = 0
    """MoE layers among the ``layers``; the MLPs of the others are ``ffn`` wide."""
    ep: int = 1
    software: Software
    cluster: Cluster


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, and what they consist of; arrays ``[runs]``."""

    total: Array
    terms: dict[str, Array]
    """Seconds by cause, one of :data:`TERMS`; their sum is ``total``."""
    passes: Array | None = None
    """``[3, 3, runs]``, for runs of this project: forward, backward and weight-gradient seconds of a microbatch in the
    first, an inner and the last virtual stage."""


class Workload:
    """Runs as arrays of one element per run; ``[runs]``."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self._values = [vars(run.cluster) | vars(run.software) | vars(run) for run in runs]

    def number(self, name: str) -> Array:
        """A field of the runs, their software or their clusters, by name."""
        return np.array([float(values[name]) for values in self._values])

    def where(self, name: str, value: Any = True) -> Mask:
        """Which runs have this value of a field."""
        return np.array([values[name] == value for values in self._values])


# --- files of clusters ----------------------------------------------------------------------------------------


def read_cluster(place: str | Path) -> Cluster:
    """The cluster of a file, or of a name in :data:`CLUSTERS`; raises :class:`ConfigError`."""
    path = _file_of(place)
    values = _read(path, ())
    _check(path, values)
    return Cluster(path.stem, **values)


def cluster_names() -> list[str]:
    """The clusters that :func:`read_cluster` knows by name."""
    return sorted(file.stem for file in CLUSTERS.glob("*.toml"))


def _file_of(place: str | Path) -> Path:
    path = Path(place)
    if path.suffix != ".toml":
        path = CLUSTERS / f"{place}.toml"
    if not path.is_file():
        raise ConfigError(
            f"There is no cluster {place}: use the path of a TOML file, or one of {', '.join(cluster_names())}."
        )
    return path


def _read(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file on top of those of its bases; ``readers`` are the files that name it as base."""
    if path in readers:
        raise ConfigError(f"{path} is its own base ({' -> '.join(map(str, (*readers, path)))}): remove one.")
    try:
        own: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file ({error}): correct it.") from error
    base = own.pop("base", [])
    files = [_base_of(path, name) for name in (base if isinstance(base, list) else [base])]
    # From the bases to the file itself: later values replace earlier ones.
    return _merge([*(_read(file, (*readers, path)) for file in files), own], path)


def _base_of(path: Path, name: Any) -> Path:
    """The file of a base: beside the file that names it, or known by name."""
    if not isinstance(name, str):
        raise ConfigError(f"{path} has the base {name!r}: use the name of a cluster, or a list of names.")
    beside = path.parent / (name if name.endswith(".toml") else f"{name}.toml")
    return beside if beside.is_file() else _file_of(name)


def _merge(layers: Iterable[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The last value of every field; tables are merged line by line."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if name in _TABLES and not isinstance(value, dict):
                raise ConfigError(
                    f"{path} has {name} that are no table: write [{name}] and one line for each constant."
                )
            merged[name] = {**merged.get(name, {}), **value} if name in _TABLES else value
    return merged


def _check(path: Path, values: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for a field that is unknown, missing or of another type."""
    known = {one.name: one for one in fields(Cluster) if one.name != "name"}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{path} has {', '.join(unknown)}, which a cluster file does not have: remove it.")
    required = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: add it, or a base that has it (see {CLUSTERS}).")
    if values["generation"] not in GENERATIONS:
        raise ConfigError(f"{path} has generation {values['generation']!r}: use one of {', '.join(GENERATIONS)}.")
    for name, value in values.items():
        if name not in (*_TABLES, "generation"):
            _check_number(path, name, value, may_be_zero=name == "fp8_flops")
    for name, value in values.get("constants", {}).items():
        _check_number(path, f"constants.{name}", value, may_be_zero=True)


def _check_number(path: Path, name: str, value: Any, may_be_zero: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < _LARGEST or (may_be_zero and value == 0)):
        raise ConfigError(f"{path} has {name} = {value!r}: use a number above 0 and below {_LARGEST:g}.")
