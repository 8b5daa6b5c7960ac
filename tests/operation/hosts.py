"""Hosts on one machine: network, host-name and mount namespaces, joined by a bridge. They need root."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_SUBNET = "10.213.77"
_HOLD = """
set -e
hostname {name}
mount --bind {hosts} /etc/hosts
ip link set lo up
echo ready
exec sleep infinity
"""


class Host:
    """A host with a name and an address; processes are started in it, and its link can be cut."""

    def __init__(self, name: str, address: str, hosts: Path) -> None:
        self.name, self.address = name, address
        self._port: tuple[Host, str] | None = None
        """The host with the bridge, and the interface there."""
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "bash", "-c", _HOLD.format(name=name, hosts=hosts)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "the namespaces cannot be made"

    def words(self, command: Sequence[str]) -> list[str]:
        """``command`` in this host."""
        return ["nsenter", "--net", "--uts", "--mount", "--wdns=" + os.getcwd(), "-t", str(self._holder.pid), *command]

    def run(self, *command: str, environment: Mapping[str, str] | None = None, seconds: float = 60.0) -> str:
        """The output of a command in this host; raises if it fails."""
        done = subprocess.run(
            self.words(command), capture_output=True, text=True, env=environment, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str, log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command in this host."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.words(command), stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def cut(self) -> None:
        """Cut the link: packets are lost without an error."""
        assert self._port is not None
        bridge, interface = self._port
        bridge.run("ip", "link", "set", interface, "nomaster")

    def processes(self) -> list[int]:
        """All processes of this host except the one that holds its namespaces."""
        own = os.readlink(f"/proc/{self._holder.pid}/ns/net")
        found = []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/net") == own:
                    found.append(int(name))
        return [pid for pid in found if pid != self._holder.pid]

    def kill(self) -> None:
        """Kill all processes of this host, as a loss of power does."""
        for _ in range(50):
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.processes():
                return
            time.sleep(0.1)

    def end(self) -> None:
        self.kill()
        self._holder.kill()
        self._holder.wait()

    def join(self, other: "Host", interface: str) -> None:
        """Connect ``other`` to the bridge of this host."""
        peer = str(other._holder.pid)
        self.run("ip", "link", "add", interface, "type", "veth", "peer", "name", "eth0", "netns", peer)
        self.run("ip", "link", "set", interface, "master", "bridge")
        self.run("ip", "link", "set", interface, "up")
        other.run("ip", "address", "add", f"{other.address}/24", "dev", "eth0")
        other.run("ip", "link", "set", "eth0", "up")
        other._port = self, interface


@contextmanager
def hosts_in_a_network(directory: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts that reach each other by name; the first has the bridge, so its link cannot be cut."""
    addresses = {name: f"{_SUBNET}.{number}" for number, name in enumerate(names, start=1)}
    table = directory / "hosts"
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items()))
    hosts: list[Host] = []
    try:
        for name, address in addresses.items():
            hosts.append(Host(name, address, table))
        first = hosts[0]
        first.run("ip", "link", "add", "bridge", "type", "bridge")
        first.run("ip", "address", "add", f"{first.address}/24", "dev", "bridge")
        first.run("ip", "link", "set", "bridge", "up")
        for number, host in enumerate(hosts[1:]):
            first.join(host, f"port{number}")
        yield hosts
    finally:
        for host in hosts:
            host.end()


def reason_not_to_have_hosts() -> str | None:
    """Why this machine has no hosts in namespaces; None if it has."""
    if os.geteuid() != 0:
        return "namespaces with networks need root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", "ip link add bridge type bridge && hostname h"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"
