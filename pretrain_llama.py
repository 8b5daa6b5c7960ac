#!/usr/bin/env python3
"""Pretrain a Llama: parse the flags, check them, train. See ``--help``."""

import os
import sys
from collections.abc import Sequence
from functools import partial

from megatron.config.command_line import parse_command_line
from megatron.config.errors import ConfigError, UserError, report
from megatron.config.run import RunConfig


def dry_run(config: RunConfig, world_size: int) -> int:
    """Report what the run that ``config`` describes will need."""
    config.dry_run.check()
    if world_size > 1:
        raise ConfigError("--dry-run is one process, whatever --num-gpus says: start it with python, not torchrun.")
    assert config.dry_run.num_gpus is not None
    config.check(config.dry_run.num_gpus)
    from megatron.planner.dry_run import plan_and_report

    plan_and_report(config)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Train as ``arguments`` say; the exit code."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        config = parse_command_line(arguments, print_messages=rank == 0)
        if config.dry_run.dry_run:
            return dry_run(config, world_size)
        config.check(world_size)
        # Only now: torch is not needed to explain a flag.
        from megatron.training.launch import Process
        from megatron.training.pretrain import pretrain

        flags_over = partial(parse_command_line, arguments)
        pretrain(config, Process.from_environment(os.environ), flags_over)
    except UserError as error:
        report(error, rank)
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    if exit_code != 0:
        # At once: an orderly exit would wait for the other ranks' sockets and for loader processes.
        os._exit(exit_code)
