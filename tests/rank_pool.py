"""Real ranks for tests: started once a session, for the cases of all modules.

A case is a module-level function ``case(*arguments)`` that runs on ranks ``0..world_size-1`` of the pool; the
others stay idle, so one pool serves every smaller world too.
"""

import io
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.forked import fork_context

START_TIMEOUT = 120.0
MOST_THREADS = 120
"""Threads of a rank after which the pool gets new processes. Every process group costs some, and topologies that tests
keep in one world keep theirs; with hundreds of threads per rank a collective takes seconds."""


class RankPool:
    """Up to ``size`` processes, joined by gloo in worlds; each starts when it is first needed. They share memory,
    unless the ``transport`` is gloo.

    After a case that failed, or that left many threads, the next one gets new processes. Close the pool at the end, or
    use ``with``.
    """

    def __init__(self, size: int, directory: Path, transport: str = "shared-memory") -> None:
        self.size = size
        self._transport = transport
        self._directory = directory
        self._world_size = 0
        self._generation = 0
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start(self, count: int) -> None:
        """Have at least ``count`` processes."""
        assert count <= self.size, (count, self.size)
        context = fork_context()
        for rank in range(len(self._processes), count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self._transport), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, case: Callable[..., Any], *arguments: Any, world_size: int | None = None, timeout: float = 240.0
    ) -> list[Any]:
        """Run ``case`` on a world of ``world_size`` ranks; the results, by rank.

        Raises :class:`RuntimeError` with every failing rank's traceback, or its failure to answer in time.
        """
        world_size = world_size or self.size
        self._start(world_size)
        if world_size != self._world_size:
            self._world_size = world_size
            self._generation += 1
            timeout += START_TIMEOUT
        store = str(self._directory / f"store{self._generation}")
        try:
            for pipe in self._pipes[:world_size]:
                pipe.send((case, arguments, world_size, store))
            return self._collect(world_size, timeout)
        except BaseException:
            # Also an interruption by a time limit: an answer that comes late must not be taken for the next case's.
            self.close()
            raise

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        results: list[Any] = []
        failures: list[str] = []
        most_threads = 0
        for rank, pipe in enumerate(self._pipes[:world_size]):
            # Once one rank has failed, the others may wait for it in vain.
            if not pipe.poll(5.0 if failures else timeout):
                failures.append(f"rank {rank} did not answer")
                continue
            error, value, threads = pickle.loads(pipe.recv_bytes())
            results.append(value)
            most_threads = max(most_threads, threads)
            if error:
                failures.append(f"rank {rank}:\n{error}")
        if failures:
            raise RuntimeError("\n".join(failures))
        if most_threads > MOST_THREADS:
            self.close()
        return results

    def close(self) -> None:
        """End every rank; the next case starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._world_size = [], [], 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(rank: int, pipe: Connection, transport_name: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from megatron.core import transport

    torch.set_num_threads(1)
    if transport_name == "gloo":
        transport.LARGEST_GROUP = 0  # no group shares memory
    current_store = None
    while True:
        try:
            case, arguments, world_size, store = pipe.recv()
        except EOFError:
            return
        try:
            if store != current_store:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
                current_store = store
            answer = _pickled((None, case(*arguments), len(os.listdir("/proc/self/task"))))
        except BaseException:
            answer = _pickled((traceback.format_exc(), None, 0))
        pipe.send_bytes(answer)


def _pickled(value: object) -> bytes:
    """With tensors by value: torch would send a descriptor of shared memory for each, which takes as long as a step."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, found: object) -> Any:
            if not isinstance(found, torch.Tensor):
                return NotImplemented
            return _tensor, (found.detach().reshape(-1).view(torch.uint8).numpy(), found.dtype, found.shape)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def _tensor(content: Any, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.from_numpy(content).view(dtype).view(shape)
