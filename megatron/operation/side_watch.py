"""Reports of hangs under other launchers than ours (``--on-hang report``).

Local rank 0 of every node starts this module as a process of its own, which has the memory for the heartbeats of the
node and watches them as our launcher does (:mod:`megatron.operation.hang`): torchrun, NVRx's ft_launcher and srun stay
the ones who end and restart ranks. It ends when the ranks of its node have ended.

    python -m megatron.operation.side_watch RANKS NODE NODES ATTEMPT COMMAND OF THE RANKS
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.operation.evidence import ENDED, process_state
from megatron.operation.heartbeat import Heartbeat, HeartbeatMemory

if TYPE_CHECKING:
    from megatron.operation.nodes import Nodes

_ATTACH_SECONDS = 300.0
"""For all ranks of the node to move their heartbeats here."""
_STORE_SECONDS = 60.0
_PERIOD = 0.2


def attempt_of(environment: Mapping[str, str]) -> int:
    """The number of restarts by a launcher that counts them as torchrun does."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))


def join(
    heartbeat: Heartbeat,
    rank: int,
    local_rank: int,
    local_world_size: int,
    world_size: int,
    store: Any,
    words: Sequence[str],
    start: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
) -> None:
    """Let a process of this node read ``heartbeat``; local rank 0 starts it. ``store`` is that of the ranks, and
    ``words`` is their command. A rank that cannot join says so, and trains."""
    node, attempt = rank // local_world_size, attempt_of(os.environ)
    key = f"megatron/side_watch/{attempt}/{node}/{socket.gethostname()}"
    if local_rank == 0:
        numbers = [local_world_size, node, -(-world_size // local_world_size), attempt]
        # The ranks may be scripts of a clone that is not installed, started from another directory.
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # In a session of its own: a launcher that signals the group of a rank must not end it.
        process = start(
            [sys.executable, "-m", "megatron.operation.side_watch", *map(str, numbers), *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout as output:
            store.set(key, output.readline().strip())
    try:
        store.wait([key], timedelta(seconds=_STORE_SECONDS))
        heartbeat.move_to(store.get(key).decode(), local_rank)
    except (OSError, RuntimeError) as error:  # torch's errors of a store are the latter
        print(f"WARNING: a hang of rank {rank} will not be reported: {error}.", file=sys.stderr, flush=True)


def watch(num_ranks: int, node: int, count: int, attempt: int, words: Sequence[str]) -> None:
    """Watch the ranks of a node until they have ended."""
    memory = HeartbeatMemory(num_ranks)
    print(memory.path, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Only now: the ranks wait for the path, and this imports torch.
    from megatron.operation.hang import RankWatch
    from megatron.operation.heartbeat import RunSettings

    deadline = time.monotonic() + _ATTACH_SECONDS
    settings: list[RunSettings | None] = []
    while len(settings) < num_ranks or None in settings:
        if time.monotonic() > deadline:
            return
        time.sleep(_PERIOD)
        settings = [RunSettings.from_json(memory.settings(local_rank)) for local_rank in range(num_ranks)]
    known = [one for one in settings if one is not None]
    pids = {rank: found.pid for rank in range(num_ranks) if (found := memory.read(rank)) is not None}
    ranks = RankWatch(memory, words)
    ranks.start([one.rank for one in known], known[0].world_size, pids, _nodes(count), node, attempt)
    while len(ended := _ended(pids)) < num_ranks:
        ranks.find_hang(ended)
        time.sleep(_PERIOD)
    ranks.leave()


def _nodes(count: int) -> "Nodes | None":
    """The other nodes, through the store of the launcher or of rank 0."""
    if count == 1:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from megatron.operation.nodes import Nodes

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Nodes(TCPStore(*place, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS)), count)


def _ended(pids: Mapping[int, int]) -> list[int]:
    return [rank for rank, pid in pids.items() if (process_state(pid) or "Z") in ENDED]


if __name__ == "__main__":
    num_ranks, node, count, attempt = map(int, sys.argv[1:5])
    watch(num_ranks, node, count, attempt, sys.argv[5:])
