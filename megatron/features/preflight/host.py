"""Checks of a node: its name, host memory, GPUs, a product of known bits, and the directory of the checkpoints."""

import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor

from megatron.features.known_product.listener import expected_product, operands
from megatron.features.preflight.check import Check, Node, Place, Result, Site, Verdict, found
from megatron.features.stragglers.flags import ratios
from megatron.operation.causes import Cause
from megatron.operation.lease import THIS_HOST

_GIB = 2**30


def this_place(device: torch.device) -> Place:
    """Where this process runs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Place(socket.gethostname(), THIS_HOST.boot(), THIS_HOST.namespace(), name)


class Identity(Check):
    """Two machines must not have the same name, by which locks, reports and the launcher distinguish them."""

    name = "identity"
    seconds = 5.0
    remedy = "this process does not answer: look at its node"

    def measure(self, site: Site) -> Any:
        return asdict(site.place)

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        places = [Place(**one) for one in measured]
        boots: dict[tuple[str, str], str] = {}
        results = []
        for rank, place in enumerate(places):
            first = boots.setdefault((place.host, place.namespace), place.boot)
            is_first = not any(other == place for other in places[:rank])
            if place.boot != first and is_first:
                value = f"another machine is called {place.host}, too"
                remedy = "give every machine or container a host name of its own"
                results.append(self.result(Verdict.FAILURE, value, "different names", remedy, rank, nodes))
        devices = sorted({place.device for place in places})
        return results or self.ok(f"{len(nodes)} nodes, {len(places)} ranks, {', '.join(devices)}")


_CGROUP = Path("/sys/fs/cgroup")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Bytes that processes of this machine, or of this container, can still allocate; None if it is not known."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # "max" without a limit
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        counters = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        # The kernel drops clean pages of files before memory is short.
        limits.append(limit - used + int(counters.get("inactive_file", 0)))
    return min(limits, default=None)


@dataclass(frozen=True)
class HostMemory(Check):
    """Host memory for asynchronous saves, which copy the state of every rank of a node to the host."""

    name = "host memory"
    seconds = 5.0
    remedy = "the node does not answer: look at it"

    available: Callable[[], int | None] = available_memory

    def measure(self, site: Site) -> Any:
        if not site.leads_node:
            return None
        return {"available": self.available(), "needed": site.needs.host_bytes * len(site.node.ranks)}

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        results, free = [], []
        for rank, one in found(measured):
            if one["available"] is None:
                continue
            free.append(one["available"])
            if one["available"] < one["needed"]:
                value, limit = f"{one['available'] / _GIB:.1f} GiB available", f"{one['needed'] / _GIB:.1f} GiB"
                remedy = "end other processes of this node, use more nodes, or remove --async-save"
                results.append(self.result(Verdict.FAILURE, value, limit, remedy, rank, nodes))
        least = f"at least {min(free) / _GIB:.1f} GiB available on every node" if free else "not known"
        return results or self.ok(least)


FREE_FRACTION = 0.9
"""The part of a GPU's memory that is free before the model is built; the CUDA context of this process uses a few
hundred MiB."""
# Reasons of NVML for low clocks that are faults. Power caps and idle clocks are normal.
_SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "heat", 0x80: "power brake"}
_LOAD_SECONDS = 1.0
_SIZE = 4096


def find_nvml() -> Any:
    """The module of nvidia-ml-py; None if it is not installed or there is no driver."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the module's own errors are only known with the module
        return None
    return nvml


@contextmanager
def watched_xids(nvml: Any, handle: Any) -> Iterator[list[int]]:
    """The Xid errors of a GPU that the driver reports meanwhile, complete at the end."""
    xids: list[int] = []
    events = nvml.nvmlEventSetCreate()
    try:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        yield xids
        with suppress(nvml.NVMLError):  # also its timeout, which means that there is no event
            while True:
                xids.append(int(nvml.nvmlEventSetWait_v2(events, 10).eventData))
    finally:
        nvml.nvmlEventSetFree(events)


@dataclass(frozen=True)
class Gpu(Check):
    """The memory and the error counters of each rank's GPU, read through NVML where nvidia-ml-py is installed."""

    name = "GPU"
    seconds = 20.0
    remedy = "the driver of the GPU does not answer: reset the GPU or reboot the node"

    nvml: Callable[[], Any] = find_nvml
    uuid: Callable[[torch.device], str] = lambda device: f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    load: Callable[[torch.device], None] = lambda device: _multiply(device)

    def measure(self, site: Site) -> Any:
        if site.device.type != "cuda":
            return None
        nvml = self.nvml()
        if nvml is None:
            return {}
        handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid(site.device))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        measured: dict[str, Any] = {"free": memory.free, "total": memory.total}
        # Each counter is missing on some GPUs.
        with suppress(nvml.NVMLError), watched_xids(nvml, handle) as xids:
            self.load(site.device)
            measured["xids"] = xids
        with suppress(nvml.NVMLError):
            measured["slowdown"] = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        with suppress(nvml.NVMLError):
            measured["uncorrected"] = nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        with suppress(nvml.NVMLError):
            _, _, measured["remap_pending"], measured["remap_failed"] = nvml.nvmlDeviceGetRemappedRows(handle)
        return measured

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        gpus = dict(found(measured))
        if not gpus:
            return self.ok("no GPUs")
        results = [
            self.result(verdict, value, limit, remedy, rank, nodes, cause)
            for rank, one in gpus.items()
            for verdict, cause, value, limit, remedy in _findings(one)
        ]
        unknown = [rank for rank, one in gpus.items() if not one]
        if unknown:
            value = f"not checked on {len(unknown)} of {len(gpus)} ranks: nvidia-ml-py is not installed"
            results.append(Result(self.name, Verdict.WARNING, value, "", "pip install nvidia-ml-py"))
        return results or self.ok(f"{len(gpus)} GPUs without errors")


def _findings(one: dict[str, Any]) -> Iterator[tuple[Verdict, Cause | None, str, str, str]]:
    """(verdict, cause, value, limit, remedy) of each finding about a GPU."""
    broken = Verdict.FAILURE, Cause.SILENT_CORRUPTION
    if one.get("free", 1) < FREE_FRACTION * one.get("total", 1):
        value = f"{one['free'] / _GIB:.1f} of {one['total'] / _GIB:.1f} GiB of GPU memory free"
        remedy = "end the processes that use this GPU (nvidia-smi lists them)"
        yield Verdict.FAILURE, None, value, f"{FREE_FRACTION:.0%}", remedy
    if one.get("uncorrected"):
        value = f"{one['uncorrected']} uncorrected memory errors since the driver was loaded"
        yield *broken, value, "0", "reset the GPU; if they return, replace it"
    if one.get("remap_failed"):
        yield *broken, "a row of the memory could not be remapped", "none", "replace the GPU"
    if one.get("remap_pending"):
        yield *broken, "a remapped row waits for a reset", "none", "reset the GPU or reboot the node"
    if one.get("xids"):
        xids = ", ".join(map(str, one["xids"]))
        yield *broken, f"Xid {xids} during the check", "none", "see the kernel log, and reset the GPU"
    reasons = [text for bit, text in _SLOWDOWNS.items() if one.get("slowdown", 0) & bit]
    if reasons:
        remedy = "check cooling and power supply of the node"
        yield Verdict.WARNING, Cause.STRAGGLER, f"clocks are lowered by {', '.join(reasons)}", "none", remedy


def _multiply(device: torch.device) -> None:
    """Load the GPU, so that faults show and clocks are those of the training."""
    left, right = operands(_SIZE, torch.bfloat16, device)
    deadline = time.monotonic() + _LOAD_SECONDS
    while time.monotonic() < deadline:
        torch.matmul(left, right)
        torch.cuda.synchronize(device)


WARNING_RATIO, FAILURE_RATIO = 1.2, 1.4
"""Time of a rank over the median of the job. Healthy processors of one kind differ by less than 10 %. While training,
stragglers are reported from 1.2, too."""
# On a CPU a product takes less than a time slice of the scheduler, so that some repetitions are not interrupted.
_SIZES = {"cpu": 256, "cuda": 8192}
_FEWEST = 50
# Times that all ranks measure again if one is slow.
_AGAIN = 3


@dataclass(frozen=True)
class Product(Check):
    """A product of known bits, and its speed beside the other ranks, all of which compute at the same time."""

    name = "product"
    seconds = 20.0
    remedy = "the processor does not answer, or is very slow: leave this node out"

    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    duration: float = 1.5
    """Seconds for which a rank repeats the product: of hundreds of repetitions some are undisturbed."""

    def measure(self, site: Site) -> Any:
        measured = self._repeat(site)
        for attempt in range(_AGAIN):
            has_slow = site.board.agree(
                f"slow products {attempt}",
                measured,
                lambda ranks: max(ratios_of(ranks)) > WARNING_RATIO,
                self.seconds,
            )
            if not has_slow:
                break
            # All ranks again: a moment's load is no slow rank.
            again = self._repeat(site)
            wrong, seconds = measured["wrong"] + again["wrong"], min(measured["seconds"], again["seconds"])
            measured = {**measured, "wrong": wrong, "seconds": seconds}
        return measured

    def _repeat(self, site: Site) -> dict[str, Any]:
        size = _SIZES[site.device.type]
        dtype = torch.bfloat16 if site.device.type == "cuda" else torch.float32
        left, right = operands(size, dtype, site.device)
        expected = expected_product(size, dtype, site.device)
        wrong, times = 0, list[float]()
        deadline = time.perf_counter() + self.duration
        while len(times) < _FEWEST or time.perf_counter() < deadline:
            site.synchronize()
            started = time.perf_counter()
            product = self.multiply(left, right)
            site.synchronize()
            times.append(time.perf_counter() - started)
            wrong += int((product != expected).sum())
        # Other processes interrupt a core, so the fastest repetition counts there. A GPU belongs to its process, and is
        # slower when it is warm.
        seconds = min(times) if site.device.type == "cpu" else statistics.median(times[len(times) // 2 :])
        return {"device": site.place.device, "wrong": wrong, "seconds": seconds, "flop": 2 * size**3}

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        ratios = ratios_of(measured)
        results = []
        for (rank, one), ratio in zip(enumerate(measured), ratios):
            if one["wrong"]:
                value = f"{one['wrong']} wrong elements in a product of known bits"
                remedy = "leave this node out: its processor or memory computes wrongly"
                results.append(self.result(Verdict.FAILURE, value, "0", remedy, rank, nodes, Cause.SILENT_CORRUPTION))
            elif ratio > WARNING_RATIO:
                verdict = Verdict.FAILURE if ratio > FAILURE_RATIO else Verdict.WARNING
                value = f"{ratio:.2f} x the median time of the {one['device']} ranks"
                remedy = "look for other processes, heat and power limits on this node, or leave it out"
                limit = f"{WARNING_RATIO} x"
                results.append(self.result(verdict, value, limit, remedy, rank, nodes, Cause.STRAGGLER))
        tera = min(one["flop"] / one["seconds"] for one in measured) / 1e12
        return results or self.ok(
            f"right, slowest rank {max(ratios):.2f} x the median, {tera:.3g} TFLOP/s", f"{WARNING_RATIO} x"
        )


def ratios_of(measured: Sequence[dict[str, Any]]) -> list[float]:
    """The time of each rank over the median of the ranks with the same device."""
    peers: dict[str, list[int]] = {}
    for rank, one in enumerate(measured):
        peers.setdefault(one["device"], []).append(rank)
    return ratios([one["seconds"] for one in measured], list(peers.values()))


CHECKPOINTS = 2
"""Checkpoints for which there should be space: the next one, and one more before old ones are deleted."""
_LARGEST, _SMALLEST, _ALL_NODES = 64 * 2**20, 4 * 2**20, 4 * 2**30
_BLOCK = 4 * 2**20


def probe_bytes(num_nodes: int) -> int:
    """Size of the file that each node writes: all nodes together write at most 4 GiB, unless there are over 1,024."""
    return max(_SMALLEST, min(_LARGEST, _ALL_NODES // num_nodes // _BLOCK * _BLOCK))


def existing_parent(directory: Path) -> Path:
    """``directory``, or its nearest parent that exists: the check creates no directory."""
    return next((path for path in (directory, *directory.absolute().parents) if path.exists()), directory)


def unnamed_file(directory: Path) -> IO[bytes]:
    """A file without a name, so that nothing remains of it after any end of this process."""
    return tempfile.TemporaryFile(dir=directory, buffering=0)


@dataclass(frozen=True)
class Disk(Check):
    """Free space for checkpoints, and a file that is written, synced and read back by one rank of each node, because a
    directory may be mounted on some nodes only."""

    name = "disk"
    seconds = 20.0
    remedy = "the file system does not answer, or is slower than 3 MB/s: check its server and the mount on this node"
    error_remedy = "free space, correct quota or permissions, or change --save"

    free: Callable[[Path], int] = lambda directory: shutil.disk_usage(directory).free
    open: Callable[[Path], IO[bytes]] = unnamed_file

    def measure(self, site: Site) -> Any:
        if site.needs.save is None or not site.leads_node:
            return None
        directory = existing_parent(site.needs.save)
        size = probe_bytes(len(site.nodes))
        with self.open(directory) as file:
            started = time.perf_counter()
            written = _write(file, size, seed=site.rank)
            os.fsync(file.fileno())
            synced = time.perf_counter()
            # Read from the disk, not from the page cache.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            digest = xxhash.xxh3_128()
            while block := file.read(_BLOCK):
                digest.update(block)
            done = time.perf_counter()
        return {
            "directory": str(directory),
            "free": self.free(directory),
            "needed": site.needs.checkpoint_bytes,
            "write": size / (synced - started),
            "read": size / (done - synced),
            "is_same": digest.hexdigest() == written,
        }

    def judge(self, measured: Sequence[Any], nodes: Sequence[Node]) -> list[Result]:
        results, values = [], []
        for rank, one in found(measured):
            values.append(one)
            if not one["is_same"]:
                remedy = "do not save there: a file differs after it was written, synced and read back"
                results.append(self.result(Verdict.FAILURE, "other bytes read than written", "", remedy, rank, nodes))
            if one["free"] < CHECKPOINTS * one["needed"]:
                # Checkpoints that are there already may be deleted after the next save.
                verdict = Verdict.FAILURE if one["free"] < one["needed"] else Verdict.WARNING
                value = f"{one['free'] / _GIB:.1f} GiB free in {one['directory']}"
                limit = f"{CHECKPOINTS} checkpoints of {one['needed'] / _GIB:.1f} GiB"
                remedy = "delete files there, raise the quota, or change --save"
                results.append(self.result(verdict, value, limit, remedy, rank, nodes))
        if results or not values:
            return results or self.ok("no --save")
        slowest = {way: min(one[way] for one in values) / 1e6 for way in ("write", "read")}
        free = min(one["free"] for one in values) / _GIB
        return self.ok(f"{free:.1f} GiB free, {slowest['write']:.0f} MB/s written, {slowest['read']:.0f} MB/s read")


def _write(file: IO[bytes], size: int, seed: int) -> str:
    """Write ``size`` bytes that differ from block to block; returns their digest."""
    # Random once: storage that compresses or removes duplicates must still write every block.
    noise, digest = os.urandom(_BLOCK), xxhash.xxh3_128()
    for number in range(size // _BLOCK):
        header = f"{seed}/{number}".encode().ljust(64)
        block = memoryview(header + noise[number * 64 : -64] + noise[: number * 64])
        digest.update(block)
        while block:
            block = block[file.write(block) :]
    return digest.hexdigest()
