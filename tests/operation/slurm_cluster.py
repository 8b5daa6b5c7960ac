"""A SLURM cluster on one machine: munged, slurmctld and two slurmd, each on a host of its own (namespaces).

Debian's packages are enough (tests/operation/install_slurm.sh). The partition ``low`` is preempted by ``high``.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.end_to_end.run_process import ENVIRONMENT, REPOSITORY, wait_until
from tests.operation.hosts import Host, hosts_in_a_network, reason_not_to_have_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
KILL_SECONDS = 20
"""KillWait: from SIGTERM to SIGKILL."""
GRACE_SECONDS = 60
"""GraceTime of a preemption."""
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=controller
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_seconds}
SlurmdTimeout=20
MessageTimeout=10
ReturnToService=2
GresTypes=gpu
NodeName=node[1-2] CPUs=2 Gres=gpu:8 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_seconds}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
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
        (self.directory / "slurm.conf").write_text(_CONFIGURATION.format(**values))
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
