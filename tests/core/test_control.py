"""The control group: objects, and waits that outlive the timeout of training, but not a rank that ends."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.core.control import CONTROL_TIMEOUT, ControlGroup, run_on_all_ranks, run_on_rank0
from megatron.core.topology import RankGrid, Topology
from megatron.operation.processes import prepare_environment
from megatron.torch_compat import fake_store, ranks_store, set_group_timeout
from tests.forked import fork_context
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
PATIENCE = 240.0
"""Seconds after which a rank counts as waiting for hours."""


def exchange_objects() -> tuple[list[object], object]:
    control = Topology(RankGrid(tp=2, dp=2), dist.get_rank(), CPU).control
    mine = {"rank": control.rank, "text": "x" * control.rank}
    return control.all_gather_object(mine), control.broadcast_object(mine, source=1)


def test_objects_come_in_rank_order_and_from_their_source(four_ranks: RankPool) -> None:
    objects = [{"rank": rank, "text": "x" * rank} for rank in range(4)]
    assert four_ranks.run(exchange_objects, world_size=4) == [(objects, objects[1])] * 4


def test_a_single_rank_needs_no_process_group() -> None:
    alone = ControlGroup((5,), 5)
    alone.open()
    assert alone.process_group is None
    assert alone.all_gather_object("x") == ["x"]
    assert alone.broadcast_object("x") == "x"


def wait_for_long_work(timeout: float, work: float) -> tuple[str, str]:
    """Rank 0 works for ``work`` seconds under the control group, and then comes to a collective of training only when
    rank 1 has given it up, however late rank 1 came to it."""
    topology = Topology(RankGrid(tp=2, dp=2), dist.get_rank(), CPU)
    ranks = topology.tensor_parallel
    # Not before: connections may take longer on a busy machine, and ranks may connect at their first message.
    dist.barrier(group=ranks.process_group)
    # Ranks 2 and 3 come to their collective alone, and have time for it.
    set_group_timeout(ranks.process_group, timedelta(seconds=timeout if topology.rank < 2 else PATIENCE))

    def build() -> str:
        time.sleep(work)
        return "built"

    built = run_on_rank0(topology.control, build)
    given_up = "rank 1 has given up"
    try:
        if topology.rank == 0:
            ranks_store().wait([given_up], timedelta(seconds=PATIENCE))
        ranks.all_reduce(torch.ones(1))
    except RuntimeError as error:
        ranks_store().set(given_up, "")
        return built, str(error)
    return built, "no error"


def test_long_work_of_rank_0_times_out_in_training_alone(four_ranks: RankPool) -> None:
    (_, *others) = four_ranks.run(wait_for_long_work, 2.0, 3.0, world_size=4, timeout=2 * PATIENCE)
    assert [built for built, _ in others] == ["built"] * 3
    assert "Timed out" in others[0][1]  # rank 1 waits for rank 0; ranks 2 and 3 have a group of their own
    assert [error for _, error in others[1:]] == ["no error"] * 2


def join(rank: int, size: int, store: Path) -> None:
    """Join a world without a transport of its own: the control group uses gloo whatever training uses."""
    fake_store()  # makes the backend known
    files = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=files, rank=rank, world_size=size)


def test_to_connect_has_the_timeout_of_training(tmp_path: Path) -> None:
    join(0, 2, tmp_path / "store")
    begin = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
            Topology(RankGrid(dp=2), 0, CPU, timedelta(seconds=0.5)).control.open()
    finally:
        dist.destroy_process_group()
    assert time.monotonic() - begin < PATIENCE


@contextmanager
def started(
    case: Callable[..., None], size: int, tmp_path: Path, *arguments: object
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Processes that run ``case(rank, size, store, pipe, *arguments)``, and our ends of their pipes."""
    context, ranks = fork_context(), list[tuple[BaseProcess, Connection]]()
    for rank in range(size):
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(
            target=case, args=(rank, size, tmp_path / "store", theirs, *arguments), daemon=True
        )
        process.start()
        ranks.append((process, ours))
    try:
        yield ranks
    finally:
        for process, _ in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.join()


def serve(rank: int, size: int, store: Path, pipe: Connection, case: Callable[[ControlGroup], None]) -> None:
    torch.set_num_threads(1)
    prepare_environment(RunConfig(), os.environ, num_cores=1, local_world_size=1)
    join(rank, size, store)
    # On GPUs as well, so that no object is pickled onto one.
    control = Topology(RankGrid(dp=size), rank, torch.device("cuda", 0), timedelta(seconds=PATIENCE)).control
    control.open()
    pipe.send(control.process_group._get_backend(CPU).options._timeout)
    try:
        case(control)
    except RuntimeError as error:
        pipe.send(str(error))
    os._exit(1)  # as pretrain_llama.py ends after an error


def lose_rank_0(control: ControlGroup) -> None:
    run_on_rank0(control, lambda: time.sleep(10 * PATIENCE))


def lose_another(control: ControlGroup) -> None:
    """The other ranks wait for rank 0, which works until a rank is killed."""
    run_on_all_ranks(control, lambda: time.sleep(1.0 if control.rank == 0 else 0.0))
    while True:
        run_on_rank0(control, lambda: time.sleep(0.1))
        run_on_all_ranks(control, lambda: None)


@pytest.mark.processes
@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize(("case", "killed"), [(lose_rank_0, 0), (lose_another, 2)])
def test_a_killed_rank_ends_the_wait_of_all_others(
    tmp_path: Path, case: Callable[[ControlGroup], None], killed: int, size: int
) -> None:
    """Also of those that have no connection to it."""
    with started(serve, size, tmp_path, case) as ranks:
        for _, pipe in ranks:
            assert pipe.poll(PATIENCE) and pipe.recv() == CONTROL_TIMEOUT > timedelta(hours=1)
        ranks[killed][0].kill()
        for number, (_, pipe) in enumerate(ranks):
            if number != killed:
                assert pipe.poll(PATIENCE), f"rank {number} waits for a rank that has ended"
                assert "onnection" in pipe.recv()


def count_connections(rank: int, size: int, store: Path, pipe: Connection) -> None:
    """Join, use the control group, and tell how many sockets it has."""
    prepare_environment(RunConfig(), os.environ, num_cores=1, local_world_size=1)
    join(rank, size, store)
    before = count_sockets()
    control = ControlGroup(range(size), rank)
    control.open()
    opened = count_sockets() - before
    assert control.all_gather_object(rank) == list(range(size))
    assert control.broadcast_object(rank, source=3) == 3
    pipe.send((opened, count_sockets() - before))
    pipe.recv()


def count_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads /proc")
def test_a_rank_connects_to_few_others_and_to_none_later(tmp_path: Path) -> None:
    """At 16,384 ranks a connection to each is 16,383 sockets in every process."""
    with started(count_connections, 16, tmp_path) as ranks:
        assert all(pipe.poll(PATIENCE) for _, pipe in ranks)
        counts = [pipe.recv() for _, pipe in ranks]
    assert all(opened <= 2 * 4 + 2 for opened, _ in counts), counts
    assert all(later <= opened for opened, later in counts), counts
