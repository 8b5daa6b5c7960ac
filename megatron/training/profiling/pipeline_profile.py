"""The measured timeline of the pipeline in one iteration (``--profile-pipeline``)."""

import errno
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.pipeline_parallel.executor import ActionRecorder
from megatron.errors import ConfigError
from megatron.schedules.simulator import Timeline
from megatron.training.context import LogRank0
from megatron.training.loop.trainer import IterationResult, Listener, Trainer
from megatron.training.pipeline_trace import to_chrome_trace


def check_trace_path(path: str | None) -> None:
    """Raise :class:`ConfigError` unless the trace can be written."""
    if path is None:
        return
    try:
        directory = Path(path).parent
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
    except OSError as error:
        raise ConfigError(
            f"--profile-pipeline {path} cannot be written ({error.strerror}): use another file."
        ) from error


@dataclass
class PipelineProfile(Listener):
    """Records one iteration of rank 0's pipeline, and writes a Chrome trace."""

    path: str
    iteration: int
    log_rank0: LogRank0

    def on_iteration_start(self, trainer: Trainer) -> None:
        if trainer.state.progress.iteration + 1 == self.iteration:
            # A barrier, so that the clocks of all ranks start together.
            trainer.context.topology.world.all_reduce(torch.zeros(1, device=trainer.context.topology.device)).item()
            trainer.module.executor.recorder = ActionRecorder(trainer.context.topology.device)

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if trainer.state.progress.iteration == self.iteration:
            self._write(trainer)

    def on_end(self, trainer: Trainer, reason: str) -> None:
        if trainer.state.progress.iteration < self.iteration:
            self.log_rank0(f"--profile-pipeline recorded nothing: the run ended before iteration {self.iteration}")

    def _write(self, trainer: Trainer) -> None:
        recorder, trainer.module.executor.recorder = trainer.module.executor.recorder, None
        assert isinstance(recorder, ActionRecorder)
        topology = trainer.context.topology
        stage_ranks = topology.grid.group(0, ("pp",))
        spans_by_rank = topology.control.all_gather_object(recorder.spans() if topology.rank in stage_ranks else ())
        if topology.rank != 0:
            return
        stages = [spans_by_rank[rank] for rank in stage_ranks]
        num_microbatches = 1 + max(span.action.microbatch for span in stages[0])
        spans = tuple(span for stage in stages for span in stage)
        trace = to_chrome_trace(trainer.module.executor.schedule(num_microbatches), Timeline(len(stages), spans))
        try:
            partial = f"{self.path}.partial"
            Path(partial).write_text(json.dumps(trace))
            os.replace(partial, self.path)
        except OSError as error:
            self.log_rank0(f"--profile-pipeline {self.path} could not be written ({error.strerror})")
        else:
            self.log_rank0(f"pipeline of iteration {self.iteration} written to {self.path}")
