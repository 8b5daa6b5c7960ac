"""The checks before a run on four real ranks, with and without faults of one of them."""

import errno
import io
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from megatron.core.communication import Communicator
from megatron.features.preflight.check import Board, Check, Needs, Network, Place, Verdict
from megatron.features.preflight.host import Disk, HostMemory, Product
from megatron.features.preflight.network import Clocks
from megatron.features.preflight.run import CHECKS, TOTAL_SECONDS, Preflight, run_preflight
from tests.rank_pool import RankPool

GIB = 2**30
QUICK = 0.3
"""Seconds of the product."""


def slow_product(left: Tensor, right: Tensor) -> Tensor:
    """1.5 times the time."""
    started = time.perf_counter()
    product = torch.matmul(left, right)
    end = started + 1.5 * (time.perf_counter() - started)
    while time.perf_counter() < end:
        pass
    return product


def wrong_product(left: Tensor, right: Tensor) -> Tensor:
    """The last bit of one element is flipped."""
    product = torch.matmul(left, right)
    product.view(torch.int32)[3, 5] ^= 1
    return product


class WrongSum(Network):
    def all_reduce(self, tensor: Tensor) -> None:
        super().all_reduce(tensor)
        tensor[17] += 1


class WrongAddend(Network):
    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.any():
            tensor[17] += 1
        super().all_reduce(tensor)


class SlowLink(Network):
    """Exchanges with one rank take longer; with every rank if there is none."""

    peer: int | None = None

    def exchange(self, tensor: Tensor, received: Tensor, peer: int) -> None:
        super().exchange(tensor, received, peer)
        if tensor.numel() > 1 and self.peer in (peer, None):
            time.sleep(0.05)


class SlowLinkToOne(SlowLink):
    peer = 1


class WrongBytes(Network):
    def exchange(self, tensor: Tensor, received: Tensor, peer: int) -> None:
        super().exchange(tensor, received, peer)
        received[-1] += 1


class FullFile(io.FileIO):
    """A file on a disk that is full after a MiB."""

    def write(self, data: Any) -> int:
        if self.tell() >= 2**20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[: 2**19])


class ForgetfulFile(io.FileIO):
    """Loses a byte between writing and reading."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size)[:-1]


def full_file(directory: Path) -> IO[bytes]:
    return FullFile(tempfile.mkstemp(dir=directory)[1], "r+")


def forgetful_file(directory: Path) -> IO[bytes]:
    return ForgetfulFile(tempfile.mkstemp(dir=directory)[1], "r+")


def silent_file(directory: Path) -> IO[bytes]:
    """A path that does not answer: a pipe without a writer."""
    pipe = directory / "pipe"
    os.mkfifo(pipe)
    return pipe.open("rb")


class ImpatientDisk(Disk):
    seconds = 1.0


@dataclass(frozen=True)
class Fault:
    """On rank 2 of four, each on a node of its own."""

    check: str
    """The check that must name it."""
    value: str
    """In the value of the result."""
    rank: int | None = 2
    replaced: Check | None = None
    network: type[Network] = Network
    place: Mapping[str, str] | None = None


FAULTS = {
    "slow product": Fault("product", "x the median", replaced=Product(slow_product)),
    "wrong product": Fault("product", "wrong elements", replaced=Product(wrong_product)),
    "wrong sum": Fault("all-reduce", "received a wrong sum", network=WrongSum),
    "wrong addend": Fault("all-reduce", "wrong addend", network=WrongAddend),
    "clock 5 s ahead": Fault("clocks", "clock 5.0 s ahead", replaced=Clocks(lambda: time.time() + 5)),
    "clock 5 s behind": Fault("clocks", "clock 5.0 s behind", replaced=Clocks(lambda: time.time() - 5)),
    "slow node": Fault("links", "x the usual", network=SlowLink),
    "slow link": Fault("links", "link to rank 2", rank=1, network=SlowLinkToOne),
    "changed bytes": Fault("links", "changes what it carries", network=WrongBytes),
    "full disk": Fault("disk", "No space left on device", replaced=Disk(open=full_file)),
    "no space": Fault("disk", "0.5 GiB free", replaced=Disk(free=lambda _: GIB // 2)),
    "space for one": Fault("disk", "1.5 GiB free", replaced=Disk(free=lambda _: 3 * GIB // 2)),
    "lost write": Fault("disk", "other bytes read", replaced=Disk(open=forgetful_file)),
    "silent disk": Fault("disk", "no answer", replaced=ImpatientDisk(open=silent_file)),
    "little memory": Fault("host memory", "0.5 GiB available", replaced=HostMemory(lambda: GIB // 2)),
    "two machines, one name": Fault("identity", "another machine", place={"host": "node0", "boot": "another boot"}),
}
TOGETHER = (
    ("clock 5 s ahead", "little memory", "slow product", "full disk", "wrong sum"),
    ("clock 5 s behind", "wrong product", "no space", "wrong addend"),
    ("space for one", "slow node"),
    ("lost write", "slow link"),
    ("two machines, one name", "changed bytes"),
    ("silent disk",),
)
"""Faults of different checks are found by one run: of collectives the first that fails ends it, and so does a check
that does not end."""


def run_checks(directory: str, attempt: str, faults: Sequence[str], duration: float) -> Preflight:
    """A case for four ranks: all checks, on four nodes that are really one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = Place(f"node{rank}", f"boot {rank}", "namespace")
    # Nodes have no memory in common.
    world = Communicator(range(world_size), rank, shares_memory=False)
    network, checks = Network(world), list[Check](CHECKS)
    for fault in [FAULTS[name] for name in faults] if rank == 2 else []:
        if fault.network is not Network:
            network = fault.network(world)
        place = replace(place, **(fault.place or {}))
        checks = [fault.replaced if fault.replaced is not None and fault.check == one.name else one for one in checks]
    checks = [replace(one, duration=duration) if isinstance(one, Product) else one for one in checks]
    store = FileStore(f"{directory}/{attempt}.store", world_size)
    store.set_timeout(timedelta(seconds=60))
    needs = Needs(Path(directory) / "checkpoints", GIB, GIB)
    return run_preflight(Board(store, rank, world_size), torch.device("cpu"), network, needs, checks, place)


def results_of(ranks: RankPool, directory: Path, *faults: str, duration: float = QUICK) -> Preflight:
    """The results, which must be equal on all ranks."""
    arguments = (str(directory), secrets.token_hex(4), faults, duration)
    outcomes = ranks.run(run_checks, *arguments, world_size=4, timeout=120.0)
    assert all(one.results == outcomes[0].results for one in outcomes)
    first: Preflight = outcomes[0]
    return first


@pytest.mark.parametrize("faults", TOGETHER, ids=", ".join)
def test_faults_are_named(four_ranks: RankPool, tmp_path: Path, faults: Sequence[str]) -> None:
    results = results_of(four_ranks, tmp_path, *faults).results
    named = {one.check: one for one in results if one.verdict is not Verdict.OK}
    expected = {FAULTS[name].check: FAULTS[name] for name in faults}
    assert {name: one.rank for name, one in named.items()} == {name: one.rank for name, one in expected.items()}, (
        results
    )
    host = next((one.place["host"] for one in expected.values() if one.place), None)
    for name, one in named.items():
        assert expected[name].value in one.value and one.remedy
        assert one.host == (host or f"node{one.rank}")


def test_every_fault_is_in_a_run() -> None:
    assert sorted(name for names in TOGETHER for name in names) == sorted(FAULTS)


def test_a_healthy_job_passes_and_nothing_stays_on_the_disk(four_ranks: RankPool, tmp_path: Path) -> None:
    preflight = results_of(four_ranks, tmp_path, duration=1.0)
    assert [(one.check, one.verdict) for one in preflight.results] == [(check.name, "ok") for check in CHECKS]
    assert [node.host for node in preflight.nodes] == ["node0", "node1", "node2", "node3"]
    assert preflight.seconds < TOTAL_SECONDS
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".store")] == []


@pytest.mark.slow("a minute: no false alarm in 100 repetitions")
def test_a_healthy_job_raises_no_alarm(four_ranks: RankPool, tmp_path: Path) -> None:
    alarms = []
    for _ in range(100):
        results = results_of(four_ranks, tmp_path).results
        alarms += [one.sentence() for one in results if one.verdict is not Verdict.OK]
    assert alarms == []
