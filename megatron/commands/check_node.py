"""Check the nodes of a job before it trains: disk, clocks, memory, GPUs, a product and a sum of known bits, links.

    python tools/check_node.py --save runs/checkpoints
    python -m megatron.operation.launch --nproc-per-node 8 tools/check_node.py --save runs/checkpoints

Alone it checks one process of this machine, under a launcher all ranks on all nodes. The exit code is 0 if nothing
failed (there may be warnings), and 2 if somebody must act before a run. pretrain_llama.py --preflight runs the same
checks.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from megatron.errors import ExitCode, UserError, report
from megatron.flags import require_at_least
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class CheckNodeConfig:
    """What the run will need."""

    save: str | None = None
    """Directory of the checkpoints; without it no disk is checked."""
    checkpoint_gib: float = 0.0
    """Size of a checkpoint; two should fit. pretrain_llama.py --preflight computes it from its flags."""
    async_save: bool = False
    """Also require host memory for the part of a checkpoint that a node holds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto is on GPUs if there are any."""
    json: str | None = None
    """File for the results, as one JSON object."""

    def check(self) -> None:
        refuse_urls({"--save": self.save}, "use a directory")
        refuse_urls({"--json": self.json}, "name a local file")
        require_at_least(0, {"--checkpoint-gib": self.checkpoint_gib})


def check_nodes(config: CheckNodeConfig, rank: int, world_size: int) -> ExitCode:
    """Run the checks; rank 0 prints and writes the results."""
    from megatron.config.parallel import ParallelConfig
    from megatron.features.preflight.check import Board, Needs, Network, Verdict, failed_hosts, table, worst
    from megatron.features.preflight.run import run_preflight
    from megatron.torch_compat import ranks_store
    from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu

    process = Process.from_environment(os.environ)
    device = choose_device(config.device, process)
    if device.type == "cpu":
        prepare_cpu(process)
    size = int(config.checkpoint_gib * 2**30)
    save = None if config.save is None else Path(config.save)
    needs = Needs(save, size, size // world_size if config.async_save else 0)
    with init_distributed(ParallelConfig(), process, device) as topology:
        board = Board(ranks_store(), rank, world_size)
        preflight = run_preflight(board, device, Network(topology.world), needs)
        verdict = worst(preflight.results)
        code = ExitCode.ACTION_REQUIRED if verdict is Verdict.FAILURE else ExitCode.COMPLETE
        if rank == 0:
            print("\n".join(table(preflight.results)))
            hosts = ", ".join(failed_hosts(preflight.results))
            print(f"{verdict.value} after {preflight.seconds:.1f} s" + (f": do not use {hosts}" if hosts else ""))
            if config.json is not None:
                record = {
                    "host": socket.gethostname(),
                    "exit_code": int(code),
                    "seconds": round(preflight.seconds, 3),
                    "results": [one.to_json() for one in preflight.results],
                }
                Path(config.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            sys.stdout.flush()
        board.wait_for_rank0("printed")
        if code != ExitCode.COMPLETE:
            # At once: a thread of a check that has not ended may still wait for a rank or a file system.
            os._exit(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Check as ``arguments`` say (by default, the command line); the exit code."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        config = tyro.cli(CheckNodeConfig, description=__doc__, args=arguments)
        config.check()
        return check_nodes(config, rank, world_size)
    except UserError as error:
        report(error, rank, os.environ.get("TORCHELASTIC_ERROR_FILE"))
        return error.exit_code
