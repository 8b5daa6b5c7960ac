"""Checks of ``--inject-fault`` against the other flags."""

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.features.faults.flags import SAVE, Fault, parse_faults
from megatron.urls import is_url

_LOADERS, _WRITERS = ("stoploader", "killloader"), ("stopwriter", "killwriter")


def check_faults(run: RunConfig, world_size: int) -> None:
    if run.operation.inject_fault is None:
        return
    if run.operation.run_dir is None and (run.checkpoint.save is None or is_url(run.checkpoint.save)):
        raise ConfigError(
            "--inject-fault needs --run-dir: the faults are recorded there, so that a restart does not repeat them."
        )
    for fault in parse_faults(run.operation.inject_fault):
        reason = _reason_against(fault, run, world_size)
        if reason is not None:
            raise ConfigError(f"--inject-fault {fault}: {reason}.")


def _reason_against(fault: Fault, run: RunConfig, world_size: int) -> str | None:
    save = run.checkpoint.save
    if fault.rank is not None and fault.rank >= world_size:
        return f"the run has ranks 0 to {world_size - 1}"
    if fault.moment == SAVE and (save is None or is_url(save)):
        return "it needs --save with a local directory"
    if fault.moment == SAVE and run.checkpoint.async_save:
        return "with --async-save a background writer writes the files: remove --async-save, or use stopwriter@N"
    if fault.kind in _LOADERS and run.data.num_workers == 0:
        return "it needs loader processes: set --num-workers to 1 or more"
    if fault.kind in _WRITERS and not (save is not None and run.checkpoint.async_save):
        return "it needs a background writer: add --async-save"
    return None
