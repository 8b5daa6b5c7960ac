"""Measurements of a machine: its prices for the planner, and the checks of its nodes before a job."""

import datetime
import os
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from megatron.commands.tool import run_on_ranks, run_tool, write_file, write_json
from megatron.config.checks import check_run
from megatron.errors import ConfigError, ExitCode
from megatron.flags import require_at_least
from megatron.operation.processes import available_cores
from megatron.urls import refuse_urls

# --- calibration ---------------------------------------------------------------------------------------------

CALIBRATE = """\
Measure a machine and write a cluster file for the planner: products, attention, copies, collectives, whole steps.

    torchrun --nproc-per-node 8 tools/calibrate_cluster.py --out my_cluster.toml --base h100
    torchrun --nproc-per-node 2 tools/calibrate_cluster.py --out my_cpu.toml --device cpu
    python tools/calibrate_cluster.py --out my_cpu.toml --device cpu

Start one process for each GPU of a node, better of two nodes: then the network is measured, too. All of them compute at
the same time, as in training. One process alone measures no collectives. On a GPU, --base names the cluster whose peaks
and links the measured shares refer to. On CPUs the file holds for this number of processes on this machine. It takes
about two minutes; --turns 3 is quicker and noisier. docs/planner.md describes the constants.
"""
"""Text of ``tools/calibrate_cluster.py --help``."""
SMALL_MODEL = (
    "--num-layers 1 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 16 --kv-channels 16 "
    "--vocab-size 2048 --seq-length 256"
)
"""The model that is measured on CPUs."""
LARGE_MODEL = "--model llama3.1-8b --seq-length 8192"


@dataclass(frozen=True)
class CalibrateConfig:
    """Where to write, and what to measure."""

    out: str
    """Cluster file to write; name it in --cluster of tools/plan_layout.py."""
    base: str | None = None
    """Cluster file or name with the vendor's figures of this GPU; needed on GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto is on GPUs if there are any."""
    flags: str | None = None
    """Flags of the model to train, as pretrain_llama.py takes them, with an equals sign:
    --flags="--model llama3.1-8b --seq-length 8192 --bf16" (default: Llama 3.1 8B with 8,192 tokens, on CPUs a
    small model with 256). The products, the attention and the steps have its sizes; its number of layers has no
    effect."""
    batches: tuple[int, ...] = (1, 4)
    """Sequences of a microbatch to measure; the steps of the largest must fit in memory."""
    turns: int = 7
    """How often to measure everything; the medians count."""

    def check(self) -> None:
        refuse_urls({"--out": self.out, "--base": self.base}, "use a local file")
        require_at_least(1, {"--turns": self.turns})
        for batch in self.batches:
            require_at_least(1, {"--batches": batch})
        if not self.batches:
            raise ConfigError("--batches is empty: give at least one number of sequences.")


def calibrate(config: CalibrateConfig) -> str | None:
    """Measure; rank 0 returns the text of the cluster file."""
    import torch
    from tqdm import tqdm

    from megatron.config.command_line import parse_command_line
    from megatron.config.parallel import ParallelConfig
    from megatron.planner.calibration.fit import calibrated, cluster_file
    from megatron.planner.calibration.measure import Effort, Plan, Ranks, measure, number_of_operations
    from megatron.planner.step_time.workload import read_cluster
    from megatron.training.build.vocabulary import planned_vocabulary
    from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu

    process = Process.from_environment(os.environ)
    device = choose_device(config.device, process)
    is_cpu = device.type == "cpu"
    if is_cpu and config.base is not None:
        raise ConfigError("--base is for GPUs: remove it; a calibration on CPUs measures all constants.")
    if is_cpu and process.local_world_size > available_cores():
        raise ConfigError(
            f"{process.local_world_size} processes on {available_cores()} cores would measure the scheduler: start one "
            "for each core. The planner divides the rates where more ranks share a core."
        )
    if not is_cpu and config.base is None:
        raise ConfigError("--base is missing: name the cluster file of this GPU, such as --base h100.")
    base = None if config.base is None else read_cluster(config.base)
    # A step must fit on one rank, and be large enough for the rates of training.
    words = (config.flags or (SMALL_MODEL if is_cpu else f"{LARGE_MODEL} --bf16")).split()
    flags = f"--mock-data --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 --device {device.type}"
    run = parse_command_line([*words, *flags.split()])
    check_run(run, 1)
    plan = Plan(run, planned_vocabulary(run).size, device, Effort(turns=config.turns), config.batches)
    if is_cpu:
        prepare_cpu(process)
    else:
        plan = plan.for_gpus()
    with init_distributed(ParallelConfig(), process, device) as topology:
        control = topology.control if process.world_size > 1 else None
        ranks = Ranks(process.rank, process.world_size, process.local_world_size, control)
        total = number_of_operations(plan, ranks)
        with torch.random.fork_rng(devices=[]), tqdm(total=total, disable=process.rank > 0, unit="operation") as bar:

            def advance(what: str) -> None:
                bar.set_description(what, refresh=False)
                bar.update()

            measured = measure(plan, ranks, advance)
        if process.rank:
            return None  # all ranks have measured, one writes
        host_memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        found = calibrated(plan, measured, base, host_memory_gib / process.local_world_size, ranks)
        machine = f"{process.world_size} processes, {process.local_world_size} on each node, {device.type}"
        if is_cpu:
            machine += f", {available_cores()} cores"
        return cluster_file(found, measured, config.base, datetime.date.today().isoformat(), machine)


def write(config: CalibrateConfig) -> None:
    """Measure, write and print the file."""
    config.check()
    text = calibrate(config)
    if text is not None:
        write_file("--out", config.out, text)
        print(text)


main_calibrate = partial(run_tool, CalibrateConfig, write, CALIBRATE)


# --- checks --------------------------------------------------------------------------------------------------

CHECK = """\
Check the nodes of a job before it trains: disk, clocks, memory, GPUs, a product and a sum of known bits, links.

    python tools/check_node.py --save runs/checkpoints
    python -m megatron.operation.launch --nproc-per-node 8 tools/check_node.py --save runs/checkpoints

Alone it checks one process of this machine, under a launcher all ranks on all nodes. The exit code is 0 if nothing
failed (there may be warnings), and 2 if somebody must act before a run. pretrain_llama.py --preflight runs the same
checks.
"""
"""Text of ``tools/check_node.py --help``."""


@dataclass(frozen=True)
class CheckNodeConfig:
    """The needs of the run."""

    save: str | None = None
    """Directory of the checkpoints; without it no disk is checked."""
    checkpoint_gib: float = 0.0
    """Size of a checkpoint; two should fit. pretrain_llama.py --preflight computes it from its flags."""
    async_save: bool = False
    """Also require host memory for the part of a checkpoint that a node holds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: GPUs if there are any."""
    json: str | None = None
    """File for the results, as one JSON object."""

    def check(self) -> None:
        refuse_urls({"--save": self.save}, "use a directory")
        refuse_urls({"--json": self.json}, "name a local file")
        require_at_least(0, {"--checkpoint-gib": self.checkpoint_gib})


def check_nodes(config: CheckNodeConfig, rank: int) -> ExitCode:
    """Run the checks; rank 0 prints and writes the results."""
    from megatron.config.parallel import ParallelConfig
    from megatron.features.preflight.check import Board, Needs, Network, Verdict, failed_hosts, table, worst
    from megatron.features.preflight.run import run_preflight
    from megatron.torch_compat import ranks_store
    from megatron.training.initialize import Process, choose_device, init_distributed, prepare_cpu

    config.check()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
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
                write_json(config.json, record)
            sys.stdout.flush()
        board.wait_for_rank0("printed")
        if code != ExitCode.COMPLETE:
            # At once: a thread of a check that has not ended may still wait for a rank or a file system.
            os._exit(code)
    return code


main_check = partial(run_on_ranks, CheckNodeConfig, check_nodes, CHECK)
