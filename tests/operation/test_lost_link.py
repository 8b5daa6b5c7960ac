"""A link is cut between two hosts with a launcher each: both sides end, and the report names the host."""

import json
import sys
from pathlib import Path

import pytest

from megatron.errors import ExitCode
from megatron.operation.causes import Cause
from tests.end_to_end.run_process import ENVIRONMENT, REPOSITORY, wait_until
from tests.operation.hosts import Host, hosts_in_a_network, reason_not_to_have_hosts
from tests.operation.test_launch import PATIENCE
from tests.operation.test_launch import RANK as TEMPLATE
from tests.operation.test_watchdog_nodes import RANK

REASON = reason_not_to_have_hosts()
pytestmark = [
    pytest.mark.slow(reason="waits for the limit of a lost link"),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
WAITING = f"""{RANK.replace("hang_limit_s=1.0", "hang_limit_s=15.0")}
wait_for_other_rank()
"""
"""Ranks that wait for each other without an error, as in a collective of NCCL."""


def launcher(host: Host, directory: Path, rendezvous: list[str]) -> list[str]:
    script = directory / "rank.py"
    script.write_text(TEMPLATE.format(repository=str(REPOSITORY), directory=directory, body=WAITING))
    words = [sys.executable, "-m", "megatron.operation.launch", "--nnodes", "2", "--nproc-per-node", "1"]
    return [*words, *rendezvous, "--local-addr", host.name, str(script)]


@pytest.mark.parametrize("kind", ["c10d", "static"])
def test_a_cut_link_is_told_as_a_lost_node_and_both_sides_end(tmp_path: Path, kind: str) -> None:
    environment = {**ENVIRONMENT, "PATH": "/usr/bin:/usr/sbin:/bin:/sbin", "HOME": str(tmp_path)}
    with hosts_in_a_network(tmp_path, ["node1", "node2"]) as hosts:
        launchers = []
        for number, host in enumerate(hosts):
            static = ["--master-addr", "node1", "--master-port", "29500", "--node-rank", str(number)]
            c10d = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "node1:29500"]
            words = launcher(host, tmp_path, static if kind == "static" else c10d)
            log = tmp_path / f"{host.name}.log"
            launchers.append(host.start(*words, log=log, environment={**environment, "PYTHONPATH": str(REPOSITORY)}))
        wait_until(lambda: len(list(tmp_path.glob("waits.*"))) == 2, PATIENCE)
        hosts[1].cut()
        codes = [process.wait(PATIENCE) for process in launchers]
        logs = [(tmp_path / f"{host.name}.log").read_text() for host in hosts]
        assert codes == [ExitCode.CRASH] * 2, logs
        assert not [pid for host in hosts for pid in host.processes()], logs
    assert "(link_lost). The launcher on node2 cannot reach the rendezvous host node1:29500" in logs[1]
    found = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (found["cause"], found["host"]) == (Cause.NODE_LOST, "node2"), logs
    assert "the launcher of its node does not answer" in found["message"]
