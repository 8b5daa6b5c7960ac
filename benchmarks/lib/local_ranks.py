"""Ranks on this machine for a benchmark, one thread each, which meet through gloo."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.commands.tool import run_tool
from megatron.urls import refuse_urls


def run_benchmark(flags: type[Any], work: Callable[[Any], None], description: str | None) -> int:
    """:func:`run_tool` for a benchmark that can write its figures to the local file ``--json``."""

    def checked(config: Any) -> None:
        refuse_urls({"--json": config.json}, "name a local file")
        work(config)

    return run_tool(flags, checked, description)


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
