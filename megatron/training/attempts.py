"""Counting of failed attempts (megatron/operation/attempts.py) around a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpoint.directory import TRACKER, saved_iterations
from megatron.core.run_on_ranks import run_on_rank0
from megatron.errors import ExitCode, UserError
from megatron.operation.attempts import AttemptCounter
from megatron.training.context import RunContext


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
