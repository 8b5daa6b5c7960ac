"""A rank of a contender of benchmarks/peers.py: reads commands as JSON lines, and answers each with a JSON line.

    {"build": {...}}  ->  {"built": true}                    the fields of Job
    {"steps": 2}      ->  {"seconds": 0.9, "losses": [...]}  seconds of all steps; this rank's share of every loss
    {"end": true}     ->  (the process ends)

An error is answered with ``{"error": "TypeError: ..."}``. The module runs in the environment of its contender, and
imports torch, safetensors and the module ``benchmarks.peer_NAME`` alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, MAX_NORM = 1e-4, (0.9, 0.999), 1e-8, 0.01, 1.0


@dataclass(frozen=True)
class Job:
    """What a rank trains."""

    peer: str
    """Name of the module ``benchmarks.peer_NAME``."""
    layout: str
    """one, dp, fsdp, tp, pp or cp."""
    ranks: int
    rank: int
    store: str
    """File through which the ranks find each other."""
    device: str
    """Type of the device: cpu or cuda."""
    dtype: str
    micro_batch_size: int
    """Sequences of a microbatch on one rank."""
    model: dict[str, Any]
    """The fields of Hugging Face's ``config.json``."""
    weights: str
    """Directory with ``model.safetensors`` in Hugging Face's names and ``batches.safetensors`` [batches, b, s + 1]."""
    is_compiled: bool = False
    variant: str = ""
    """What differs from the peer's other contender in the layout."""

    @property
    def autocast(self) -> torch.autocast:
        """Computes in the dtype of the job with weights that are kept in fp32."""
        return torch.autocast(self.device, self.torch_dtype, enabled=self.dtype != "fp32")

    def size(self, layout: str) -> int:
        """Number of ranks along the axis of ``layout``."""
        return self.ranks if self.layout == layout else 1

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", self.rank) if self.device == "cuda" else torch.device("cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return DTYPES[self.dtype]

    def read_weights(self) -> dict[str, Tensor]:
        """The start weights by Hugging Face's names, in the dtype and on the device of the job."""
        weights = _read(f"{self.weights}/model.safetensors")
        return {name: weight.to(self.torch_device, self.torch_dtype) for name, weight in weights.items()}

    def read_batches(self) -> Iterator[Tensor]:
        """The batches ``[b, s + 1]``, again and again."""
        return cycle(_read(f"{self.weights}/batches.safetensors")["batches"].to(self.torch_device))

    def microbatches(self, batch: Tensor) -> tuple[Tensor, ...]:
        """This data-parallel rank's microbatches ``[micro-batch size, s + 1]``."""
        replicas = self.size("dp") * self.size("fsdp")
        mine = batch.chunk(replicas)[self.rank] if replicas > 1 else batch
        return mine.split(self.micro_batch_size)


def _read(path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


Step = Callable[[Tensor], float]
"""Trains on a batch ``[b, s + 1]`` that all ranks have; returns a share of its loss: the shares of all ranks add up to
the mean over the tokens of the batch."""


def adamw(parameters: Iterable[nn.Parameter], fused: bool = True) -> torch.optim.AdamW:
    """torch's AdamW with the hyperparameters of all contenders; norm weights have no weight decay."""
    every = list(parameters)
    groups = [
        {"params": [one for one in every if one.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in every if one.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=fused)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


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
            from benchmarks import peer_ours

            return peer_ours.build(job)
        case "megatron_core":
            from benchmarks import peer_megatron_core

            return peer_megatron_core.build(job)
        case "transformers":
            from benchmarks import peer_transformers

            return peer_transformers.build(job)
        case "torchtitan":
            from benchmarks import peer_torchtitan

            return peer_torchtitan.build(job)
        case "olmo_core":
            from benchmarks import peer_olmo_core

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
