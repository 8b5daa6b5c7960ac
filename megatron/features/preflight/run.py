"""``--preflight``: runs the checks of the nodes on all ranks, before the model is built."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config.run import RunConfig
from megatron.core.precision import number_formats
from megatron.errors import PreflightError
from megatron.features.preflight.check import (
    Board,
    Check,
    MissingRanksError,
    Needs,
    Network,
    Node,
    Place,
    Result,
    Site,
    Verdict,
    failed_hosts,
    host_of,
    nodes_of,
    table,
    within,
)
from megatron.features.preflight.host import Disk, Gpu, HostMemory, Identity, Product, this_place
from megatron.features.preflight.network import Clocks, Links, Sums
from megatron.operation.causes import Cause
from megatron.torch_compat import ranks_store
from megatron.training.context import RunContext
from megatron.update_rules.rule import build_rule

CHECKS: tuple[Check, ...] = (
    Identity(),
    Clocks(),
    HostMemory(),
    Gpu(),  # before the product, which uses memory
    Product(),
    Disk(),
    Sums(),  # before the links: NCCL connects all ranks in it
    Links(),
)
"""The checks, in the order in which they run."""

TOTAL_SECONDS = 60.0
"""Time limit of all checks together, from the moment when all ranks have begun."""
_START_SECONDS = 60.0
_NAMES_SECONDS = 5.0


@dataclass(frozen=True)
class Preflight:
    """The results, which are equal on all ranks."""

    results: list[Result]
    seconds: float
    nodes: Sequence[Node]


def run_preflight(
    board: Board,
    device: torch.device,
    network: Network,
    needs: Needs,
    checks: Sequence[Check] = CHECKS,
    place: Place | None = None,
) -> Preflight:
    """Run ``checks`` in lockstep on all ranks; a check that does not end ends the others, too.

    ``place`` is used instead of the true one.
    """
    started = time.monotonic()
    place = place or this_place(device)

    # The first answer of each rank, for which the others wait longest. Every rank reads the decision: the nodes alone,
    # because the places of 16,384 ranks are megabytes.
    def decide(places: Sequence[dict[str, str]]) -> list[tuple[str, tuple[int, ...]]]:
        return [(node.host, node.ranks) for node in nodes_of([Place(**one) for one in places])]

    try:
        found = board.agree("places", asdict(place), decide, _START_SECONDS)
    except MissingRanksError as missing:
        return Preflight(_missing("start", missing.ranks, [], _START_SECONDS), time.monotonic() - started, [])
    nodes = [Node(host, tuple(ranks)) for host, ranks in found]
    site = Site(board.rank, place, nodes, device, network, board, needs)
    deadline = time.monotonic() + TOTAL_SECONDS
    results: list[Result] = []
    for check in checks:
        seconds = min(check.seconds, max(deadline - time.monotonic(), 0.0))
        try:
            records = board.agree(
                check.name,
                _measure(check, site, seconds),
                lambda measured, check=check, seconds=seconds: [  # type: ignore[misc]
                    one.to_json() for one in judge(check, measured, nodes, seconds)
                ],
                seconds + _NAMES_SECONDS,
            )
        except MissingRanksError as missing:
            results += _missing(check.name, missing.ranks, nodes, seconds)
            break
        new = [Result.from_json(record) for record in records]
        results += new
        if any(one.value == _NO_ANSWER or (check.is_collective and one.verdict is Verdict.FAILURE) for one in new):
            break  # threads of ranks may still wait in a collective
    return Preflight(results, time.monotonic() - started, nodes)


_NO_ANSWER = "no answer"


def _measure(check: Check, site: Site, seconds: float) -> dict[str, Any]:
    def measure() -> Any:
        if site.device.type == "cuda":
            torch.cuda.set_device(site.device)  # the current device belongs to the thread
        return check.measure(site)

    try:
        return {"measured": within(seconds, measure)}
    except (TimeoutError, MissingRanksError):
        return {"error": _NO_ANSWER}
    except OSError as error:
        return {"error": f"{error.strerror or error} ({error.filename or check.name})"}
    except RuntimeError as error:
        return {"error": str(error).partition("\n")[0]}


def judge(check: Check, measured: Sequence[dict[str, Any]], nodes: Sequence[Node], seconds: float) -> list[Result]:
    """The results of a check, also of ranks where it ended with an error."""
    errors = {rank: one["error"] for rank, one in enumerate(measured) if "error" in one}
    # An error of one rank makes the others wait.
    causes = {rank: error for rank, error in errors.items() if error != _NO_ANSWER} or errors
    if not causes:
        return check.judge([one["measured"] for one in measured], nodes)
    if len(causes) == len(measured) > 1:
        return [_error(check, next(iter(causes.values())), seconds)]
    return [_error(check, error, seconds, rank, host_of(rank, nodes)) for rank, error in causes.items()]


def _error(check: Check, error: str, seconds: float, rank: int | None = None, host: str = "") -> Result:
    is_late = error == _NO_ANSWER
    limit, remedy = (f"{seconds:.0f} s", check.remedy) if is_late else ("", check.error_remedy)
    return Result(check.name, Verdict.FAILURE, error, limit, remedy, rank, host)


def _missing(name: str, ranks: Sequence[int], nodes: Sequence[Node], seconds: float) -> list[Result]:
    remedy = "this process hangs or has ended: look at its log and its node"
    return [
        Result(name, Verdict.FAILURE, _NO_ANSWER, f"{seconds:.0f} s", remedy, rank, host_of(rank, nodes), Cause.HANG)
        for rank in ranks
    ]


def check_nodes(context: RunContext, vocabulary_size: Callable[[], int]) -> None:
    """Check the nodes if ``--preflight`` is given; a collective.

    ``vocabulary_size`` reads the tokenizer, for the size of a checkpoint. Raises :class:`PreflightError` on every rank
    if a check fails.
    """
    if not context.config.operation.preflight:
        return
    topology, config, needs = context.topology, context.config.checkpoint, Needs()
    if config.save is not None:
        size = checkpoint_bytes(context.config, vocabulary_size())
        needs = Needs(Path(config.save), size, size // topology.grid.world_size if config.async_save else 0)
    board = Board(ranks_store(), topology.rank, topology.grid.world_size)
    preflight = run_preflight(board, topology.device, Network(topology.world), needs)
    bad = [one for one in preflight.results if one.verdict is not Verdict.OK]
    hosts = ", ".join(failed_hosts(bad))
    context.log_rank0(
        f"pre-flight: {len(preflight.results) - len(bad)} checks ok, {len(bad)} results not ok, in "
        f"{preflight.seconds:.1f} s" + (f"; nodes with failures: {hosts}" if hosts else "")
    )
    for line in table(bad):
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


def checkpoint_bytes(config: RunConfig, vocabulary_size: int) -> int:
    """Size of a checkpoint of the run, without its manifest and random-number states."""
    parallel = config.parallel.tensor_model_parallel_size
    architecture = config.model.resolve(vocabulary_size, parallel, config.seq_length)
    formats = number_formats(config.precision, config.optimizer)
    num_bytes = formats.weight.itemsize
    if config.checkpoint.save_optim:
        if formats.master != formats.weight:
            num_bytes += formats.master.itemsize
        state = build_rule(config.optimizer).state(torch.empty(1, dtype=formats.master))
        num_bytes += sum(tensor.itemsize for tensor in state.values())
    return architecture.num_parameters() * num_bytes
