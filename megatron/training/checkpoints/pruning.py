"""Deleting the checkpoints that ``--save-retain-last`` and ``--save-retain-interval`` do not keep."""

from collections.abc import Collection
from functools import partial
from pathlib import Path

from megatron.checkpoint.checkpointing import verify_share
from megatron.checkpoint.directory import iteration_directory, locate_checkpoint, remove_checkpoint
from megatron.checkpoint.finding import list_checkpoints
from megatron.checkpoint.retention import Retention
from megatron.core.run_on_ranks import run_on_all_ranks, run_on_rank0
from megatron.training.context import RunContext


class Pruning:
    """Deletes what ``--save-retain-last`` and ``--save-retain-interval`` do not keep under one directory."""

    def __init__(self, context: RunContext, root: Path) -> None:
        config = context.config.checkpoint
        self._deletes, self._root, self._world, self._log_rank0 = config.deletes, root, context.world, context.log_rank0
        self.retention = Retention(config.save_retain_last, config.save_retain_interval, self._verify)

    def prune(self, newest: int, in_use: Collection[int] = ()) -> None:
        """Delete what may go now that ``newest`` is saved, unless it is ``in_use``; all ranks call it."""
        if not self._deletes:
            return
        there = run_on_rank0(self._world, lambda: list_checkpoints(self._root))
        # What is beyond was abandoned for an older checkpoint: it must not count as the newest.
        superfluous = self.retention.superfluous([iteration for iteration in there if iteration <= newest])
        if self._world.rank == 0:
            for iteration in (iteration for iteration in superfluous if iteration not in in_use):
                remove_checkpoint(locate_checkpoint(self._root, iteration))
                self._log_rank0(f"deleted checkpoint {iteration_directory(self._root, iteration)}")

    def _verify(self, iteration: int) -> None:
        run_on_all_ranks(self._world, partial(verify_share, self._root, iteration, self._world.rank, self._world.size))
