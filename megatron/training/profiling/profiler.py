"""Profiles of some iterations: traces of torch's profiler, or a range for nsys (``--profile``)."""

import logging
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.executor import NamedActions
from megatron.errors import RankError
from megatron.training.context import LogRank0
from megatron.training.loop.trainer import IterationResult, Listener, Trainer

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


class WindowProfile(Listener):
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

    def begin(self) -> None:
        """Start recording."""
        raise NotImplementedError

    def finish(self) -> None:
        """Stop recording, and write the profile."""
        raise NotImplementedError


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
