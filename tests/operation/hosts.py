"""Hosts on one machine: namespaces, connected by a bridge in a further one. They need root.

A host has its own network, name, processes, and shared memory; files are shared, as on storage of a cluster. A SLURM
cluster runs on them: munged, slurmctld and two slurmd. Debian's packages are enough (tests/operation/install_slurm.sh).
The partition ``low`` is preempted by ``high``.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.end_to_end.run_process import ENVIRONMENT, REPOSITORY, wait_until
from tests.operation.jobs import children

_SUBNET = "10.213.77"
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
_HOLD = """
set -e
hostname {name}
mount --bind {hosts} /etc/hosts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""
"""The first process of a host. By ignoring SIGCHLD it reaps the orphans."""


class Host:
    """A host with a name and an address; processes are started in it, and its link can be cut."""

    def __init__(self, name: str, address: str, hosts: Path) -> None:
        self.name, self.address = name, address
        self._port: tuple[Host, str] | None = None
        """The host with the bridge, and the interface there."""
        hold = _HOLD.format(name=name, hosts=hosts)
        # The host ends with this process.
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen([*words, "bash", "-c", hold], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "the namespaces cannot be made"
        (self._first,) = children(self._holder.pid)

    def words(self, command: Sequence[str]) -> list[str]:
        """``command`` in this host."""
        return ["nsenter", *_NAMESPACES, "--wdns=" + os.getcwd(), "-t", str(self._first), *command]

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
        self._set_port("down")

    def mend(self) -> None:
        """Connect the link again."""
        self._set_port("up")

    def _set_port(self, state: str) -> None:
        assert self._port is not None
        switch, interface = self._port
        switch.run("ip", "link", "set", interface, state)

    def processes(self) -> list[int]:
        """All processes of this host except the first, which holds its namespaces."""
        own = os.readlink(f"/proc/{self._first}/ns/pid")
        found = []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == own:
                    found.append(int(name))
        return [pid for pid in found if pid != self._first]

    def connections(self, port: int) -> int:
        """How many connections this host has to this port of others."""
        lines = [line.split() for kind in ("tcp", "tcp6") for line in self.run("cat", f"/proc/net/{kind}").splitlines()]
        return sum(words[2].endswith(f":{port:04X}") and words[3] == "01" for words in lines)

    def kill(self) -> None:
        """Kill all processes of this host; the kernel closes their connections."""
        for _ in range(50):
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.processes():
                return
            time.sleep(0.1)

    def lose_power(self) -> None:
        """End all processes of this host, of which no other host gets a message."""
        self.cut()
        self.kill()

    def end(self) -> None:
        self.kill()
        self._holder.kill()
        self._holder.wait()

    def join(self, other: "Host", interface: str) -> None:
        """Connect ``other`` to the bridge of this host."""
        # A process has this number only outside of the hosts.
        words = ["nsenter", "--net", "-t", str(self._first), "ip", "link", "add", interface, "type", "veth", "peer"]
        subprocess.run([*words, "name", "eth0", "netns", str(other._first)], check=True)
        self.run("ip", "link", "set", interface, "master", "bridge")
        self.run("ip", "link", "set", interface, "up")
        other.run("ip", "address", "add", f"{other.address}/24", "dev", "eth0")
        other.run("ip", "link", "set", "eth0", "up")
        other._port = self, interface


@contextmanager
def hosts_in_a_network(directory: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts that reach each other by name."""
    addresses = {name: f"{_SUBNET}.{number}" for number, name in enumerate(names, start=1)}
    table = directory / "hosts"
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items()))
    hosts: list[Host] = []
    try:
        for name, address in {**addresses, "switch": ""}.items():
            hosts.append(Host(name, address, table))
        *hosts_with_links, switch = hosts
        # Without a delay, a link that was cut forwards at once when it is up again.
        switch.run("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        switch.run("ip", "link", "set", "bridge", "up")
        for number, host in enumerate(hosts_with_links):
            switch.join(host, f"port{number}")
        yield hosts_with_links
    finally:
        for host in hosts:
            host.end()


def reason_not_to_have_hosts() -> str | None:
    """Why this machine has no hosts in namespaces; None if it has."""
    if os.geteuid() != 0:
        return "namespaces with networks need root"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "sh", "-c", "ip link add bridge type bridge && hostname h"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


# --- SLURM ---------------------------------------------------------------------------------------------------

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
KILL_SECONDS = 20
"""KillWait: from SIGTERM to SIGKILL."""
GRACE_SECONDS = 60
"""GraceTime of a preemption."""
_CONFIGURATION = Path(__file__).with_name("slurm.conf")
# slurmstepd of a batch script resolves these names, and sbatch passes its own variables on
_KEPT = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "PYTHONPATH")


class Cluster:
    """The running daemons, and the commands of a user."""

    def __init__(self, directory: Path, hosts: Sequence[Host]) -> None:
        self.directory = directory
        self.controller, *self.nodes = hosts
        self.environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | ENVIRONMENT
        self.environment |= {"SLURM_CONF": str(directory / "slurm.conf"), "HF_HUB_OFFLINE": "1"}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{self.environment['PATH']}"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        for name in ("state", "spool.node1", "spool.node2"):
            (self.directory / name).mkdir()
        values = {"directory": self.directory, "kill_seconds": KILL_SECONDS, "grace_seconds": GRACE_SECONDS}
        (self.directory / "slurm.conf").write_text(_CONFIGURATION.read_text().format(**values))
        for number in range(8):
            (self.directory / f"gpu{number}").touch()
        (self.directory / "gres.conf").write_text(f"Name=gpu File={self.directory}/gpu[0-7]\n")
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {name: str(self.directory / f"munge.{name}") for name in ("socket", "pid", "seed", "log")}
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}"]
        munged += [f"--pid-file={files['pid']}", f"--seed-file={files['seed']}", f"--log-file={files['log']}"]
        self._start(self.controller, *munged)
        wait_until(lambda: Path(files["socket"]).exists(), 30)
        self._start(self.controller, "slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        wait_until(lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle"] * 2, 60)

    def start_node(self, node: Host) -> None:
        """Start the daemon of a node, also after all its processes were killed."""
        self._start(node, "slurmd", "-D", "-N", node.name)

    def _start(self, host: Host, *words: str) -> None:
        log = self.directory / f"{words[0]}.{host.name}.out"
        self._daemons.append(host.start(*words, log=log, environment=self.environment))

    def run(self, *words: str) -> str:
        """A command of a user, for example ``scontrol``; empty if it fails."""
        return self._run(words).stdout

    def submit(self, *words: str, **knobs: str) -> int:
        """Submit a job with ``sbatch``; its number."""
        done = self._run(["sbatch", "--parsable", *words], **knobs)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.strip())

    def _run(self, words: Sequence[str], **variables: str) -> "subprocess.CompletedProcess[str]":
        environment, command = {**self.environment, **variables}, self.controller.words(words)
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, timeout=60)

    def state(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        text = self.run("scontrol", "show", "job", str(job))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()


def reason_not_to_have_slurm() -> str | None:
    """Why no cluster can be started here; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: bash tests/operation/install_slurm.sh"
    return reason_not_to_have_hosts()


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster of two nodes, whose files are in ``directory``."""
    with hosts_in_a_network(directory, ["controller", "node1", "node2"]) as hosts:
        cluster = Cluster(directory, hosts)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()
