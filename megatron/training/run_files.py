"""The files that say what was started (megatron/training/run_files.py), written at the start of every attempt."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.config.run import RunConfig
from megatron.config.run_yaml import run_yaml
from megatron.core.device import device_name
from megatron.operation.heartbeat import run_directory
from megatron.training.context import RunContext
from megatron.training.run_files import (
    COMMAND,
    ENVIRONMENT,
    FLAGS,
    PATCH,
    StartedCommand,
    command_script,
    environment_json,
    read_code,
    without_secrets,
    write_run_files,
)

_REPOSITORY = Path(__file__).resolve().parents[2]
_LONGEST_WAIT_S = 10.0


@contextmanager
def run_files_written(context: RunContext, command: StartedCommand) -> Iterator[Callable[[], None]]:
    """Gives a function that writes the files on rank 0 in a thread, once; an error is a warning.

    It is called when the run is built, so that a start with a mistake changes no file.

    The directories of the run must be locked. Without a run directory nothing is written.
    """
    directory = run_directory(context.config)
    if directory is None or context.control.rank > 0 or context.config.validation.skip_train:
        yield lambda: None
        return

    def write() -> None:
        try:
            accelerator = describe_accelerator(context.topology.device)
            write_run_files(directory, run_files(context.config, command, accelerator, _REPOSITORY))
        except Exception as error:
            context.warn_rank0(f"The files that describe this run are not in {directory}: {error}")

    thread = threading.Thread(target=write, name="run files", daemon=True)

    def start() -> None:
        if thread.ident is None:  # a run is built again after a rollback
            thread.start()

    try:
        yield start
    finally:
        if thread.ident is not None:
            thread.join(_LONGEST_WAIT_S)


def run_files(
    config: RunConfig, command: StartedCommand, accelerator: dict[str, Any], repository: Path
) -> dict[str, str]:
    """The content of every file; empty for one that is not to be written."""
    code, patch = read_code(repository)
    return {
        COMMAND: command_script(command),
        FLAGS: without_secrets(run_yaml(config, FLAGS), command.environment),
        ENVIRONMENT: environment_json(command, accelerator, code),
        PATCH: without_secrets(patch, command.environment),
    }


def describe_accelerator(device: torch.device) -> dict[str, Any]:
    """The device of this rank, and the versions of the libraries with which torch was built."""
    found: dict[str, Any] = {"device": device_name(device) or "CPU", "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
