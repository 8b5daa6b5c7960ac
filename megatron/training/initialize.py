"""The process, its device, and its place in the grid of ranks."""

import ctypes
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.config.parallel import ParallelConfig
from megatron.core.control import ControlGroup
from megatron.core.topology import RankGrid
from megatron.errors import ConfigError, RankError, UserError
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.namespace import fresh_namespace
from megatron.operation.waits import MeteredTopology
from megatron.torch_compat import release_meshes


@dataclass(frozen=True)
class Process:
    """The ranks of this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Processes on this node."""
    has_thread_count: bool = False
    """Whether OMP_NUM_THREADS is set."""

    @staticmethod
    def from_environment(environment: Mapping[str, str], num_spares: int = 0) -> "Process":
        """The ranks in the variables of torchrun, or a single process. The last ``num_spares`` ranks do not train."""
        return Process(
            int(environment.get("RANK", 0)),
            int(environment.get("LOCAL_RANK", 0)),
            int(environment.get("WORLD_SIZE", 1)) - num_spares,
            int(environment.get("LOCAL_WORLD_SIZE", 1)),
            "OMP_NUM_THREADS" in environment,
        )


def choose_device(wanted: str, process: Process) -> torch.device:
    """The device of this process for ``--device``."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("--device cuda needs a GPU, and torch finds none: use --device cpu.")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 1:
        # Each process may see a GPU of its own (srun --gpus-per-task 1); check_gpus_differ refuses a shared GPU.
        return torch.device("cuda", 0)
    if process.local_rank >= visible:
        raise RankError(
            f"{process.local_rank + 1} processes run on this node, but it has {visible} GPUs: start one process per "
            "GPU (torchrun --nproc-per-node)."
        )
    return torch.device("cuda", process.local_rank)


def check_gpus_differ(control: ControlGroup, device: torch.device) -> None:
    """Raise :class:`ConfigError` on all ranks if two use the same GPU, which NCCL does not support; a collective."""
    own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    rank_of: dict[tuple[str, str], int] = {}
    for rank, (host, uuid) in enumerate(control.all_gather_object(own)):
        first = rank_of.setdefault((host, uuid), rank)
        if first != rank:
            raise ConfigError(
                f"Ranks {first} and {rank} use the same GPU of {host} (GPU-{uuid}): start one process per GPU "
                "(torchrun --nproc-per-node), or set CUDA_VISIBLE_DEVICES to another GPU in each process."
            )


def rank_grid(parallel: ParallelConfig, world_size: int) -> RankGrid:
    data_parallel_size = parallel.data_parallel_size(world_size)
    return RankGrid(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        dp=data_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_size,
        dp_replicas=parallel.data_parallel_replicas(data_parallel_size),
        order=parallel.rank_order,
    )


@contextmanager
def init_distributed(
    parallel: ParallelConfig, process: Process, device: torch.device, heartbeat: Heartbeat | None = None
) -> Iterator[MeteredTopology]:
    """Initialise the process groups and destroy them in the end; ``heartbeat`` counts their collectives.

    After an error of this rank alone they are not destroyed: the other ranks may wait in a collective.
    """
    rank, world_size, on_gpu = process.rank, process.world_size, device.type != "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    backend = parallel.distributed_backend or ("nccl" if on_gpu else "gloo")
    if backend == "nccl" and not on_gpu:
        raise ConfigError("--distributed-backend nccl needs GPUs: use gloo, or remove the flag.")
    if backend == "gloo" and on_gpu:
        raise ConfigError("--distributed-backend gloo does not support GPU tensors: remove it, or add --device cpu.")
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if world_size > 1:
        # torchrun's agent keeps this store, with the keys of the ranks of earlier attempts.
        shared, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store = fresh_namespace(shared, rank, world_size, timeout)
        # Without device_id: torch would then split groups off the world's communicator, a collective of all ranks,
        # but only the members of a group create it.
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    grid, is_default = rank_grid(parallel, world_size), parallel.distributed_backend is None
    topology = MeteredTopology(heartbeat or Heartbeat(), grid, rank, device, timeout, is_default)
    try:
        topology.control.open()
        if on_gpu:
            check_gpus_differ(topology.control, device)
        yield topology
    except UserError as error:
        if not error.is_local:
            leave_groups()
        raise
    leave_groups()


def leave_groups() -> None:
    if dist.is_initialized():
        release_meshes()
        dist.destroy_process_group()


def prepare_cpu(process: Process) -> None:
    """Settings of a process that computes on the CPU.

    Without OMP_NUM_THREADS each rank uses its share of the cores. The process keeps freed memory, because returning and
    reallocating it in every step costs some 5 % (measured; Linux with glibc only).
    """
    if not process.has_thread_count:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // process.local_world_size))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # glibc's names for the two parameters
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)  # the largest that glibc accepts
