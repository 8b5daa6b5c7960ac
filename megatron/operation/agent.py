"""Torch's agent with decisions of ours: it starts, watches and restarts the ranks of a node.

The methods of torch's agent call these of :class:`Agent`, in this order (``>`` calls):

    run
      > _invoke_run                      torch's loop; a signal leaves it with SignalException
          > _rendezvous                  wait after failures; leave the place of a node that was named twice
              > _assign_worker_ranks     the launchers agree on the order of the nodes
          > _start_workers               begin the record and the watch of the attempt
              > start_rank               for each rank: a warm process, or a new one
          > _monitor_workers             every 0.1 s: ranks that hang or failed, here or on another node
              FAILED, restarts left:         _stop_workers, then again from _rendezvous
              HEALTHY, a node waits to join: the same
              FAILED, SUCCEEDED:             leave the loop
      > _shutdown                        after a signal or an error: the ranks may save
      > _part_from_nodes                 publish for the other launchers how the job ended
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)

from megatron.errors import FINAL, ExitCode, write_error_file
from megatron.operation.attempt_recorder import Beginning, LaunchedAttempts
from megatron.operation.failure import Failure
from megatron.operation.hang import RankWatch
from megatron.operation.heartbeat import HEARTBEATS, HeartbeatMemory
from megatron.operation.nodes import (
    CAUSES,
    Backoff,
    NamedNodes,
    Naming,
    NodeOrder,
    NodeReport,
    Nodes,
    RunEnd,
    StoreWatch,
    order_nodes,
)
from megatron.operation.ranks import CRASH_SECONDS, RankProcesses
from megatron.operation.signals import StopSignals
from megatron.operation.warm import WarmProcesses
from megatron.torch_compat import (
    leave_rendezvous,
    redirected_to,
    rendezvous_members,
    rendezvous_store,
    renew_store_address,
    start_rank,
)

# Time for a signal that has ended a rank to reach the launcher, too: a batch system signals all processes of a job.
SIGNAL_SECONDS = 1.0
# Time for a node that waits to take the place of one that was named twice.
YIELD_SECONDS = 4.0
_PARTING_SECONDS = 60.0
_READ_SECONDS = 10.0  # for launchers that wait for a place to read the end; they look once a second
_NODES_SECONDS = 1.0  # between two reads of the state of other nodes

# Errors of a store whose launcher or host has ended.
_LOST = (RendezvousConnectionError, DistError)


def say(text: object) -> None:
    print(text, file=sys.stderr, flush=True)


def say_end(code: ExitCode) -> None:
    say(f"The job ends with exit code {int(code)} ({code.name}).")


def final_code(exit_codes: Iterable[int]) -> ExitCode | None:
    """Exit code of a job whose ranks ended with ``exit_codes``; None if a restart may help."""
    found = set(exit_codes)
    return next((code for code in FINAL if code in found), None)


class Agent(LocalElasticAgent):
    """Starts, watches and restarts the ranks of a node."""

    def __init__(
        self,
        save_seconds: int,
        is_elastic: bool,
        warm: WarmProcesses | None,
        run_dir: Path | None,
        signals: StopSignals,
        endpoint: str | None,
        **arguments: Any,
    ) -> None:
        """``endpoint`` is the rendezvous host with its port, None for a job on one node."""
        super().__init__(**arguments)
        spec = self._worker_group.spec
        self.exit_code = ExitCode.COMPLETE
        """Exit code of the job, after :meth:`run`."""
        self._save_seconds, self._is_elastic, self._warm = save_seconds, is_elastic, warm
        self._signals = signals
        # Whether a signal has ended the training.
        self._is_stopping = False
        # The attempt: its heartbeats, records, processes.
        self._heartbeats = HeartbeatMemory(spec.local_world_size)
        os.environ[HEARTBEATS] = self._heartbeats.path
        self._attempts = LaunchedAttempts(self._heartbeats, run_dir, say)
        self._watch = RankWatch(self._heartbeats, [str(word) for word in spec.args])
        self._reports = self._watch.reports
        self._ranks = RankProcesses(self._processes, self._heartbeats, save_seconds)
        self._started_at = time.monotonic()
        self._backoff = Backoff()
        self._pause = 0.0
        # The other nodes.
        self._endpoint = endpoint
        self._store_watch: StoreWatch | None = None
        self._run_end: RunEnd | None = None
        self._is_cut_off = False
        self._nodes_read_at = 0.0
        self._named = NamedNodes(run_dir)
        # A name of the attempt, the same on all nodes.
        self._attempt_name = secrets.token_hex(8)

    # --- a start ---------------------------------------------------------------------------------------------

    def run(self, role: str = "default") -> RunResult:
        """Start the ranks, restart them if that may help, and wait for the end of the job."""
        try:
            result = super().run(role)
        except SignalException:
            # The ranks received the signal, too, and have ended.
            self.exit_code = self._code_after_signal()
            result = RunResult(WorkerState.STOPPED)
        except (RendezvousError, DistError) as error:
            code = self._code_without_rendezvous(error)
            if code is None:
                raise
            self.exit_code, result = code, RunResult(WorkerState.STOPPED)
        finally:
            if self._warm is not None:
                self._warm.end()
        if not self._ranks.survivors:
            self._part_from_nodes()
        if self._store_watch is not None:
            self._store_watch.end()
        if result is None or (result.is_failed() and not result.failures):
            return RunResult(WorkerState.STOPPED)  # the failed ranks are on other nodes
        return result

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            return super()._invoke_run(role)
        except SignalException:
            self._is_stopping = True
            self._attempts.stop_requested()
            raise
        except RendezvousGracefulExitError as error:
            raise RendezvousClosedError from error  # torch takes any end of a job that it waited for as complete
        except _LOST:
            # The ranks have lost a node, too, and cannot save.
            self._watch.leave()
            self._ranks.end(CRASH_SECONDS)
            raise

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._pause > 0.0:
            say(f"Several attempts have failed at once: waiting {self._pause:g} s.")
            time.sleep(self._pause)
            self._pause = 0.0
        handler = worker_group.spec.rdzv_handler
        self._watch_store()
        self._named.refresh()
        if socket.gethostname() in self._named.suspects() and handler.get_backend() != "static":
            # Further launchers than the nodes that the job needs wait for a place.
            leave_rendezvous(handler, YIELD_SECONDS)
            time.sleep(YIELD_SECONDS)
        renew_store_address(handler)
        super()._rendezvous(worker_group)
        self._watch_store()  # a static one has a store only now

    def _watch_store(self) -> None:
        """Watch the store of the rendezvous, and announce this launcher there."""
        handler = self._worker_group.spec.rdzv_handler
        store = rendezvous_store(handler)
        if self._store_watch is None and self._endpoint is not None and store is not None:
            self._store_watch = StoreWatch(store, self._watch.silence_limit, self._leave_cut_off)
            self._run_end = RunEnd(store, handler.get_run_id())
            self._run_end.announce()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        workers = list(super()._assign_worker_ranks(store, group_rank, group_world_size, spec))
        if group_world_size == 1:
            self._attempt_name = secrets.token_hex(8)
            return workers
        report = NodeReport(socket.gethostname(), spec.local_world_size, tuple(self._named.namings))

        def decide(reports: list[Any]) -> Any:
            order = order_nodes([NodeReport.from_json(one) for one in reports], self._named)
            for sentence in order.sentences if self._is_elastic else ():
                say(sentence)
            return asdict(order)

        nodes = Nodes(store, group_world_size)
        decision = NodeOrder.from_json(nodes.agree(group_rank, self._restarts, asdict(report), decide))
        self._attempt_name = decision.attempt
        self._named.add(decision.namings)
        if self._is_elastic and spec.rdzv_handler.use_agent_store:  # otherwise rank 0 must be on the first node
            for worker in workers:
                worker.global_rank = worker.role_rank = decision.first_ranks[group_rank] + worker.local_rank
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._heartbeats.clear()
        self._started_at = time.monotonic()
        workers = worker_group.workers
        ranks = [worker.global_rank for worker in workers]
        world_size = workers[0].world_size if workers else 0
        self._attempts.begin(ranks, world_size, Beginning.now())
        with self._signals.held():  # torch records the processes when all have started, and only then can end them
            pids = super()._start_workers(worker_group)
        self._watch.start(ranks, world_size, pids, self._nodes, worker_group.group_rank or 0, self._restarts)
        return pids

    def start_rank(self, handler: Any, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[Any]:
        """Start a rank, or let a warm process become it."""
        if self._warm is None:
            return start_rank(handler, words, environment)
        standby = self._warm.take(handler.local_rank_id, words)
        self._warm.started(handler.local_rank_id, words, environment)
        with suppress(OSError):  # the standby has ended at this moment
            if standby is not None:
                return standby.become(environment, redirected_to(handler))
        return start_rank(handler, words, environment)

    # --- while the ranks run ---------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._signals.raise_received()
        while self._is_cut_off:
            time.sleep(1.0)  # another thread ends this process
        codes = self._ranks.codes()
        if self._signals.have_ended(codes.values()):
            time.sleep(SIGNAL_SECONDS)
        failed = [rank for rank, code in codes.items() if code]
        hang = None if failed else self._watch.find_hang(codes)
        if hang is not None:
            failed = self._end_hanging_ranks(hang)
        elif failed:
            self._watch.leave()
            self._ranks.wait_for_stop()
            self._ranks.end_after_crash()
            if self._nodes is not None and self._ranks.have_stopped() and self._nodes.stops_for_join():
                return RunResult(WorkerState.HEALTHY)  # torch's agent sees the node that joins, and restarts
        elif self._warm is not None and self._remaining_restarts > 0:
            self._warm.prepare_when_training(self._heartbeats)
        if self._ranks.survivors:
            return self._leave_job()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._pause = self._backoff.pause_after_failure(self._ranks.made_progress(self._started_at))
            exit_codes = [failure.exitcode for failure in result.failures.values()]
            self._conclude(exit_codes)
            code = final_code(exit_codes)
            if hang is None and code != ExitCode.STOPPED:
                local = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
                failures = {local[rank]: failure for rank, failure in result.failures.items()}
                self._reports.record_ends(failures, failed, code or ExitCode.CRASH, self._endpoint)
            self._name_cause()
            self._put_cause_first(result, [worker_group.workers[rank].global_rank for rank in failed])
            self._end_attempt(next(iter(result.failures.values())).exitcode)
        elif result.state == WorkerState.SUCCEEDED:
            self._watch.leave()
            self._end_attempt()
        elif result.state == WorkerState.HEALTHY and self._failed_elsewhere():
            self._reports.publish_health()
            self._pause = self._backoff.pause_after_failure(self._ranks.made_progress(self._started_at))
            self._watch.leave()
            self._ranks.end_after_crash()
            self._end_attempt()
            return self._leave_job() if self._ranks.survivors else RunResult(WorkerState.FAILED)
        self._attempts.poll()
        return result

    def _processes(self) -> dict[int, subprocess.Popen[Any]]:
        """The processes of the ranks, by local rank."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        return {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}

    def _name_cause(self) -> None:
        """Record that a host caused the failure of this attempt, if the cause may lie in the node."""
        failure = self._reports.failure
        if failure is not None and failure.host is not None and failure.cause in CAUSES:
            self._named.name(Naming(failure.host, failure.cause, self._attempt_name, time.time()))

    def _put_cause_first(self, result: RunResult, failed: Sequence[int]) -> None:
        """torch shows the earliest failure, in whole seconds, or the first: it must be the rank that failed first."""
        cause = self._reports.failure.rank if self._reports.failure is not None else None
        order = [rank for rank in (cause, *failed, *result.failures) if rank in result.failures]
        result.failures = {rank: result.failures[rank] for rank in order if rank is not None}
        earliest = min((failure.timestamp for failure in result.failures.values()), default=0)
        if order:
            result.failures[order[0]].timestamp = earliest

    # --- the end of an attempt -------------------------------------------------------------------------------

    def _end_hanging_ranks(self, hang: Failure) -> list[int]:
        """Kill the ranks: SIGTERM would only ask them to finish an iteration that cannot end. Returns the local rank to
        show first at the end of the job."""
        assert self._pcontext is not None
        is_here = hang.local_rank is not None and hang.host == socket.gethostname()
        shown = hang.local_rank if is_here and hang.local_rank is not None else 0
        write_error_file(Path(self._pcontext.error_files[shown]), hang.message, int(time.time()) - 1)
        self._watch.leave()
        self._ranks.end(CRASH_SECONDS, signal.SIGKILL)
        return [shown]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._watch.leave()
        # Healthy ranks are stopped for a node that joins: a new one, or one that starts its ranks again after a crash.
        nodes = self._nodes
        members = rendezvous_members(worker_group.spec.rdzv_handler)
        is_healthy = worker_group.state == WorkerState.HEALTHY
        has_failed = self._watch.have_nodes_left(members) if is_healthy else False
        if is_healthy and nodes is not None and (has_failed or nodes.must_restart(self._restarts)):
            # torch does not count it, because a node already waits for the others: the one of the crash, or a spare.
            self._remaining_restarts = max(0, self._remaining_restarts - 1)
            self._name_cause()
        elif is_healthy:
            if nodes is not None:
                nodes.stop_for_join()
            self._ranks.stop_for_join()
        self._ranks.end_after_crash()
        super()._stop_workers(worker_group)
        self._end_attempt()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # torch 2.11 calls it without a timeout.
        self._watch.leave()
        self._ranks.end(self._save_seconds, death_sig)
        if not self._ranks.survivors:
            super()._shutdown(death_sig)  # would wait for them
        self._end_attempt()

    def _end_attempt(self, exit_code: int | None = None) -> None:
        """Record the end of the attempt, once; ``exit_code`` is of the rank that failed first."""
        codes = self._ranks.codes().values()
        if exit_code is None:
            exit_code = next((code for code in codes if code), 0)
        if final_code(codes) == ExitCode.STOPPED or (
            self._is_stopping and self._code_after_signal() == ExitCode.STOPPED
        ):
            self._attempts.end("stopped", ExitCode.STOPPED)
        else:
            self._attempts.end("failed" if any(codes) or not codes else "complete", exit_code)

    def _conclude(self, exit_codes: Sequence[int]) -> None:
        """After a failure: end the job if no restart can help or is allowed, otherwise restart all nodes."""
        nodes = self._nodes
        code = final_code(exit_codes) or (nodes.exit_code() if nodes is not None else None)
        if code is not None or self._remaining_restarts == 0:
            self._end_job(code or ExitCode.CRASH)
        elif nodes is not None:
            nodes.restart(self._restarts)

    # --- the end of the job, and the other nodes -------------------------------------------------------------

    @property
    def _restarts(self) -> int:
        """The number of the attempt in the store of the nodes, the same on all of them."""
        spec = self._worker_group.spec
        if spec.rdzv_handler.get_backend() != "static":
            return 0  # each rendezvous has keys of its own, and a node that joins later has restarted less often
        return spec.max_restarts - self._remaining_restarts

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

    def _end_job(self, code: ExitCode) -> None:
        self.exit_code = code
        self._remaining_restarts = 0
        if self._nodes is not None:
            self._nodes.end_job(code)

    def _leave_job(self) -> RunResult:
        """End this launcher: new ranks would find the devices of this node in use. The other nodes restart without it,
        if their number may vary."""
        for local_rank in self._ranks.survivors:
            self._reports.record_survivor(local_rank)
        restarts, self._remaining_restarts = self._restarts, 0
        self.exit_code = ExitCode.CRASH
        if self._nodes is not None and self._is_elastic:
            self._nodes.restart(restarts)
        elif self._nodes is not None:
            self._nodes.end_job(ExitCode.CRASH)
        return RunResult(WorkerState.FAILED)

    def _leave_cut_off(self, seconds: float, limit: float) -> None:
        """End the ranks and this process, whose main thread may never return from a call to the store."""
        assert self._endpoint is not None
        self._is_cut_off = True
        self._ranks.end(0, signal.SIGKILL)
        self._reports.record_lost_link(self._endpoint, seconds, limit)
        say_end(ExitCode.CRASH)
        os._exit(ExitCode.CRASH)

    def _code_after_signal(self) -> ExitCode:
        codes = self._ranks.codes().values()
        code = final_code(codes)
        if code is None and (not codes or self._signals.have_ended(codes)):
            return ExitCode.STOPPED  # nothing was lost
        return code or (ExitCode.CRASH if any(codes) else ExitCode.COMPLETE)

    def _code_without_rendezvous(self, error: Exception) -> ExitCode | None:
        """Exit code of this launcher after an error of the rendezvous; None if only the traceback explains it."""
        # The launcher that ended the job has closed the rendezvous.
        code = self._nodes.exit_code() if self._nodes is not None else None
        if code is None and isinstance(error, RendezvousClosedError):
            code = self._run_end.exit_code() if self._run_end is not None else None
            say(f"The job ended {'before it needed this node' if code is not None else 'without saying how'}.")
            code = ExitCode.CRASH if code is None else code
        if code is None and isinstance(error, _LOST) and self._endpoint is not None:
            self._reports.record_lost_rendezvous(self._endpoint)
            code = ExitCode.CRASH
        return code

    def _part_from_nodes(self) -> None:
        """Let the other launchers read the end of the job, and those that wait for a place in the rendezvous."""
        nodes, end = self._nodes, self._run_end
        if end is None:
            return
        if self._store is None:
            end.leave(seconds=0.0)  # it had no part in the run
            return
        has_failed = nodes is not None and self.exit_code != ExitCode.COMPLETE
        with suppress(RendezvousError, SignalException):
            if nodes is not None and has_failed:
                nodes.end_job(self.exit_code)
            end.publish(self.exit_code)
            self._rdzv_handler.set_closed()
            if nodes is not None and has_failed:
                nodes.part(_PARTING_SECONDS)
            end.leave(_READ_SECONDS)
