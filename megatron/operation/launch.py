"""torchrun with an agent for the exit codes of ``pretrain_llama.py``.

    python -m megatron.operation.launch [FLAGS OF torchrun] pretrain_llama.py FLAGS
    python -m megatron.operation.launch [FLAGS OF torchrun] -m megatron.commands.pretrain_llama FLAGS

Flags, rendezvous and restarts are torchrun's. Its agent is replaced by one (megatron/operation/agent.py) that

- does not restart ranks that ended with 2, 75 or 93 (megatron/errors.py), and returns that code;
- passes a signal on to the ranks and waits for their save (--shutdown-timeout, 600 s unless given), however often a
  batch system repeats the signal;
- ends the other ranks 5 s after one has crashed, where torchrun waits up to 30 s;
- restarts, or ends the job, on all nodes together, with pauses if attempts fail at once;
- ends ranks that hang, and records why an attempt failed (megatron/operation/hang.py);
- with --nnodes MIN:MAX continues on the nodes that are left, and gives nodes that were named twice the last ranks;
- with --warm-processes keeps processes ready that have imported everything for the next attempt.
"""

import os
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher import api as launcher

from megatron.console import protect_console
from megatron.errors import ConfigError, ExitCode
from megatron.operation.agent import Agent, say, say_end
from megatron.operation.elastic import ELASTIC
from megatron.operation.heartbeat import run_directory_in
from megatron.operation.processes import LAUNCHER
from megatron.operation.signals import StopSignals
from megatron.operation.warm import WarmProcesses
from megatron.torch_compat import LOOPBACK, listen_on_loopback, start_ranks_by

# Default of --shutdown-timeout: time for the ranks to finish an iteration and save.
SAVE_SECONDS = 600
# Seconds for further nodes to join once MIN of --nnodes MIN:MAX is reached: torch notices a lost node after as long.
LAST_CALL_SECONDS = 15


def parse(arguments: Sequence[str]) -> Namespace:
    """torchrun's flags, and ours."""
    parser = torchrun.get_args_parser()
    parser.add_argument(
        "--warm-processes",
        action=BooleanOptionalAction,
        default=False,
        help="Keep a process per rank that has imported everything, for a faster restart; needs memory.",
    )
    return parser.parse_args(arguments)


def prepare_elastic(options: Namespace) -> bool:
    """Whether the number of nodes may change; raises :class:`ConfigError`."""
    try:
        smallest, largest = torchrun.parse_min_max_nnodes(options.nnodes)
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {options.nnodes} is neither a number nor MIN:MAX: use one of them.") from None
    if smallest == largest:
        return False
    if options.rdzv_backend == "static" and not options.standalone:
        raise ConfigError(
            f"--nnodes {options.nnodes} needs a rendezvous that nodes can join later: add --rdzv-backend c10d."
        )
    if "last_call_timeout" not in options.rdzv_conf:
        options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, f"last_call_timeout={LAST_CALL_SECONDS}"]))
    return True


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        is_elastic = prepare_elastic(options)
        signals = StopSignals(options.signals_to_handle)
    except ConfigError as error:
        say(f"ERROR: {error}")
        return error.exit_code
    save_seconds = getattr(options, "shutdown_timeout", None)  # torch 2.11 has no such flag
    if save_seconds is None:
        save_seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVE_SECONDS))
    is_one_node = options.standalone or torchrun.parse_min_max_nnodes(options.nnodes)[1] == 1
    endpoint = None if is_one_node else str(options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}")
    agents: list[Agent] = []

    def build_agent(**keywords: Any) -> Agent:
        warm = WarmProcesses() if options.warm_processes else None
        run_dir = run_directory_in(options.training_script_args)
        agents.append(Agent(save_seconds, is_elastic, warm, run_dir, signals, endpoint, **keywords))
        start_ranks_by(agents[0].start_rank)
        return agents[0]

    os.environ[LAUNCHER] = str(os.getpid())
    if options.standalone:
        listen_on_loopback()
        options.local_addr = options.local_addr or LOOPBACK
    if is_elastic:
        os.environ[ELASTIC] = "1"
    # torchrun makes its agent by this name.
    vars(launcher)["LocalElasticAgent"] = build_agent
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        if agents[0].exit_code != ExitCode.STOPPED:
            say(error)
    except SignalException as error:
        if not agents:
            return ExitCode.STOPPED
        say(f"{error}: killing the ranks that still run.")
        return ExitCode.CRASH
    except RendezvousConnectionError as error:
        if agents or endpoint is None:
            raise
        say(f"ERROR: the rendezvous host {endpoint} cannot be reached: {error.__cause__}.")
        return ExitCode.CRASH
    if not agents:
        return ExitCode.CRASH
    code = agents[0].exit_code
    if code != ExitCode.COMPLETE:
        say_end(code)
    return code


def run(arguments: Sequence[str]) -> int:
    """Run the job with a console that cannot end it; returns its exit code."""
    protect_console()
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
