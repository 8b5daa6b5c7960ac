"""What the launcher must know of the run that its ranks train."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.operation import OperationConfig
from megatron.config.run import RunConfig


def run_directory(config: RunConfig) -> Path | None:
    """The directory for the records of a run: ``--run-dir``, else ``--save``; None without either."""
    place = config.operation.run_dir or config.checkpoint.save
    return None if place is None else Path(place)


def run_directory_in(arguments: Sequence[str]) -> Path | None:
    """:func:`run_directory` in a command line, for the launcher, which does not parse the flags of the run."""
    found = {}
    for flag, following in zip(arguments, [*arguments[1:], ""]):
        name, _, value = flag.partition("=")
        found[name.replace("_", "-")] = value or following
    place = found.get("--run-dir") or found.get("--save")
    return None if not place else Path(place).absolute()


@dataclass(frozen=True)
class RunSettings:
    """Written by each rank into its slot (:mod:`megatron.operation.heartbeat`)."""

    rank: int
    world_size: int
    run_dir: str | None
    """Absolute path of the run directory."""
    operation: OperationConfig
    hosts: tuple[str, ...] = ()
    """Of all ranks, each once, cut to the first 4,000 characters; rank 0 alone knows them."""
    dataloader_timeout: float | None = None
    """``--dataloader-timeout``, if given."""

    @classmethod
    def of(cls, config: RunConfig, rank: int, world_size: int) -> "RunSettings":
        directory = run_directory(config)
        place = None if directory is None else os.path.abspath(directory)
        return cls(rank, world_size, place, config.operation, dataloader_timeout=config.data.dataloader_timeout)

    def to_json(self) -> dict[str, Any]:
        """The inverse of :meth:`from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunSettings | None":
        """The settings of a slot; None before the rank has written them."""
        if "rank" not in values:
            return None
        # The code may have been replaced since the launcher was started: ranks may have other flags.
        known = {item.name for item in dataclasses.fields(OperationConfig)}
        operation = OperationConfig(**{name: value for name, value in values["operation"].items() if name in known})
        hosts, timeout = tuple(values.get("hosts", ())), values.get("dataloader_timeout")
        return cls(values["rank"], values["world_size"], values["run_dir"], operation, hosts, timeout)
