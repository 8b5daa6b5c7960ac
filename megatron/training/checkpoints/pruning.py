"""Deletion of old checkpoints (``--save-retain-last``, ``--save-retain-interval``)."""

from collections.abc import Collection
from functools import partial
from pathlib import Path

from megatron.checkpoint.directory import Retention, iteration_directory, locate_checkpoint, remove_checkpoint
from megatron.checkpoint.finding import list_checkpoints, verify_share
from megatron.core.control import run_on_all_ranks, run_on_rank0
from megatron.training.context import RunContext


class Pruning:
    """Deletes the checkpoints of one directory that the flags do not retain."""

    def __init__(self, context: RunContext, root: Path) -> None:
        config = context.config.checkpoint
        self._deletes, self._root = config.deletes, root
        self._control, self._log_rank0 = context.control, context.log_rank0
        self.retention = Retention(config.save_retain_last, config.save_retain_interval, self._verify)

    def prune(self, newest: int, in_use: Collection[int] = (), safe_before: int | None = None) -> None:
        """Delete old checkpoints after ``newest`` was saved, except those ``in_use``; a collective.

        The newest one up to iteration ``safe_before`` stays as well.
        """
        if not self._deletes:
            return
        there = run_on_rank0(self._control, lambda: list_checkpoints(self._root))
        # Iterations above ``newest`` were abandoned when the run returned to an older checkpoint.
        superfluous = self.retention.superfluous([iteration for iteration in there if iteration <= newest])
        kept = {*in_use, *([] if safe_before is None else [one for one in there if one <= safe_before][-1:])}

        def delete() -> None:
            for iteration in (iteration for iteration in superfluous if iteration not in kept):
                remove_checkpoint(locate_checkpoint(self._root, iteration))
                self._log_rank0(f"deleted checkpoint {iteration_directory(self._root, iteration)}")

        # The others wait, because rank 0 may take long: in a collective of training they would time out.
        run_on_rank0(self._control, delete)

    def _verify(self, iteration: int) -> None:
        rank, size = self._control.rank, self._control.size
        run_on_all_ranks(self._control, partial(verify_share, self._root, iteration, rank, size))
