"""Descriptions of GPUs and of the networks between them, read from TOML files."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError

CLUSTERS = Path(__file__).parents[1] / "clusters"
"""The files of the clusters that are known by name."""


@dataclass(frozen=True)
class Cluster:
    """One kind of GPU and its links.

    Rates are the vendor's figures, per GPU and direction. The fitted constants are the shares of them that training
    reaches.
    """

    name: str
    generation: str
    """Architecture of the GPU: ``ampere``, ``hopper`` or ``blackwell``. Fitted efficiencies belong to a generation."""
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
    is_power_limited: bool = False
    """Whether the GPU's power limit is well below that of the usual part."""


def read_cluster(place: str | Path) -> Cluster:
    """The cluster of a file, or of a name in :data:`CLUSTERS`; raises :class:`ConfigError`."""
    path = Path(place)
    if path.suffix != ".toml":
        path = CLUSTERS / f"{place}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CLUSTERS.glob("*.toml")))
        raise ConfigError(f"There is no cluster {place}: use the path of a TOML file, or one of {known}.")
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a TOML file ({error}): correct it.") from error
    values.pop("sources", None)
    known_fields = {field.name for field in fields(Cluster)} - {"name"}
    unknown = sorted(set(values) - known_fields)
    if unknown:
        raise ConfigError(f"{path} has {', '.join(unknown)}, which a cluster file does not have: remove it.")
    try:
        return Cluster(path.stem, **values)
    except TypeError as error:
        raise ConfigError(f"{path} is not a complete cluster file ({error}): see {CLUSTERS}.") from error
