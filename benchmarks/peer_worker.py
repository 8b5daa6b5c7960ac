"""A rank of a contender of benchmarks/peers.py: reads commands as JSON lines, and answers each with a JSON line.

    {"build": {...}}  ->  {"built": true}                    the fields of Job
    {"steps": 2}      ->  {"seconds": 0.9, "losses": [...]}  seconds of all steps; this rank's share of every loss
    {"end": true}     ->  (the process ends)

An error is answered with ``{"error": "TypeError: ..."}``. The module runs in the environment of its contender, and
imports torch, safetensors, ``benchmarks.lib.peers.job`` and the module ``benchmarks.peer_NAME`` alone.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.peers.job import Job, Step


def answer(job: Job) -> tuple[Step, Iterator[Tensor]]:
    """Join the ranks, and build the step."""
    if job.device == "cuda":
        if torch.cuda.device_count() < job.ranks:
            raise RuntimeError(f"{job.ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}")
        torch.cuda.set_device(job.rank)
    os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(job.ranks)}
    os.environ["LOCAL_WORLD_SIZE"] = str(job.ranks)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{job.store}", rank=job.rank, world_size=job.ranks)
    return build_step(job), job.read_batches()


def build_step(job: Job) -> Step:
    """The step of a peer; only its module is imported, since each environment has the packages of one peer."""
    match job.peer:
        case "ours":
            from benchmarks.lib.peers import ours as peer_ours

            return peer_ours.build(job)
        case "megatron_core":
            from benchmarks.lib.peers import megatron_core as peer_megatron_core

            return peer_megatron_core.build(job)
        case "transformers":
            from benchmarks.lib.peers import transformers as peer_transformers

            return peer_transformers.build(job)
        case "torchtitan":
            from benchmarks.lib.peers import torchtitan as peer_torchtitan

            return peer_torchtitan.build(job)
        case "olmo_core":
            from benchmarks.lib.peers import olmo_core as peer_olmo_core

            return peer_olmo_core.build(job)
    raise ValueError(f"no peer {job.peer}")


def timed_steps(step: Step, batches: Iterator[Tensor], count: int) -> dict[str, Any]:
    """The seconds of ``count`` steps that all ranks start together, and this rank's shares of the losses."""
    if dist.get_world_size() > 1:
        dist.barrier()
    wait_for_device()
    start = time.perf_counter()
    losses = [step(next(batches)) for _ in range(count)]
    wait_for_device()
    return {"seconds": time.perf_counter() - start, "losses": losses}


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def serve(commands: TextIO, replies: TextIO) -> None:
    """Answer the commands until the last."""
    step, batches = None, None
    for line in commands:
        command = json.loads(line)
        if "end" in command:
            return
        try:
            if "build" in command:
                step, batches = answer(Job(**command["build"]))
                reply: dict[str, Any] = {"built": True}
            else:
                assert step is not None and batches is not None
                reply = timed_steps(step, batches, command["steps"])
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    """Serve on the process's standard output; what libraries print goes to the standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, replies)
    replies.flush()
    os._exit(0)  # no waits of process groups for ranks that have ended


if __name__ == "__main__":
    main()
