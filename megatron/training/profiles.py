"""Profiles of a run: iterations (``--profile``), the pipeline (``--profile-pipeline``), and GPU memory
(``--record-memory-history``)."""

import json
import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import torch_compat
from megatron.config.operation import LoggingConfig
from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel import ActionRecorder, NamedActions
from megatron.core.topology import Topology
from megatron.errors import ConfigError, RankError
from megatron.operation.attempts import replace_file
from megatron.schedules.simulator import Timeline
from megatron.training.checkpoints.save_directories import check_writable
from megatron.training.context import LogRank0
from megatron.training.loop.trainer import IterationResult, Listener, Trainer
from megatron.training.pipeline_trace import to_chrome_trace

_MAX_ENTRIES = 100_000  # as in Megatron-LM; older allocations and frees are dropped
_logger = logging.getLogger(__name__)


def build_profile(config: RunConfig, rank: int, device: torch.device, log_rank0: LogRank0) -> Listener | None:
    """The profile of ``--profile`` on this rank; None if it is not profiled."""
    logging = config.logging
    if not logging.profile or rank not in (logging.profile_ranks or (0,)):
        return None
    start, end = logging.profile_step_start, logging.profile_step_end
    if logging.use_pytorch_profiler:
        root = logging.tensorboard_dir or config.checkpoint.save
        assert root is not None  # checked by check_run
        return TraceProfile(start, end, log_rank0, Path(root) / "profile" / f"rank_{rank}.pt.trace.json", device)
    if device.type == "cpu":
        log_rank0("--profile without --use-pytorch-profiler needs a GPU and nsys: nothing is recorded")
        return None
    return NsysProfile(start, end, log_rank0)


class WindowProfile(Listener, ABC):
    """Records iterations ``start + 1`` to ``end``."""

    def __init__(self, start: int, end: int, log_rank0: LogRank0) -> None:
        self._start, self._end, self._log_rank0 = start, end, log_rank0
        self._has_begun = self._is_recording = False

    def on_iteration_start(self, trainer: Trainer) -> None:
        if not self._is_recording and self._start <= trainer.state.progress.iteration < self._end:
            self._has_begun = self._is_recording = True
            self.begin()
        executor = trainer.module.executor
        if self._is_recording and executor.recorder is None:  # --profile-pipeline may have set one
            executor.recorder = NamedActions()

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        executor = trainer.module.executor
        if isinstance(executor.recorder, NamedActions):
            executor.recorder = None
        if trainer.state.progress.iteration >= self._end:
            self.close()

    def on_end(self, trainer: Trainer, reason: str) -> None:
        if not self._has_begun:
            self._log_rank0(
                f"--profile recorded nothing: iterations {self._start + 1} to {self._end} are not in this run"
            )

    def close(self) -> None:
        if self._is_recording:
            self._is_recording = False
            self.finish()

    @abstractmethod
    def begin(self) -> None:
        """Start recording."""

    @abstractmethod
    def finish(self) -> None:
        """Stop recording, and write the profile."""


class TraceProfile(WindowProfile):
    """Writes a Chrome trace of operations, kernels and memory to ``path``."""

    def __init__(self, start: int, end: int, log_rank0: LogRank0, path: Path, device: torch.device) -> None:
        super().__init__(start, end, log_rank0)
        self._path = path
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type != "cpu":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: Any = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RankError(
                f"--profile cannot write {path} ({error.strerror}): use another --tensorboard-dir or --save."
            ) from error

    def begin(self) -> None:
        self._profiler.start()

    def finish(self) -> None:
        self._profiler.stop()
        try:
            self._path.unlink(missing_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            self._path.stat()  # torch only logs that it could not open a file
        except (OSError, RuntimeError) as error:
            _logger.warning("--profile could not write %s (%s)", self._path, error)
        else:
            self._log_rank0(f"profile written to {self._path}")


class NsysProfile(WindowProfile):
    """Marks the range that nsys captures, and names operations in it (NVTX)."""

    def __init__(self, start: int, end: int, log_rank0: LogRank0) -> None:
        super().__init__(start, end, log_rank0)
        self._ranges = ExitStack()

    def begin(self) -> None:
        torch.cuda.cudart().cudaProfilerStart()
        names: AbstractContextManager[object] = torch.autograd.profiler.emit_nvtx(record_shapes=True)
        self._ranges.enter_context(names)

    def finish(self) -> None:
        self._ranges.close()
        torch.cuda.cudart().cudaProfilerStop()


def check_trace_path(path: str | None) -> None:
    """Raise :class:`ConfigError` unless the trace can be written."""
    if path is None:
        return
    if Path(path).is_dir():
        raise ConfigError(f"--profile-pipeline {path} cannot be written (it is a directory): use another file.")
    check_writable("--profile-pipeline", Path(path).parent)


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
            replace_file(Path(self.path), json.dumps(trace))
        except OSError as error:
            self.log_rank0(f"--profile-pipeline {self.path} could not be written ({error.strerror})")
        else:
            self.log_rank0(f"pipeline of iteration {self.iteration} written to {self.path}")


def start_memory_history(config: LoggingConfig, topology: Topology) -> "MemoryHistory | None":
    """Begin to record on the last rank, as Megatron-LM does; before the model is allocated, so that the snapshot has
    the stacks of the weights. None on other ranks and without the flag. Raises :class:`ConfigError` on a CPU."""
    if not config.record_memory_history:
        return None
    if topology.device.type == "cpu":
        raise ConfigError(
            "--record-memory-history records the allocations of a GPU, and this run is on a CPU: use --profile with "
            "--use-pytorch-profiler, which records allocations there."
        )
    if topology.rank != topology.grid.world_size - 1:
        return None
    path = Path(config.memory_snapshot_path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RankError(f"--memory-snapshot-path {path} cannot be written ({error.strerror}).") from error
    torch_compat.record_memory_history(_MAX_ENTRIES)
    return MemoryHistory(path, config.log_interval)


@dataclass
class MemoryHistory(Listener):
    """Writes a snapshot every ``interval`` iterations and at the end of the run, also after an error such as a lack of
    memory; each replaces the last."""

    path: Path
    interval: int

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        if trainer.state.progress.iteration % self.interval == 0:
            self._write()

    def close(self) -> None:
        self._write()
        torch_compat.stop_memory_history()

    def _write(self) -> None:
        try:
            torch_compat.dump_memory_history(str(self.path))
        except OSError as error:
            _logger.warning("--record-memory-history could not write %s (%s)", self.path, error)
