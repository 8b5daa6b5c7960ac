"""torchrun with an agent for the exit codes of ``pretrain_llama.py``.

    python -m megatron.operation.launch [FLAGS OF torchrun] pretrain_llama.py FLAGS

Flags, rendezvous and restarts are torchrun's. Its agent is replaced by one that

- does not restart ranks that ended with 2, 75 or 93 (megatron/errors.py), and returns that code;
- passes a signal on to the ranks and waits for their save (--shutdown-timeout, 600 s unless given);
- ends the other ranks 5 s after one has crashed, where torchrun waits up to 30 s;
- restarts, or ends the job, on all nodes together.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher

from megatron.console import protect_console
from megatron.errors import FINAL, ExitCode
from megatron.operation.nodes import Nodes
from megatron.operation.processes import LAUNCHER

SAVE_SECONDS = 600
"""Default of --shutdown-timeout: time for the ranks to finish an iteration and save."""
CRASH_SECONDS = 5
"""Time for other ranks to end after a crash; none of their collectives can complete."""
JOIN_SECONDS = 30
"""Time for ranks to save when a node joins, as in torchrun."""
_PARTING_SECONDS = 60.0
_NODES_SECONDS = 1.0  # between two reads of the state of other nodes


def final_code(exit_codes: Iterable[int]) -> ExitCode | None:
    """Exit code of a job whose ranks ended with ``exit_codes``; None if a restart may help."""
    found = set(exit_codes)
    return next((code for code in FINAL if code in found), None)


class Agent(LocalElasticAgent):
    """Starts, watches and restarts the ranks of a node."""

    def __init__(self, save_seconds: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.exit_code = ExitCode.COMPLETE
        """Exit code of the job, after :meth:`run`."""
        self._save_seconds = save_seconds
        self._nodes_read_at = 0.0

    def run(self, role: str = "default") -> RunResult:
        """Start the ranks, restart them if that may help, and wait for the end of the job."""
        try:
            result = super().run(role)
        except SignalException:
            # The ranks received the signal, too, and have ended.
            codes = self._rank_codes().values()
            self.exit_code = final_code(codes) or (ExitCode.CRASH if any(codes) or not codes else ExitCode.COMPLETE)
            result = RunResult(WorkerState.STOPPED)
        except RendezvousError:
            # The agent that ended the job has closed the rendezvous.
            code = self._nodes.exit_code() if self._nodes is not None else None
            if code is None:
                raise
            self.exit_code, result = code, RunResult(WorkerState.STOPPED)
        self._part_from_nodes()
        if result is None or (result.is_failed() and not result.failures):
            return RunResult(WorkerState.STOPPED)  # the failed ranks are on other nodes
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed = [rank for rank, code in self._rank_codes().items() if code]
        if failed:
            self._end_ranks_after_failure()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._conclude([failure.exitcode for failure in result.failures.values()])
            # torch reports the earliest failure, in whole seconds, or the first here: not a rank killed above.
            first = [worker_group.workers[rank].global_rank for rank in failed]
            result.failures = {rank: result.failures[rank] for rank in (*first, *result.failures)}
        elif result.state == WorkerState.HEALTHY and self._failed_elsewhere():
            self._close(CRASH_SECONDS)
            return RunResult(WorkerState.FAILED)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # Healthy ranks are stopped for a node that joins: a new one, or one that starts its ranks again after a crash.
        nodes = self._nodes
        is_join = worker_group.state == WorkerState.HEALTHY and not (nodes and nodes.must_restart(self._restarts))
        self._close(JOIN_SECONDS if is_join else CRASH_SECONDS)
        super()._stop_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # torch 2.11 calls it without a timeout.
        self._close(self._save_seconds, death_sig)
        super()._shutdown(death_sig)

    def _rank_codes(self) -> dict[int, int]:
        """Exit codes of ended ranks, by local rank."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        codes = {rank: handler.proc.poll() for rank, handler in self._pcontext.subprocess_handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _has_running_ranks(self) -> bool:
        return self._pcontext is not None and len(self._rank_codes()) < self._pcontext.nprocs

    def _end_ranks_after_failure(self) -> None:
        """Wait for the other ranks if they stop on request; torch would terminate them immediately."""
        deadline = time.monotonic() + self._save_seconds
        # All ranks have saved when the first has stopped on request, but some may still copy.
        while set(self._rank_codes().values()) <= {ExitCode.STOPPED, ExitCode.COMPLETE} and self._has_running_ranks():
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self._close(CRASH_SECONDS)

    def _close(self, seconds: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
        """Signal the running ranks, and kill those that have not ended after ``seconds``."""
        if self._pcontext is not None and self._has_running_ranks():
            self._pcontext.close(death_signal, seconds)

    def _conclude(self, exit_codes: Sequence[int]) -> None:
        """After a failure: end the job if no restart can help or is allowed, otherwise restart all nodes."""
        nodes = self._nodes
        code = final_code(exit_codes) or (nodes.exit_code() if nodes is not None else None)
        if code is not None or self._remaining_restarts == 0:
            self._end_job(code or ExitCode.CRASH)
        elif nodes is not None:
            nodes.restart(self._restarts)

    def _end_job(self, code: ExitCode) -> None:
        self.exit_code = code
        self._remaining_restarts = 0
        if self._nodes is not None:
            self._nodes.end_job(code)

    @property
    def _restarts(self) -> int:
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    @property
    def _nodes(self) -> Nodes | None:
        """The nodes of the last rendezvous, if there are several."""
        count = self._worker_group.group_world_size
        return Nodes(self._store, count) if self._store is not None and count is not None and count > 1 else None

    def _failed_elsewhere(self) -> bool:
        """Whether ranks of another node failed, so that the healthy ranks of this node must end."""
        nodes, now = self._nodes, time.monotonic()
        if nodes is None or now - self._nodes_read_at < _NODES_SECONDS:
            return False
        self._nodes_read_at = now
        code = nodes.exit_code()
        if code == ExitCode.STOPPED:
            return False  # the ranks of this node stop, too
        if code is not None:
            self._end_job(code)
        return code is not None or nodes.must_restart(self._restarts)

    def _part_from_nodes(self) -> None:
        if self._nodes is None or self.exit_code == ExitCode.COMPLETE:
            return
        self._nodes.end_job(self.exit_code)
        with suppress(RendezvousError):
            self._rdzv_handler.set_closed()  # for agents that wait in the rendezvous
        with suppress(SignalException):
            self._nodes.part(_PARTING_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns its exit code."""
    options = torchrun.parse_args(arguments)
    save_seconds = getattr(options, "shutdown_timeout", None)  # torch 2.11 has no such flag
    if save_seconds is None:
        save_seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVE_SECONDS))
    agents: list[Agent] = []

    def build_agent(**keywords: Any) -> Agent:
        agents.append(Agent(save_seconds, **keywords))
        return agents[0]

    os.environ[LAUNCHER] = str(os.getpid())
    # torchrun makes its agent by this name.
    vars(launcher)["LocalElasticAgent"] = build_agent
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        if agents[0].exit_code != ExitCode.STOPPED:
            print(error, file=sys.stderr, flush=True)
    except SignalException as error:
        print(f"{error}: killing the ranks that still run.", file=sys.stderr, flush=True)
        return ExitCode.CRASH
    if not agents:
        return ExitCode.CRASH
    code = agents[0].exit_code
    if code != ExitCode.COMPLETE:
        print(f"The job ends with exit code {int(code)} ({code.name}).", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    protect_console()
    sys.exit(main(sys.argv[1:]))
