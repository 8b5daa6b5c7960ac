"""Descriptions of GPUs and of the networks between them, read from TOML files.

A file has the fields of :class:`Cluster` but its name. ``base`` names another file, or several: their values apply
where the file has none, of the last one first. The table ``[sources]`` has a line for each constant, with a date. The
table ``[constants]`` replaces fitted constants (:mod:`megatron.planner.step_time.prices`); a calibration writes it.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError

CLUSTERS = Path(__file__).parents[1] / "clusters"
"""The files of the clusters that are known by name."""

GENERATIONS = ("ampere", "hopper", "blackwell", "cpu")
"""Architectures that efficiencies belong to. There are fitted ones of GPUs; a calibrated file has those of ``cpu``."""

_TABLES = ("sources", "constants")


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
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """By constant: where it is from, with a date."""
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Values that replace fitted constants."""


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
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a TOML file ({error}): correct it.") from error
    base = own.pop("base", [])
    files = [_base_of(path, name) for name in (base if isinstance(base, list) else [base])]
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
    if not is_number or not (value > 0 or (may_be_zero and value == 0)):
        raise ConfigError(f"{path} has {name} = {value!r}: use a number above 0.")
