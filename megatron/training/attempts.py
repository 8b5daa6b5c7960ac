"""Attempts around a run: their records (megatron/operation/attempts.py), and the count of the failed ones
(megatron/operation/attempts.py)."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.directory import TRACKER, saved_iterations
from megatron.core.control import run_on_rank0
from megatron.errors import ExitCode, UserError, cause_of
from megatron.operation.attempt_recorder import (
    AttemptRecorder,
    Beginning,
    FailureFacts,
    RecorderThread,
    outcome_of,
    process_age_s,
    reported_failure,
)
from megatron.operation.attempts import AttemptCounter, EffectiveTimeMeter
from megatron.operation.heartbeat import Heartbeat, RunSettings, run_directory
from megatron.training.context import RunContext

_HOSTS_LENGTH = 4000  # characters of all host names; the settings have 8 KB


@dataclass
class AttemptEnd:
    """How the attempt ended."""

    exit_code: ExitCode = ExitCode.CRASH


@contextmanager
def attempt_recorded(context: RunContext) -> Iterator[AttemptEnd]:
    """Record the seconds of this attempt, here on rank 0 if no launcher does; the body sets the end.

    The directories of the run must be locked. Without a run directory nothing is written.
    """
    end, directory, control = AttemptEnd(), run_directory(context.config), context.control
    if directory is None or context.config.validation.skip_train:
        yield end
        return
    hosts = _fitting(control.all_gather_object(socket.gethostname()))
    if control.rank > 0:
        yield end
        return
    settings = RunSettings.of(context.config, control.rank, control.size)
    context.heartbeat.write_settings(replace(settings, hosts=hosts).to_json())
    if not context.heartbeat.is_private:
        yield end
        return
    beginning = _beginning(context.heartbeat)
    recorder = AttemptRecorder(directory, beginning, control.size, hosts, context.warn_rank0)
    thread = RecorderThread(recorder, context.heartbeat)
    facts = None
    try:
        yield end
    except Exception as error:
        end.exit_code = error.exit_code if isinstance(error, UserError) else ExitCode.CRASH
        # Another rank may have failed first, and this one as a consequence.
        facts = reported_failure(directory, beginning.epoch) or FailureFacts(cause_of(error))
        raise
    finally:
        thread.finish(outcome_of([end.exit_code]), end.exit_code, facts)


def effective_time_meter(context: RunContext) -> EffectiveTimeMeter | None:
    """The meter on rank 0 of a run with a run directory."""
    directory = run_directory(context.config)
    if directory is None or context.control.rank > 0:
        return None
    beginning = _beginning(context.heartbeat)
    return EffectiveTimeMeter(directory, beginning.epoch, beginning.monotonic_ns)


def _beginning(heartbeat: Heartbeat) -> Beginning:
    """When this attempt began. Under the launcher a process may have been started before the attempt (a warm one)."""
    if heartbeat.is_private:
        return Beginning.now(age_s=process_age_s())
    return Beginning.now(age_s=(time.monotonic_ns() - heartbeat.snapshot().attached_ns) / 1e9)


def _fitting(hosts: Sequence[str]) -> tuple[str, ...]:
    """Each host once, as many as the settings have room for."""
    found = list(dict.fromkeys(hosts))
    while len("".join(found)) + 4 * len(found) > _HOSTS_LENGTH:
        found.pop()
    return tuple(found)


@contextmanager
def attempt_counted(context: RunContext) -> Iterator[None]:
    """Count this attempt on rank 0; raises :class:`NoProgressError` on every rank after too many failed attempts.

    Without ``--save`` there are no checkpoints to measure progress by.
    """
    config, control = context.config, context.control
    save, limit = config.checkpoint.save, config.operation.max_failed_attempts
    if save is None or limit == 0 or config.validation.skip_train:
        yield
        return
    counter = AttemptCounter(Path(config.operation.run_dir or save), limit)

    def begin() -> None:
        try:
            counter.begin(newest_iteration(Path(save)))
        except OSError as error:
            context.log_rank0(f"--max-failed-attempts does not count this attempt: {error}")

    run_on_rank0(control, begin)
    try:
        yield
    except UserError as error:
        if control.rank == 0 and error.exit_code in (ExitCode.ACTION_REQUIRED, ExitCode.STOPPED):
            counter.take_back(newest_iteration(Path(save)))
        raise
    if control.rank == 0:
        counter.take_back(newest_iteration(Path(save)))


def newest_iteration(root: Path) -> int | None:
    """The iteration that was saved last in ``root``, which after a return to an older checkpoint is not the highest."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return max(saved_iterations(root), default=None)
