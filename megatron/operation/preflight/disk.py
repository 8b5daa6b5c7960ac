"""The directory of the checkpoints: free space, and a file that is written, synced and read back."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from megatron.features.preflight.check import Check, Node, Result, Site, Verdict, found

CHECKPOINTS = 2
"""Checkpoints for which there should be space: the next one, and one more before old ones are deleted."""
_GIB = 2**30
_LARGEST, _SMALLEST, _ALL_NODES = 64 * 2**20, 4 * 2**20, 4 * 2**30
_BLOCK = 4 * 2**20


def probe_bytes(num_nodes: int) -> int:
    """Size of the file that each node writes: all nodes together write at most 4 GiB, unless there are over 1,024."""
    return max(_SMALLEST, min(_LARGEST, _ALL_NODES // num_nodes // _BLOCK * _BLOCK))


def existing_parent(directory: Path) -> Path:
    """``directory``, or its nearest parent that exists: the check creates no directory."""
    return next((path for path in (directory, *directory.absolute().parents) if path.exists()), directory)


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write."""
    return shutil.disk_usage(directory).free


def unnamed_file(directory: Path) -> IO[bytes]:
    """A file without a name, so that nothing remains of it after any end of this process."""
    return tempfile.TemporaryFile(dir=directory, buffering=0)


@dataclass(frozen=True)
class Disk(Check):
    """One rank of each node measures, because a directory may be mounted on some nodes only."""

    name = "disk"
    seconds = 20.0
    remedy = "the file system does not answer, or is slower than 3 MB/s: check its server and the mount on this node"
    error_remedy = "free space, correct quota or permissions, or change --save"

    free: Callable[[Path], int] = free_bytes
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
            is_same = _digest(file) == written
            done = time.perf_counter()
        return {
            "directory": str(directory),
            "free": self.free(directory),
            "needed": site.needs.checkpoint_bytes,
            "write": size / (synced - started),
            "read": size / (done - synced),
            "is_same": is_same,
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


def _digest(file: IO[bytes]) -> str:
    file.seek(0)
    digest = xxhash.xxh3_128()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
