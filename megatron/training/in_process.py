"""Restarts of the training in the processes of its ranks, by nvidia-resiliency-ext (``--inprocess-restart``).

After an exception in a rank all ranks leave the training, and call it again together. The wrapper of the package brings
the ranks together. Everything else ends the processes, and the launcher starts new ones:

- a rank that was killed: the wrapper would continue with fewer ranks;
- a rank that hangs: the watchdog of the launcher decides, so the timeouts of the package never end;
- an error of :mod:`megatron.errors`, for which exit codes and the counts of named nodes apply;
- an exception before the first iteration of an attempt is done, which a restart would only repeat.
"""

import gc
import importlib
import json
import logging
import os
import secrets
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from megatron.errors import CULPRIT_SECONDS, ConfigError, ExitCode, UserError, cause_of
from megatron.operation.elastic import ELASTIC
from megatron.operation.failure import FILE, RankEnd, attempt_number, failure_of_ends, write_failure
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.operation.namespace import fresh_namespace
from megatron.operation.processes import LAUNCHER
from megatron.training.initialize import Process, leave_groups

PACKAGE = "nvidia_resiliency_ext.inprocess"
# Between two looks of a rank at the store for exceptions of others; in a large world _LONGEST_POLL_SECONDS.
_POLL_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 1.0
_LARGE_WORLD = 1000
_DAY = timedelta(days=1)
_START = timedelta(minutes=10)
# For all ranks to leave the training after the first.
_LEAVE = timedelta(seconds=30)


class EndProcess(BaseException):
    """This process must end, for ``error`` or because another one has ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class InProcessRestart:
    """Calls ``train`` again after an exception. ``on_gpu``: whether collectives are NCCL's."""

    def __init__(self, train: Callable[[], ExitCode], process: Process, heartbeat: Heartbeat, on_gpu: bool) -> None:
        self._package = import_package()
        self._store_module = importlib.import_module("nvidia_resiliency_ext.inprocess.store")
        self._train, self._process, self._heartbeat, self._on_gpu = train, process, heartbeat, on_gpu
        shared, _, _ = next(rendezvous("env://", process.rank, process.world_size, timeout=_START))
        self._shared: Store = shared  # of rank 0, if no launcher has it
        self._ends = fresh_namespace(shared, process.rank, process.world_size, _START)
        if process.rank == 0:
            self._ends.set("name", secrets.token_hex(8))

    def run(self) -> ExitCode:
        """Train, with restarts; raises the error that ends this process."""
        logging.getLogger(PACKAGE).setLevel(logging.CRITICAL + 1)  # rank 0 prints why an attempt failed
        warnings.filterwarnings("ignore", message="logging not initialized", category=UserWarning)
        try:
            return ExitCode(self._wrapper()(self._annotated())())
        except self._store_module.BarrierError as error:
            raise RuntimeError("Timed out waiting for other ranks, which do not leave the training.") from error
        except EndProcess as end:
            if end.error is not None:
                raise end.error from None
            time.sleep(CULPRIT_SECONDS)  # the launcher reports the rank that ended first, and ends this one
            raise RuntimeError("Connection closed by peer: another rank has ended.") from None

    def _wrapper(self) -> Any:
        package = self._package
        store = {"name": self._ends.get("name").decode(), "port": int(os.environ["MASTER_PORT"])}
        share = self._process.world_size / _LARGE_WORLD
        poll = timedelta(seconds=min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, share * _LONGEST_POLL_SECONDS)))
        wrapper = package.Wrapper(
            store_factory=_store_class(self._store_module),
            store_kwargs={"host": os.environ["MASTER_ADDR"], **store},
            health_check=package.health_check.CudaHealthCheck() if self._on_gpu else None,
            monitor_thread_interval=poll,
            monitor_process_interval=poll,
            last_call_wait=poll,
            progress_watchdog_interval=timedelta(seconds=1),
            heartbeat_timeout=timedelta(minutes=10),
            soft_timeout=_DAY,
            hard_timeout=2 * _DAY,
            barrier_timeout=3 * _DAY,
            completion_timeout=3 * _DAY,
        )
        # The constructor would refuse one that is shorter than the others.
        wrapper.barrier_timeout = _LEAVE
        return wrapper

    def _annotated(self) -> Callable[..., ExitCode]:
        """The package passes its state as the argument with this annotation."""

        def train(call: Any = None) -> ExitCode:
            return self._attempt(call)

        train.__annotations__["call"] = self._package.CallWrapper
        return train

    def _attempt(self, call: Any) -> ExitCode:
        if int(os.environ["WORLD_SIZE"]) < self._process.world_size:
            _end_process(call)
        if call.iteration > 0:  # record why the last attempt of these processes failed
            if self._process.rank == 0:
                self._record(call.iteration - 1)
            self._heartbeat.begin()
        # The package raises its exception in a rank at any line, which has aborted a process that was in a library
        # written in C++; not while the rank holds this lock. Collectives of gloo fail when another rank leaves its
        # groups, those of NCCL wait until the package has aborted them.
        with nullcontext() if self._on_gpu else call.atomic():
            try:
                return self._train()
            except Exception as error:
                text = traceback.format_exc()
                # Its frames hold the trainer and the process groups.
                error.__traceback__ = error.__context__ = error.__cause__ = None
                failed = error
            if must_end(failed, self._heartbeat):
                gc.collect()
                leave_groups()
                _end_process(call, failed)
            self._publish_end(call.iteration, failed, text)
            gc.collect()
            if not self._on_gpu:
                leave_groups()
        raise RuntimeError(text)

    def _publish_end(self, number: int, error: Exception, text: str) -> None:
        end = RankEnd(
            rank=self._process.rank,
            local_rank=self._process.local_rank,
            host=socket.gethostname(),
            exit_code=ExitCode.CRASH,
            text=text,
            cause=cause_of(error),
            time=time.time(),
            **self._heartbeat.snapshot().position(),
        )
        if not end.is_consequence:
            print(text, file=sys.stderr, flush=True)
        self._ends.set(f"end/{number}/{end.rank}", json.dumps(asdict(end)))

    def _record(self, number: int) -> None:
        keys = [f"end/{number}/{rank}" for rank in range(self._process.world_size)]
        ends = [RankEnd(**json.loads(self._ends.get(key))) for key in keys if self._ends.check([key])]
        if not ends:
            return
        failure = failure_of_ends(ends, ExitCode.CRASH, out_of_memory=False)
        print(f"The attempt failed ({failure.cause}). {failure.message} All ranks restart in process.", flush=True)
        directory = self._heartbeat.settings.get("run_dir")
        if directory is None:
            return
        started = time.time() - (time.monotonic_ns() - self._heartbeat.snapshot().attached_ns) * 1e-9
        try:
            write_failure(Path(directory), failure, attempt_number(Path(directory), started))
        except OSError as error:
            print(f"WARNING: {FILE} cannot be written ({error}).", flush=True)


def _end_process(call: Any, error: Exception | None = None) -> NoReturn:
    call.wrapper.barrier_timeout = timedelta(0)  # the launcher ends the other ranks: the package need not wait for them
    raise EndProcess(error)


def must_end(error: Exception, heartbeat: Heartbeat) -> bool:
    """Whether only a new process may help after ``error``, or nothing."""
    has_trained = heartbeat.snapshot().section_ns[Section.OPTIMIZER] > 0
    return isinstance(error, UserError) or cause_of(error) != "exception" or not has_trained


def import_package() -> Any:
    """The package; raises :class:`ConfigError` where it is missing, or without the launcher it relies on."""
    if LAUNCHER not in os.environ:
        raise ConfigError(
            "--inprocess-restart needs the launcher, which ends ranks that hang and records attempts: start the run "
            "with python -m megatron.operation.launch."
        )
    if ELASTIC in os.environ:
        raise ConfigError("--inprocess-restart needs a fixed number of nodes: remove it, or use --nnodes N.")
    try:
        package = importlib.import_module("nvidia_resiliency_ext.inprocess")
        importlib.import_module("nvidia_resiliency_ext.inprocess.health_check")
        return package
    except ImportError as error:
        raise ConfigError(
            f"--inprocess-restart needs nvidia-resiliency-ext ({error}): pip install nvidia-resiliency-ext, or remove "
            "the flag."
        ) from error


def _store_class(module: Any) -> Any:
    """A class of stores for the package, whose keys no other attempt has. The launcher keeps its store, and the package
    would read there the keys of earlier processes."""

    class AttemptStore(Store, module.StoreMixin):
        def __init__(self, host: str, port: int, name: str) -> None:
            super().__init__()
            server = TCPStore(host, port, is_master=False, timeout=_START, wait_for_workers=False)
            self._keys: Any = PrefixStore(name, server)

        def has_extended_api(self) -> bool:
            return True

        def set(self, key: str, value: Any) -> None:
            self._keys.set(key, value)

        def get(self, key: str) -> bytes:
            return bytes(self._keys.get(key))

        def add(self, key: str, value: int) -> int:
            return int(self._keys.add(key, value))

        def append(self, key: str, value: Any) -> None:
            self._keys.append(key, value)

        def check(self, keys: list[str]) -> bool:
            return bool(self._keys.check(keys))

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return list(self._keys.multi_get(keys))

        def wait(self, keys: list[str], timeout: timedelta = _START) -> None:
            # The package waits for a tenth of a second, and torch prints two lines at the end of each such wait.
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._keys.check(keys):
                if time.monotonic() > deadline:
                    raise DistStoreError(f"{keys} are missing")
                time.sleep(_POLL_SECONDS / 2)

    return AttemptStore
