"""The names of the machines, by which locks, reports and the launcher know them."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.features.preflight.check import Check, Node, Place, Result, Site, Verdict


def this_place(device: torch.device) -> Place:
    """Where this process runs."""
    boot, namespace = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Place(socket.gethostname(), boot, namespace, name)


@dataclass(frozen=True)
class Identity(Check):
    """Two machines must not have the same name: the run lock of one could be taken for the other's."""

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
        if results:
            return results
        devices = sorted({place.device for place in places})
        return self.ok(f"{len(nodes)} nodes, {len(places)} ranks, {', '.join(devices)}")
