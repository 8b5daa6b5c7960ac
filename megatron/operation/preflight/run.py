"""Run the checks on all ranks."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

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
    host_of,
    nodes_of,
    within,
)
from megatron.features.preflight.host import this_place
from megatron.features.preflight.run import CHECKS
from megatron.operation.causes import Cause

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
    try:
        found = board.agree("places", asdict(place), _node_lists, _START_SECONDS)
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


def _node_lists(places: Sequence[dict[str, str]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(node.host, node.ranks) for node in nodes_of([Place(**one) for one in places])]
