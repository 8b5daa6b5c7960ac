"""Ranks on this machine for a benchmark, one thread each, which meet through gloo."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from megatron.errors import ConfigError
from megatron.urls import refuse_urls


class WithFigures(Protocol):
    """Flags of a benchmark that can write its figures."""

    @property
    def json(self) -> str | None: ...


C = TypeVar("C", bound=WithFigures)


def parse(flags: type[C], description: str | None) -> C:
    """The flags of the command line; ends the process if they are wrong."""
    config = tyro.cli(flags, description=description)
    try:
        refuse_urls({"--json": config.json}, "name a local file")
    except ConfigError as error:
        sys.exit(f"ERROR: {error}")
    return config


def run_ranks(count: int, run_rank: Callable[..., object], *arguments: object) -> Any:
    """What ``run_rank(*arguments)`` returns on rank 0 of ``count`` joined processes; JSON."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_run_rank, args=(count, directory, run_rank, arguments), nprocs=count)  # type: ignore[attr-defined]
        return json.loads(Path(directory, "result.json").read_text())


def _run_rank(
    rank: int, count: int, directory: str, run_rank: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=count)
    result = run_rank(rank, *arguments)
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
