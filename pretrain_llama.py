#!/usr/bin/env python3
"""Pretrain a Llama: parse the flags, check them, train. See ``--help``; megatron/errors.py has the exit
codes."""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.console import protect_console
from megatron.errors import ConfigError, ExitCode, UserError, report, report_crash, write_error_file
from megatron.operation.environment import prepare_environment
from megatron.operation.processes import LAUNCHER, available_cores, die_with_parent


def dry_run(config: RunConfig, world_size: int) -> None:
    """Report what the run that ``config`` describes will need."""
    config.dry_run.check()
    if world_size > 1:
        raise ConfigError("--dry-run is one process, whatever --num-gpus says: start it with python, not torchrun.")
    assert config.dry_run.num_gpus is not None
    config.check(config.dry_run.num_gpus)
    from megatron.planner.dry_run import plan_and_report

    plan_and_report(config)


def train(arguments: Sequence[str], rank: int, world_size: int) -> ExitCode:
    """Train as ``arguments`` say."""
    config = parse_command_line(arguments, print_messages=rank == 0)
    if config.dry_run.dry_run:
        dry_run(config, world_size)
        return ExitCode.COMPLETE
    config.check(world_size)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    queues = prepare_environment(config, os.environ, available_cores(), local_world_size)
    # Only now: torch is not needed to explain a flag, and reads the environment.
    from megatron.training.initialize import Process
    from megatron.training.pretrain import pretrain

    return pretrain(config, Process.from_environment(os.environ), partial(parse_command_line, arguments), queues)


def main(arguments: Sequence[str]) -> int:
    """Train as ``arguments`` say; the exit code."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        exit_code = train(arguments, rank, world_size)
    except UserError as error:
        report(error, rank, error_file)
        return error.exit_code
    except Exception:
        report_crash(traceback.format_exc(), error_file)
        raise
    if exit_code == ExitCode.STOPPED and error_file:
        # To torchrun, whatever is not 0 has failed.
        stopped = "Stopped on request before the run was complete: start the same command again to go on."
        write_error_file(Path(error_file), stopped, int(time.time()))
    return exit_code


def die_with_launcher() -> None:
    """Under torch's agent, end when it ends: without it nothing restarts or stops the ranks, which would train on.

    A shell or a batch system is not an agent: a process that it has started in the background may outlive it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.environ.get(LAUNCHER)
        die_with_parent(None if launcher is None else int(launcher))


if __name__ == "__main__":
    die_with_launcher()
    protect_console()
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    if exit_code not in (ExitCode.COMPLETE, ExitCode.STOPPED):
        # At once: an orderly exit would wait for the other ranks' sockets and for loader processes.
        os._exit(exit_code)
    sys.exit(exit_code)
