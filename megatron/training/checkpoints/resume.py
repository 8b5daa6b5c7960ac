"""The start of a run: its own checkpoint, the weights of another run or of Hugging Face, or random weights."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.directory import saved_iterations
from megatron.checkpoint.finding import directory_below, missing_checkpoint
from megatron.checkpoint.remote_path import path_of
from megatron.config.checkpoint import CheckpointConfig
from megatron.console import print_warning
from megatron.core.control import ControlGroup, run_on_rank0
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saved_run import Progress, SavedRun, check_may_begin, find_saved_run
from megatron.training.checkpoints.state import RunState
from megatron.training.context import LogRank0, RunContext


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from, if any."""

    saved: SavedRun | None
    is_resumed: bool
    """Whether it is a checkpoint of this run, so that its progress is loaded, too."""

    @property
    def resumed(self) -> SavedRun | None:
        """The checkpoint, if it is a checkpoint of this run."""
        return self.saved if self.is_resumed else None

    @property
    def progress(self) -> Progress:
        return Progress() if self.resumed is None else self.resumed.progress


def find_start(config: CheckpointConfig, control: ControlGroup) -> Start:
    """The checkpoint of ``--load``, else of ``--pretrained-checkpoint``."""
    saved, base = find_saved_run(config, control), config.pretrained_checkpoint
    if saved is not None:
        return Start(saved, is_resumed=not config.finetune)
    if config.load is not None:
        run_on_rank0(control, lambda: check_may_begin(config))
    if base is None:
        return Start(None, is_resumed=False)
    saved = find_saved_run(dataclasses.replace(config, load=base, ckpt_step=None), control)
    if saved is None:
        raise run_on_rank0(control, lambda: missing_checkpoint(path_of(base), "--pretrained-checkpoint"))
    return Start(saved, is_resumed=False)


def resume(state: RunState, start: Start, context: RunContext) -> None:
    """Load the checkpoint of ``start``, if any, else the model of ``--load-hf``."""
    config, log_rank0 = context.config.checkpoint, context.log_rank0
    if start.saved is not None:
        weights_only = not start.is_resumed or context.config.validation.skip_train
        state.load(start.saved, weights_only)
        log_rank0(f"loaded checkpoint {start.saved.root}, continuing after iteration {state.progress.iteration}")
        return
    origin = "random weights" if config.load_hf is None else f"the weights of {config.load_hf}"
    if config.load is not None:
        run_on_rank0(context.control, lambda: report_nothing_to_load(config, origin, log_rank0))
    if config.load_hf is not None:
        left_out = state.load_hugging_face(Path(config.load_hf), config.load_hf_text_only, context.control)
        log_rank0(f"loaded {origin}" + (left_out and f"; {left_out}"))


def report_nothing_to_load(config: CheckpointConfig, origin: str, log_rank0: LogRank0) -> None:
    """Log that there is no checkpoint where the run saves, with a warning if there are checkpoints one level below."""
    assert config.load is not None
    log_rank0(f"{config.load} has no checkpoint yet: starting from {origin}")
    if (below := directory_below(path_of(config.load))) is not None:
        print_warning(f"{below} has checkpoints: to resume from them, stop this run and use --load {below}.")


def check_nothing_is_abandoned(config: CheckpointConfig, start: Start) -> None:
    """Raise :class:`CheckpointError` if ``--save`` has later checkpoints than the start, unless ``--load`` equals it.

    After the first save the later checkpoints would be abandoned.
    """
    if config.save is None:
        return
    newest = max(saved_iterations(Path(config.save)), default=0)
    if newest <= start.progress.iteration:
        return
    if start.is_resumed and config.load is not None and Path(config.load).resolve() == Path(config.save).resolve():
        return
    raise CheckpointError(
        f"--save {config.save} has checkpoints up to iteration {newest}, but this run would start at iteration "
        f"{start.progress.iteration}: add --load {config.save} to resume, or set --save to another directory."
    )
