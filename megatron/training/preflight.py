"""``--preflight``: the checks of the nodes (megatron/operation/preflight) before the model is built."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.config.run import RunConfig
from megatron.core.precision import number_formats
from megatron.errors import PreflightError
from megatron.features.preflight.check import Board, Needs, Network, Result, Verdict, failed_hosts, table
from megatron.features.preflight.run import Preflight, run_preflight
from megatron.torch_compat import ranks_store
from megatron.training.build.vocabulary import load_vocabulary
from megatron.training.context import RunContext
from megatron.update_rules.rule import build_rule


def check_nodes(context: RunContext) -> None:
    """Check the nodes if ``--preflight`` is given; a collective.

    Raises :class:`PreflightError` on every rank if a check fails.
    """
    if not context.config.operation.preflight:
        return
    topology = context.topology
    board = Board(ranks_store(), topology.rank, topology.grid.world_size)
    preflight = run_preflight(board, topology.device, Network(topology.world), needs_of(context))
    for line in summary(preflight):
        context.log_rank0(line)
    # A rank that ends lets a launcher kill the others.
    board.wait_for_rank0("printed")
    error = error_of(preflight.results)
    if error is not None:
        raise error


def error_of(results: Sequence[Result]) -> PreflightError | None:
    """The error of a run with these results; its culprit is a rank whose node is at fault."""
    failures = [one for one in results if one.verdict is Verdict.FAILURE]
    if not failures:
        return None
    first = next((one for one in failures if one.cause), failures[0])
    more = f" ({len(failures)} failures, the table above lists all)" if len(failures) > 1 else ""
    message = f"--preflight failed: {first.sentence()}{more}."
    return PreflightError(message, first.rank, first.cause) if first.cause else PreflightError(message)


def summary(preflight: Preflight) -> list[str]:
    """One line, and a table of what is not ok."""
    bad = [one for one in preflight.results if one.verdict is not Verdict.OK]
    hosts = ", ".join(failed_hosts(bad))
    lines = [f"pre-flight: {len(preflight.results) - len(bad)} checks ok, {len(bad)} results not ok, in "
             f"{preflight.seconds:.1f} s" + (f"; nodes with failures: {hosts}" if hosts else "")]  # fmt: skip
    return lines + table(bad)


def needs_of(context: RunContext) -> Needs:
    """What the run needs of its nodes."""
    config = context.config.checkpoint
    if config.save is None:
        return Needs()
    num_bytes = checkpoint_bytes(context.config)
    return Needs(Path(config.save), num_bytes, num_bytes // context.control.size if config.async_save else 0)


def checkpoint_bytes(config: RunConfig) -> int:
    """Size of a checkpoint of the run, without its manifest and random-number states."""
    parallel = config.parallel.tensor_model_parallel_size
    architecture = config.model.resolve(load_vocabulary(config).size, parallel, config.seq_length)
    formats = number_formats(config.precision, config.optimizer)
    num_bytes = formats.weight.itemsize
    if config.checkpoint.save_optim:
        if formats.master != formats.weight:
            num_bytes += formats.master.itemsize
        state = build_rule(config.optimizer).state(torch.empty(1, dtype=formats.master))
        num_bytes += sum(tensor.itemsize for tensor in state.values())
    return architecture.num_parameters() * num_bytes
