"""torchrun with an agent for the exit codes of ``pretrain_llama.py``.

    python -m megatron.operation.launch [FLAGS OF torchrun] pretrain_llama.py FLAGS
    python -m megatron.operation.launch [FLAGS OF torchrun] -m megatron.commands.pretrain_llama FLAGS

Flags, rendezvous and restarts are torchrun's. Its agent is replaced by one that

- does not restart ranks that ended with 2, 75 or 93 (megatron/errors.py), and returns that code;
- passes a signal on to the ranks and waits for their save (--shutdown-timeout, 600 s unless given), however often a
  batch system repeats the signal;
- ends the other ranks 5 s after one has crashed, where torchrun waits up to 30 s;
- restarts, or ends the job, on all nodes together, with pauses if attempts fail at once;
- ends ranks that hang, and records why an attempt failed (megatron/operation/hang.py);
- with --nnodes MIN:MAX continues on the nodes that are left, and gives nodes that were named twice the last ranks;
- with --warm-processes keeps processes ready that have imported everything for the next attempt.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)
from torch.distributed.launcher import api as launcher

from megatron.console import protect_console
from megatron.errors import FINAL, ConfigError, ExitCode, write_error_file
from megatron.operation.attempt_recorder import Beginning, LaunchedAttempts
from megatron.operation.elastic import ELASTIC
from megatron.operation.failure import Failure
from megatron.operation.hang import RankWatch
from megatron.operation.heartbeat import HEARTBEATS, HeartbeatMemory, Section, run_directory_in
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
from megatron.operation.processes import LAUNCHER
from megatron.operation.ranks import end_processes
from megatron.operation.signals import StopSignals
from megatron.operation.warm import WarmProcesses
from megatron.torch_compat import (
    LOOPBACK,
    leave_rendezvous,
    listen_on_loopback,
    redirected_to,
    rendezvous_members,
    rendezvous_store,
    renew_store_address,
    start_rank,
    start_ranks_by,
)

SAVE_SECONDS = 600
"""Default of --shutdown-timeout: time for the ranks to finish an iteration and save."""
CRASH_SECONDS = 5
"""Time for other ranks to end after a crash; none of their collectives can complete."""
SIGNAL_SECONDS = 1.0
"""Time for a signal that has ended a rank to reach the launcher, too: a batch system signals all processes of a job."""
KILL_SECONDS = 10
"""Time for a killed process to end; it needs longer only if it waits in the kernel for a device."""
JOIN_SECONDS = 30
"""Time for ranks to begin a save when a node joins."""
LAST_CALL_SECONDS = 15
"""With MIN of --nnodes MIN:MAX reached, time for further nodes to join: as long as torch takes to notice a lost one."""
YIELD_SECONDS = 4.0
"""Time for a node that waits to take the place of one that was named twice."""
_PARTING_SECONDS = 60.0
_READ_SECONDS = 10.0  # for launchers that wait for a place to read the end; they look once a second
_NODES_SECONDS = 1.0  # between two reads of the state of other nodes
_LONG_ATTEMPT_SECONDS = 60.0  # of ranks without a heartbeat, after which a failure is not counted as one at once
_WARM_AFTER_SECONDS = 3.0  # of training


def final_code(exit_codes: Iterable[int]) -> ExitCode | None:
    """Exit code of a job whose ranks ended with ``exit_codes``; None if a restart may help."""
    found = set(exit_codes)
    return next((code for code in FINAL if code in found), None)


_LOST = (RendezvousConnectionError, DistError)
"""Errors of a store whose launcher or host has ended."""


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
        self._endpoint = endpoint
        self._store_watch: StoreWatch | None = None
        self._run_end: RunEnd | None = None
        self._is_cut_off = False
        self._signals = signals
        self._is_stopping = False
        """Whether a signal has ended the training."""
        self.exit_code = ExitCode.COMPLETE
        """Exit code of the job, after :meth:`run`."""
        self._save_seconds = save_seconds
        self._is_elastic = is_elastic
        self._warm = warm
        self._run_dir = run_dir
        self._nodes_read_at = 0.0
        self._heartbeats = HeartbeatMemory(self._worker_group.spec.local_world_size)
        os.environ[HEARTBEATS] = self._heartbeats.path
        self._attempts = LaunchedAttempts(
            self._heartbeats, run_dir, lambda text: print(text, file=sys.stderr, flush=True)
        )
        self._watch = RankWatch(self._heartbeats, [str(word) for word in self._worker_group.spec.args])
        self._survivors: list[int] = []
        """Local ranks whose processes cannot be killed."""
        self._named = NamedNodes(run_dir)
        self._backoff = Backoff()
        self._pause = 0.0
        self._started_at = time.monotonic()
        self._attempt_name = secrets.token_hex(8)
        """A name of the attempt, the same on all nodes."""

    def name_node(self, host: str, reason: str) -> None:
        """Record that ``host`` caused the failure of this attempt. ``reason`` is a cause class."""
        self._named.name(Naming(host, reason, self._attempt_name, time.time()), self._run_dir)

    def _name_cause(self) -> None:
        failure = self._watch.failure
        if failure is not None and failure.host is not None and failure.cause in CAUSES:
            self.name_node(failure.host, failure.cause)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._pause > 0.0:
            print(f"Several attempts have failed at once: waiting {self._pause:g} s.", file=sys.stderr, flush=True)
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

    def _leave_cut_off(self, seconds: float, limit: float) -> None:
        """End the ranks and this process, whose main thread may never return from a call to the store."""
        assert self._endpoint is not None
        self._is_cut_off = True
        if isinstance(self._pcontext, SubprocessContext):
            ranks = {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}
            end_processes(ranks, signal.SIGKILL, 0, KILL_SECONDS)
        self._watch.record_lost_link(self._endpoint, seconds, limit)
        print_end(ExitCode.CRASH)
        os._exit(ExitCode.CRASH)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        workers = list(super()._assign_worker_ranks(store, group_rank, group_world_size, spec))
        if group_world_size == 1:
            self._attempt_name = secrets.token_hex(8)
            return workers
        report = NodeReport(socket.gethostname(), spec.local_world_size, tuple(self._named.namings))

        def decide(texts: Sequence[str]) -> str:
            decision = order_nodes([NodeReport.from_text(text) for text in texts], self._named)
            if self._is_elastic:
                for sentence in decision.sentences:
                    print(sentence, file=sys.stderr, flush=True)
            return decision.to_text()

        nodes = Nodes(store, group_world_size)
        decision = NodeOrder.from_text(nodes.agree(group_rank, self._restarts, report.to_text(), decide))
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

    def _prepare_next_attempt(self) -> None:
        """Start warm processes when the ranks train."""
        if self._warm is None or self._remaining_restarts == 0:
            return
        begun = time.monotonic_ns() - int(_WARM_AFTER_SECONDS * 1e9)
        for rank in range(self._heartbeats.num_ranks):
            snapshot = self._heartbeats.read(rank)
            if snapshot is None or snapshot.attached_ns > begun or snapshot.section in (Section.START, Section.LOAD):
                return
        self._warm.prepare()

    def _made_progress(self) -> bool:
        """Whether the attempt that failed had finished an iteration."""
        snapshots = [self._heartbeats.read(rank) for rank in range(self._heartbeats.num_ranks)]
        if not any(snapshots):
            return time.monotonic() - self._started_at > _LONG_ATTEMPT_SECONDS
        return any(snapshot is not None and snapshot.section_ns[Section.OPTIMIZER] > 0 for snapshot in snapshots)

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
        if not self._survivors:
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
            self._close(CRASH_SECONDS)
            raise

    def _code_without_rendezvous(self, error: Exception) -> ExitCode | None:
        """Exit code of this launcher after an error of the rendezvous; None if only the traceback explains it."""
        # The launcher that ended the job has closed the rendezvous.
        code = self._nodes.exit_code() if self._nodes is not None else None
        if code is None and isinstance(error, RendezvousClosedError):
            code = self._run_end.read() if self._run_end is not None else None
            text = "before it needed this node" if code is not None else "without saying how"
            print(f"The job ended {text}.", file=sys.stderr, flush=True)
            code = ExitCode.CRASH if code is None else code
        if code is None and isinstance(error, _LOST) and self._endpoint is not None:
            self._watch.record_lost_rendezvous(self._endpoint)
            code = ExitCode.CRASH
        return code

    def _code_after_signal(self) -> ExitCode:
        codes = self._rank_codes().values()
        code = final_code(codes)
        if code is None and (not codes or self._signals.have_ended(codes)):
            return ExitCode.STOPPED  # nothing was lost
        return code or (ExitCode.CRASH if any(codes) else ExitCode.COMPLETE)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        while self._is_cut_off:
            time.sleep(1.0)  # another thread ends this process
        codes = self._rank_codes()
        if self._signals.have_ended(codes.values()):
            time.sleep(SIGNAL_SECONDS)
        failed = [rank for rank, code in codes.items() if code]
        hang = None if failed else self._watch.find_hang(codes)
        if hang is not None:
            failed = self._end_hanging_ranks(hang)
        elif failed:
            self._end_ranks_after_failure()
            if self._have_stopped_for_join():
                return RunResult(WorkerState.HEALTHY)  # torch's agent sees the node that joins, and restarts
        else:
            self._prepare_next_attempt()
        if self._survivors:
            return self._leave_job()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._pause = self._backoff.pause_after_failure(self._made_progress())
            exit_codes = [failure.exitcode for failure in result.failures.values()]
            self._conclude(exit_codes)
            code = final_code(exit_codes)
            if hang is None and code != ExitCode.STOPPED:
                local = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
                failures = {local[rank]: failure for rank, failure in result.failures.items()}
                self._watch.record_ends(failures, failed, code or ExitCode.CRASH, self._endpoint)
            self._name_cause()
            self._put_cause_first(result, [worker_group.workers[rank].global_rank for rank in failed])
            self._end_attempt(next(iter(result.failures.values())).exitcode)
        elif result.state == WorkerState.SUCCEEDED:
            self._watch.leave()
            self._end_attempt()
        elif result.state == WorkerState.HEALTHY and self._failed_elsewhere():
            self._watch.publish_health()
            self._pause = self._backoff.pause_after_failure(self._made_progress())
            self._close_after_crash()
            self._end_attempt()
            return self._leave_job() if self._survivors else RunResult(WorkerState.FAILED)
        self._attempts.poll()
        return result

    def _put_cause_first(self, result: RunResult, failed: Sequence[int]) -> None:
        """torch shows the earliest failure, in whole seconds, or the first: it must be the rank that failed first."""
        cause = self._watch.failure.rank if self._watch.failure is not None else None
        order = [rank for rank in (cause, *failed, *result.failures) if rank in result.failures]
        result.failures = {rank: result.failures[rank] for rank in order if rank is not None}
        earliest = min((failure.timestamp for failure in result.failures.values()), default=0)
        if order:
            result.failures[order[0]].timestamp = earliest

    def _end_hanging_ranks(self, hang: Failure) -> list[int]:
        """Kill the ranks: SIGTERM would only ask them to finish an iteration that cannot end. Returns the local rank to
        show first at the end of the job."""
        assert self._pcontext is not None
        is_here = hang.local_rank is not None and hang.host == socket.gethostname()
        shown = hang.local_rank if is_here and hang.local_rank is not None else 0
        write_error_file(Path(self._pcontext.error_files[shown]), hang.message, int(time.time()) - 1)
        self._close(CRASH_SECONDS, signal.SIGKILL)
        return [shown]

    def _leave_job(self) -> RunResult:
        """End this launcher: new ranks would find the devices of this node in use. The other nodes restart without it,
        if their number may vary."""
        for local_rank in self._survivors:
            self._watch.record_survivor(local_rank)
        restarts, self._remaining_restarts = self._restarts, 0
        self.exit_code = ExitCode.CRASH
        if self._nodes is not None and self._is_elastic:
            self._nodes.restart(restarts)
        elif self._nodes is not None:
            self._nodes.end_job(ExitCode.CRASH)
        return RunResult(WorkerState.FAILED)

    def _have_stopped_for_join(self) -> bool:
        """Whether the ranks have stopped because another launcher stops its own for a node that joins."""
        codes = set(self._rank_codes().values())
        return codes <= {ExitCode.STOPPED, ExitCode.COMPLETE} and bool(self._nodes and self._nodes.stops_for_join())

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
            self._wait_for_save()
        self._close_after_crash()
        super()._stop_workers(worker_group)
        self._end_attempt()

    def _wait_for_save(self) -> None:
        """Let the ranks stop and save. A rank that hangs, because a node was lost, gets :data:`JOIN_SECONDS`."""
        if not isinstance(self._pcontext, SubprocessContext):
            return
        for rank in self._pcontext.subprocess_handlers.keys() - self._rank_codes().keys():
            with suppress(ProcessLookupError):
                os.killpg(self._pcontext.subprocess_handlers[rank].proc.pid, signal.SIGTERM)
        now = time.monotonic()
        give_up, latest = now + JOIN_SECONDS, now + self._save_seconds
        while self._has_running_ranks() and now < min(give_up, latest):
            time.sleep(0.05)
            now = time.monotonic()
            snapshots = [self._heartbeats.read(rank) for rank in range(self._heartbeats.num_ranks)]
            if any(snapshot is not None and snapshot.section == Section.SAVE for snapshot in snapshots):
                give_up = now + JOIN_SECONDS

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # torch 2.11 calls it without a timeout.
        self._close(self._save_seconds, death_sig)
        if not self._survivors:
            super()._shutdown(death_sig)  # would wait for them
        self._end_attempt()

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
        self._watch.leave()
        deadline = time.monotonic() + self._save_seconds
        # All ranks have saved when the first has stopped on request, but some may still copy.
        while set(self._rank_codes().values()) <= {ExitCode.STOPPED, ExitCode.COMPLETE} and self._has_running_ranks():
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self._close_after_crash()

    def _close(self, seconds: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
        """Signal the running ranks, and kill those that have not ended after ``seconds``, or :data:`CRASH_SECONDS`
        after one has crashed."""
        self._watch.leave()
        if not self._survivors and isinstance(self._pcontext, SubprocessContext) and self._has_running_ranks():
            ranks = {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}
            self._survivors = end_processes(ranks, death_signal, seconds, KILL_SECONDS, crash_seconds=CRASH_SECONDS)

    def _close_after_crash(self) -> None:
        """End the ranks of an attempt that has failed. A spare would wait for an end of the training."""
        if isinstance(self._pcontext, SubprocessContext):
            for rank, handler in self._pcontext.subprocess_handlers.items():
                snapshot = self._heartbeats.read(rank)
                if snapshot is not None and snapshot.section == Section.SPARE and handler.proc.poll() is None:
                    handler.proc.kill()
        self._close(CRASH_SECONDS)

    def _end_attempt(self, exit_code: int | None = None) -> None:
        """Record the end of the attempt, once; ``exit_code`` is of the rank that failed first."""
        codes = self._rank_codes().values()
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

    def _end_job(self, code: ExitCode) -> None:
        self.exit_code = code
        self._remaining_restarts = 0
        if self._nodes is not None:
            self._nodes.end_job(code)

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


def parse(arguments: Sequence[str]) -> Namespace:
    """torchrun's flags, and ours."""
    parser = torchrun.get_args_parser()
    parser.add_argument(
        "--warm-processes",
        action=BooleanOptionalAction,
        default=False,
        help="Keep a process per rank that has imported everything, for a faster restart; needs memory.",
    )
    return parser.parse_args(arguments)


def prepare_elastic(options: Namespace) -> bool:
    """Whether the number of nodes may change; raises :class:`ConfigError`."""
    try:
        smallest, largest = torchrun.parse_min_max_nnodes(options.nnodes)
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {options.nnodes} is neither a number nor MIN:MAX: use one of them.") from None
    if smallest == largest:
        return False
    if options.rdzv_backend == "static" and not options.standalone:
        raise ConfigError(
            f"--nnodes {options.nnodes} needs a rendezvous that nodes can join later: add --rdzv-backend c10d."
        )
    if "last_call_timeout" not in options.rdzv_conf:
        options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, f"last_call_timeout={LAST_CALL_SECONDS}"]))
    return True


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns its exit code."""
    options = parse(arguments)
    try:
        is_elastic = prepare_elastic(options)
        signals = StopSignals(options.signals_to_handle)
    except ConfigError as error:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    save_seconds = getattr(options, "shutdown_timeout", None)  # torch 2.11 has no such flag
    if save_seconds is None:
        save_seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVE_SECONDS))
    agents: list[Agent] = []
    endpoint = rendezvous_endpoint(options)

    def build_agent(**keywords: Any) -> Agent:
        warm = WarmProcesses() if options.warm_processes else None
        run_dir = run_directory_in(options.training_script_args)
        agents.append(Agent(save_seconds, is_elastic, warm, run_dir, signals, endpoint, **keywords))
        start_ranks_by(agents[0].start_rank)
        return agents[0]

    os.environ[LAUNCHER] = str(os.getpid())
    if options.standalone:
        listen_on_loopback()
        options.local_addr = options.local_addr or LOOPBACK
    if is_elastic:
        os.environ[ELASTIC] = "1"
    # torchrun makes its agent by this name.
    vars(launcher)["LocalElasticAgent"] = build_agent
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        if agents[0].exit_code != ExitCode.STOPPED:
            print(error, file=sys.stderr, flush=True)
    except SignalException as error:
        if not agents:
            return ExitCode.STOPPED
        print(f"{error}: killing the ranks that still run.", file=sys.stderr, flush=True)
        return ExitCode.CRASH
    except RendezvousConnectionError as error:
        if agents or endpoint is None:
            raise
        print(
            f"ERROR: the rendezvous host {endpoint} cannot be reached: {error.__cause__}.", file=sys.stderr, flush=True
        )
        return ExitCode.CRASH
    if not agents:
        return ExitCode.CRASH
    code = agents[0].exit_code
    if code != ExitCode.COMPLETE:
        print_end(code)
    return code


def print_end(code: ExitCode) -> None:
    print(f"The job ends with exit code {int(code)} ({code.name}).", file=sys.stderr, flush=True)


def rendezvous_endpoint(options: Namespace) -> str | None:
    """Host and port of the rendezvous of several nodes; None for a job on one node."""
    if options.standalone or torchrun.parse_min_max_nnodes(options.nnodes)[1] == 1:
        return None
    return str(options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}")


def run(arguments: Sequence[str]) -> int:
    """Run the job with a console that cannot end it; returns its exit code."""
    protect_console()
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
