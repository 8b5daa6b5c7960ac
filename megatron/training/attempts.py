"""The attempt around a run: its record (megatron/operation/attempts.py), and the refusal after too many failed ones."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.directory import TRACKER, saved_iterations
from megatron.core.control import run_on_rank0
from megatron.errors import ExitCode, NoProgressError, UserError, cause_of
from megatron.operation.attempt_recorder import (
    AttemptRecorder,
    Beginning,
    FailureFacts,
    RecorderThread,
    outcome_of,
    process_age_s,
    reported_failure,
)
from megatron.operation.attempts import EffectiveTimeMeter, check_progress
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

    The directories of the run must be locked. Without a run directory nothing is written. Raises
    :class:`~megatron.errors.NoProgressError` on every rank after ``--max-failed-attempts``; without ``--save`` there
    are no checkpoints to measure progress by.
    """
    config, control, heartbeat = context.config, context.control, context.heartbeat
    end, directory = AttemptEnd(), run_directory(config)
    if directory is None or config.validation.skip_train:
        yield end
        return
    hosts = _fitting(control.all_gather_object(socket.gethostname()))
    beginning, thread, counts_from, refusal = _beginning(heartbeat), None, None, None
    if control.rank == 0:
        limit = config.operation.max_failed_attempts
        if config.checkpoint.save is not None:
            counts_from = newest_iteration(Path(config.checkpoint.save)) or 0
        try:
            if limit and counts_from is not None:
                check_progress(directory, beginning.epoch, counts_from, limit)
        except NoProgressError as error:
            refusal, counts_from = error, None  # a refusal is no further failure
        settings = RunSettings.of(config, control.rank, control.size)
        heartbeat.write_settings(replace(settings, hosts=hosts, counts_from=counts_from).to_json())
        if heartbeat.is_private:
            recorder = AttemptRecorder(
                directory, beginning, control.size, hosts, context.warn_rank0, counts_from=counts_from
            )
            thread = RecorderThread(recorder, heartbeat)
    facts = None

    def check() -> None:
        if refusal is not None:
            raise refusal

    try:
        run_on_rank0(control, check)
        yield end
    except Exception as error:
        end.exit_code = error.exit_code if isinstance(error, UserError) else ExitCode.CRASH
        # Another rank may have failed first, and this one as a consequence.
        facts = reported_failure(directory, beginning.epoch) or FailureFacts(cause_of(error))
        raise
    finally:
        if thread is not None:
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


def newest_iteration(root: Path) -> int | None:
    """The iteration that was saved last in ``root``, which after a return to an older checkpoint is not the highest."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return max(saved_iterations(root), default=None)
