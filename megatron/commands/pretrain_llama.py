"""Pretrain a Llama: parse the flags, check them, train. See ``--help``; megatron/errors.py has the exit
codes."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine, ParsedLine
from megatron.config.operation import HANG_LIMITS
from megatron.config.run import RunConfig
from megatron.console import protect_console
from megatron.errors import ExitCode, UserError, report, report_crash, user_error_of, write_error_file
from megatron.features.faults.flags import VARIABLE, check_allowed
from megatron.flags import changed_flags
from megatron.operation.elastic import ELASTIC, Spares, usable_world_size
from megatron.operation.failure import record_own_failure
from megatron.operation.heartbeat import Heartbeat, RunSettings
from megatron.operation.processes import (
    LAUNCHER,
    available_cores,
    collection_paused,
    die_with_parent,
    prepare_environment,
)
from megatron.training.checkpoints.comparison import with_hugging_face
from megatron.training.run_files import StartedCommand, words_of_process

if TYPE_CHECKING:
    from megatron.training.build.run import RunParts


def train(
    arguments: Sequence[str], rank: int, world_size: int, heartbeat: Heartbeat, parts: "RunParts | None" = None
) -> ExitCode:
    """Train as ``arguments`` say; ``parts`` replace parts of the run."""
    line = CommandLine.of(arguments)
    line.show_help(prints=rank == 0)
    parsed = line.parse()
    if parsed.config.flag_files.explain_flags:
        from megatron.commands.explain_flags import explain_files

        return explain_files(line, os.environ) if rank == 0 else ExitCode.COMPLETE
    config = parsed.checked(world_size)
    if config.checkpoint.load_hf is not None:
        line = with_hugging_face(line, config)
        parsed = line.parse()
        config = parsed.checked()
        if rank == 0:
            print(f"> architecture and vocabulary: from {config.checkpoint.load_hf}", flush=True)
    if config.flag_files.explain_flags is not None:
        from megatron.commands.explain_flags import describe_origins

        if rank == 0:
            print(describe_origins(parsed), flush=True)
        return ExitCode.COMPLETE
    if config.plan.plan or config.dry_run.dry_run:
        from megatron.commands.planning import dry_run, plan

        (plan if config.plan.plan else dry_run)(config, line, world_size)
        return ExitCode.COMPLETE
    num_spares = count_spares(config, rank, world_size) if ELASTIC in os.environ else 0
    check_run(config, world_size - num_spares)
    if rank == 0:
        log_flags(parsed)
    check_allowed(config.operation.inject_fault, os.environ.get(VARIABLE))
    heartbeat.write_settings(RunSettings.of(config, rank, world_size - num_spares).to_json())
    is_watched = LAUNCHER in os.environ or config.operation.on_hang == "report"
    unwatched = [] if is_watched else changed_flags(config.operation, *HANG_LIMITS)
    if unwatched and rank == 0:
        where = (
            "without python -m megatron.operation.launch, nothing ends a rank that hangs (--on-hang report names it)"
        )
        print(f"WARNING: {', '.join(unwatched)} has no effect: {where}.", file=sys.stderr, flush=True)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    queues = prepare_environment(config, os.environ, available_cores(), local_world_size)
    # Only now: torch is not needed to explain a flag, and reads the environment.
    import_for_training()
    from megatron.training.initialize import Process, choose_device
    from megatron.training.pretrain import pretrain

    process = Process.from_environment(os.environ, num_spares)
    command = StartedCommand.of(arguments, sys.orig_argv, words_of_process(os.getppid()), os.environ, os.getcwd())
    over = partial(line.over_model, f"the checkpoint of --load {config.checkpoint.load}")
    run = partial(pretrain, config, process, over, queues, command, heartbeat, parts)
    if config.operation.inprocess_restart:
        from megatron.training.in_process import InProcessRestart

        on_gpu = choose_device(config.training.device, process).type != "cpu"
        return InProcessRestart(run, process, heartbeat, on_gpu).run()
    if num_spares:
        return Spares(config.training, rank, process.world_size, os.environ).end_with(run, heartbeat)
    return run()


def log_flags(line: ParsedLine) -> None:
    """Print where the flags come from, Megatron-LM's flags without effect (docs/coming_from_megatron.md), and flags
    that follow from others."""
    if origins := line.describe_origins():
        print(f"> flags: {origins} (--explain-flags lists them)", flush=True)
    if line.no_effect:
        print(f"> no effect here: {', '.join(line.no_effect)}", flush=True)
    for flag in line.inferred:
        print(f"> {flag}", flush=True)


def count_spares(config: RunConfig, rank: int, world_size: int) -> int:
    """The ranks that have no part in the training: the last ones, for which there is no share of the batch."""
    from megatron.training.batch_schedule import check_batches

    spares = world_size - usable_world_size(config, world_size, partial(check_batches, config))
    if spares and rank == 0:
        size = config.parallel.data_parallel_size(world_size - spares)
        print(f"> {spares} of {world_size} ranks wait as spares: data-parallel size {size}", flush=True)
    return spares


def import_for_training() -> None:
    """Import what training needs. A process that stands by for a restart does so in advance
    (megatron/operation/warm.py)."""
    is_first = "torch" not in sys.modules
    with collection_paused(is_first):
        import megatron.training.pretrain  # noqa: F401


# Runs a command: its arguments, the rank, the number of ranks, and the rank's heartbeat.
Start = Callable[[Sequence[str], int, int, Heartbeat], ExitCode]


def main(arguments: Sequence[str], start: Start = train) -> int:
    """Train (or what else ``start`` does) as ``arguments`` say; the exit code."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    heartbeat = Heartbeat.attach(os.environ, int(os.environ.get("LOCAL_RANK", 0)))
    heartbeat.dump_stacks_on_signal()
    try:
        exit_code = start(arguments, rank, world_size, heartbeat)
    except Exception as error:
        if (mistake := user_error_of(error)) is not None:
            record_failure(mistake, f"ERROR: {mistake}", heartbeat)
            report(mistake, rank, error_file)
            return mistake.exit_code
        text = traceback.format_exc()
        record_failure(error, text, heartbeat)
        report_crash(text, error, error_file)
        raise
    if exit_code == ExitCode.STOPPED and error_file:
        # To torchrun, whatever is not 0 has failed.
        stopped = "Stopped on request before the run was complete: start the same command again to go on."
        write_error_file(Path(error_file), stopped, int(time.time()))
    return exit_code


def record_failure(error: Exception, text: str, heartbeat: Heartbeat) -> None:
    """Write failure.json, unless a launcher does, which sees all ranks, or this is no failure."""
    exit_code = error.exit_code if isinstance(error, UserError) else ExitCode.CRASH
    if LAUNCHER in os.environ or exit_code == ExitCode.STOPPED:
        return
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    record_own_failure(error, text, rank, local_rank, heartbeat)


def die_with_launcher() -> None:
    """Under torch's agent, end when it ends: without it nothing restarts or stops the ranks, which would train on.

    A shell or a batch system is not an agent: a process that it has started in the background may outlive it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.environ.get(LAUNCHER)
        die_with_parent(None if launcher is None else int(launcher))


def run(arguments: Sequence[str], start: Start = train) -> NoReturn:
    """Train (or what else ``start`` does) in this process, and end it with the exit code."""
    die_with_launcher()
    protect_console()
    exit_code = main(arguments, start)
    sys.stdout.flush()
    if exit_code not in (ExitCode.COMPLETE, ExitCode.STOPPED):
        # At once: an orderly exit would wait for the other ranks' sockets.
        os._exit(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    run(sys.argv[1:])
