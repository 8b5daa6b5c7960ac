"""Checks exercise 4: the operators of tensor and sequence parallelism, and an MLP in two products."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from megatron_llama.course.lesson import Wrong, require_tensor
from megatron_llama.course.ranks import ThreadCommunicator, run_ranks

RANKS = (4, 2, 1)
ROWS, WIDTH, HIDDEN = 8, 6, 12
Operator = Callable[[ThreadCommunicator, Tensor], Tensor]


def check(answer: ModuleType) -> str:
    """Compare each operator with its definition, and the MLP with one process in fp64; raises :class:`Wrong`."""
    for size in RANKS:
        check_copy(answer.copy_to_ranks, size)
        check_reduce(answer.reduce_from_ranks, size)
        check_gather(answer.gather_rows, size)
        check_scatter(answer.scatter_rows, size)
        for sequence_parallel in (False, True):
            check_block(answer, size, sequence_parallel)
    return (
        "Outputs and all gradients are those of one process on 1, 2 and 4 ranks; a pass has one all-reduce, or with "
        "sequence parallelism one all-gather and one reduce-scatter, which send as many bytes."
    )


# --- the operators -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """What an operator gave on one rank, and how often it called each collective."""

    inputs: Tensor
    output: Tensor
    given: Tensor  # the gradient of the output
    gradient: Tensor
    forward: Counter[str]
    backward: Counter[str]


def passes(name: str, operator: Operator, size: int, rows: int, rows_after: int, same: bool = False) -> list[Passes]:
    """Run an operator forward and backward on inputs ``[rows, width]``, the same on all ranks or of each rank."""

    def run(communicator: ThreadCommunicator) -> Passes:
        draw = torch.Generator().manual_seed(0 if same else communicator.rank)
        x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=draw).requires_grad_()
        where = f"{name} on rank {communicator.rank} of {size}"
        draw = torch.Generator().manual_seed(7 + communicator.rank)
        given = torch.randn(rows_after, WIDTH, dtype=torch.float64, generator=draw)
        before, x_before = given.clone(), x.detach().clone()
        output = require_tensor(operator(communicator, x), f"The result of {where}", given.shape, given.dtype)
        if not torch.equal(x, x_before):
            raise Wrong(f"{where} overwrites its input, which others still read: all_reduce works in place, so clone.")
        calls = len(communicator.records)
        if not output.requires_grad:
            raise Wrong(f"{where} has no gradient: return what Operator.apply returns.")
        (gradient,) = torch.autograd.grad(output, x, given)
        if not torch.equal(given, before):
            raise Wrong(
                f"The backward pass of {where} overwrites the gradient that it gets, which others read: clone it."
            )
        forward, backward = (
            Counter(one.kind for one in part) for part in (communicator.records[:calls], communicator.records[calls:])
        )
        return Passes(x.detach(), output.detach(), given, gradient, forward, backward)

    return run_ranks(size, run).results


def equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]).sum(0)


def check_copy(operator: Operator, size: int) -> None:
    """f: identity, then the sum of the gradients."""
    ranks = passes("copy_to_ranks", operator, size, ROWS, ROWS, same=True)
    summed = total([one.given for one in ranks])
    for one in ranks:
        if not equal(one.output, one.inputs):
            raise Wrong("copy_to_ranks changes its input: every rank has all of x already, so forward it as it is.")
        if not equal(one.gradient, summed) and equal(one.gradient, one.given):
            raise Wrong(
                "The backward pass of copy_to_ranks returns the rank's own gradient: each rank knows what its part of "
                "the columns does with x, and the gradient of x is the sum over all ranks."
            )
        if not equal(one.gradient, summed):
            raise Wrong(
                "The backward pass of copy_to_ranks is not the sum of the gradients of all ranks: all-reduce them."
            )


def check_reduce(operator: Operator, size: int) -> None:
    """g: the sum, then the gradient, which is the same on every rank."""
    ranks = passes("reduce_from_ranks", operator, size, ROWS, ROWS)
    summed, gradients = total([one.inputs for one in ranks]), total([one.given for one in ranks])
    for one in ranks:
        if not equal(one.output, summed):
            raise Wrong(
                "reduce_from_ranks does not return the sum of all ranks: each has a product over its part of the inner "
                "dimension, which is a summand of the whole."
            )
        if equal(one.gradient, gradients) and size > 1:
            raise Wrong(
                f"The backward pass of reduce_from_ranks sums the gradients of {size} ranks: they are the same "
                f"gradient, since all ranks continue alike, so that it becomes {size} times too large."
            )
        if not equal(one.gradient, one.given):
            raise Wrong("The backward pass of reduce_from_ranks changes the gradient: a sum passes it to each summand.")


def check_gather(operator: Operator, size: int) -> None:
    """The rows of all ranks, then the sum of the gradients of the rank's rows."""
    ranks = passes("gather_rows", operator, size, ROWS // size, ROWS)
    summed = total([one.given for one in ranks]).chunk(size)
    for rank, one in enumerate(ranks):
        if not equal(one.output, torch.cat([other.inputs for other in ranks])):
            raise Wrong("gather_rows does not return the rows of all ranks in their order: all_gather joins them.")
        if not equal(one.gradient, summed[rank]) and equal(one.gradient, one.given.chunk(size)[rank]):
            raise Wrong(
                "The backward pass of gather_rows takes its rows of the rank's own gradient: every rank has used these "
                "rows for other columns, so sum over the ranks with a reduce-scatter."
            )
        if not equal(one.gradient, summed[rank]):
            raise Wrong(
                "The backward pass of gather_rows is not the reduce-scatter of the gradients: sum, keep own rows."
            )
        check_calls("gather_rows", one, size, "all_gather", "reduce_scatter")


def check_scatter(operator: Operator, size: int) -> None:
    """The rank's rows of the sum, then the gradients of all rows."""
    ranks = passes("scatter_rows", operator, size, ROWS, ROWS // size)
    summed = total([one.inputs for one in ranks]).chunk(size)
    for rank, one in enumerate(ranks):
        if not equal(one.output, summed[rank]) and equal(one.output, one.inputs.chunk(size)[rank]):
            raise Wrong(
                "scatter_rows cuts its rows out of the rank's own summand: sum over the ranks first, by reduce_scatter."
            )
        if not equal(one.output, summed[rank]):
            raise Wrong("scatter_rows does not return the rank's rows of the sum: look at reduce_scatter.")
        if not equal(one.gradient, torch.cat([other.given for other in ranks])):
            raise Wrong(
                "The backward pass of scatter_rows does not return the gradients of all rows: a rank has summed into "
                "the rows of others, too, so all-gather their gradients."
            )
        check_calls("scatter_rows", one, size, "reduce_scatter", "all_gather")


def check_calls(name: str, one: Passes, size: int, forward: str, backward: str) -> None:
    """One collective in each pass."""
    for direction, calls, kind in (("forward", one.forward, forward), ("backward", one.backward, backward)):
        if size > 1 and calls != {kind: 1}:
            found = ", ".join(f"{times} {kind}" for kind, times in calls.items())
            raise Wrong(
                f"The {direction} pass of {name} calls {found}: one {kind} does it, and an all-reduce sends twice as "
                "much to throw most of it away."
            )


# --- the MLP -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The output of the block on a rank, the gradients, and what its passes have called."""

    output: Tensor
    gradients: dict[str, Tensor]
    forward: Counter[str]
    backward: Counter[str]


def whole_model() -> dict[str, Tensor]:
    """Inputs and weights of one process."""
    draw = torch.Generator().manual_seed(11)
    sizes = {"x": (ROWS, WIDTH), "norm": (WIDTH,), "gate_up": (2 * HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    return {name: torch.randn(*size, dtype=torch.float64, generator=draw) for name, size in sizes.items()}


def one_process(model: dict[str, Tensor], weighting: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the block, and the gradients of the weighted sum of it."""
    x, norm, gate_up, down = leaves = [tensor.clone().requires_grad_() for tensor in model.values()]
    y = functional.rms_norm(x, [WIDTH], norm, 1e-5)
    gate, up = (y @ gate_up.T).chunk(2, dim=-1)
    output = x + (functional.silu(gate) * up) @ down.T
    return output.detach(), dict(zip(model, torch.autograd.grad(output, leaves, weighting)))


def right_shards(gate_up: Tensor, down: Tensor, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """The rows of gate and of up, and the columns of down."""
    gate, up = (part.chunk(size)[rank] for part in gate_up.chunk(2))
    return torch.cat([gate, up]), down.chunk(size, dim=1)[rank]


def check_block(answer: ModuleType, size: int, sequence_parallel: bool) -> None:
    """The output and every gradient on every rank, and the number of collectives."""
    model, mode = whole_model(), "with" if sequence_parallel else "without"
    rms_norm, rows = answer.rms_norm, [0]
    weighting = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(12))

    def rows_of(tensor: Tensor, rank: int) -> Tensor:
        return tensor.chunk(size)[rank] if sequence_parallel else tensor

    def counting(x: Tensor, weight: Tensor) -> Tensor:
        rows.append(len(x))
        return rms_norm(x, weight)

    def run(communicator: ThreadCommunicator) -> Trained:
        rank = communicator.rank
        shards = check_shards(answer.shard(communicator, model["gate_up"], model["down"]), model, size, rank)
        parts = (rows_of(model["x"], rank), model["norm"], *shards)
        leaves = [part.detach().clone().requires_grad_() for part in parts]
        output = answer.block(communicator, *leaves, sequence_parallel)
        output = require_tensor(
            output, f"The result of block {mode} sequence parallelism", parts[0].shape, torch.float64
        )
        calls = len(communicator.records)
        output.backward(rows_of(weighting, rank))
        missing = [name for name, leaf in zip(model, leaves) if leaf.grad is None]
        if missing:
            raise Wrong(f"{missing[0]} has no gradient {mode} sequence parallelism: the output must depend on it.")
        gradients = {name: leaf.grad for name, leaf in zip(model, leaves) if leaf.grad is not None}
        kinds = [
            Counter(one.kind for one in part) for part in (communicator.records[:calls], communicator.records[calls:])
        ]
        return Trained(output.detach(), gradients, *kinds)

    output, gradients = one_process(model, weighting)
    with patch.object(answer, "rms_norm", counting):
        ranks = run_ranks(size, run).results
    if sequence_parallel and max(rows) > ROWS // size:
        raise Wrong(
            f"block with sequence parallelism on {size} ranks gives rms_norm {max(rows)} rows, and a rank has "
            f"{ROWS // size}: the norm stands before gather_rows, or every rank computes and keeps all of it again."
        )
    for rank, seen in enumerate(ranks):
        where = f"on rank {rank} of {size} {mode} sequence parallelism"
        wanted = rows_of(output, rank)
        if size > 1 and equal(seen.output, wanted + (size - 1) * rows_of(model["x"], rank)):
            raise Wrong(f"The output {where} has x {size} times: add the residual after the sum over the ranks.")
        if not equal(seen.output, wanted):
            if size == 1:
                raise Wrong(
                    "The output of block on one rank, where no operator does anything, is not that of its docstring: "
                    "look at gate, up and down, at the norm and at the residual."
                )
            check_block(answer, 1, sequence_parallel)
            raise Wrong(f"The output {where} is not that of one process: sum the partial products once, after down.")
        gate_up, down = right_shards(gradients["gate_up"], gradients["down"], size, rank)
        right = {"x": rows_of(gradients["x"], rank), "norm": gradients["norm"], "gate_up": gate_up, "down": down}
        if size > 1 and equal(seen.gradients["norm"], size * right["norm"]):
            raise Wrong(
                f"The gradient of norm {where} is {size} times the right one: one operator has summed it already, so a "
                "second one that sums is too many."
            )
        wrong = {name for name, gradient in right.items() if not equal(seen.gradients[name], gradient)}
        if wrong:
            raise Wrong(wrong_gradients(wrong, where, sequence_parallel))
        check_numbers(seen, size, where, sequence_parallel)


def check_shards(shards: Any, model: dict[str, Tensor], size: int, rank: int) -> tuple[Tensor, Tensor]:
    """The parts of the weights on a rank."""
    gate_up, down = right_shards(model["gate_up"], model["down"], size, rank)
    found_gate_up, found_down = shards
    found_gate_up = require_tensor(found_gate_up, "The first part of shard", gate_up.shape, torch.float64)
    found_down = require_tensor(found_down, "The second part of shard", down.shape, torch.float64)
    if size > 1 and equal(found_gate_up, model["gate_up"].chunk(size)[rank]):
        raise Wrong(
            f"shard gives rank {rank} of {size} neighbouring rows of gate_up, which are all gate or all up: silu(gate) "
            "* up needs both of the same columns, so divide gate and up each, and join the parts."
        )
    if not equal(found_gate_up, gate_up) or not equal(found_down, down):
        raise Wrong(
            f"shard gives rank {rank} of {size} other parts than the rows of gate, of up, and the columns of down."
        )
    return found_gate_up, found_down


def wrong_gradients(wrong: set[str], where: str, sequence_parallel: bool) -> str:
    """The sentence about gradients that are not those of one process."""
    if wrong == {"norm"} and sequence_parallel:
        return (
            f"The gradient of norm {where} is that of the rank's own rows: the weight is the same on all ranks, so sum "
            "its gradients, as copy_to_ranks does with what every rank has."
        )
    if wrong == {"norm"}:
        return (
            f"The gradient of norm {where} is wrong and that of x is right: copy_to_ranks belongs between the norm and "
            "the product, since before it the gradient of y is still that of the rank's own columns."
        )
    if "x" in wrong and not wrong & {"gate_up", "down"}:
        return (
            f"The gradient of x {where} is not the residual's plus the sum of what the columns of all ranks give: "
            "an operator that sums in the backward pass stands before the column-parallel product, and the residual "
            "passes by it."
        )
    names = ", ".join(sorted(wrong))
    return f"The gradients of {names} {where} are wrong: what is behind the sum must go back to each rank once."


def check_numbers(seen: Trained, size: int, where: str, sequence_parallel: bool) -> None:
    """One pair of operators in each pass."""
    forward = {"all_gather": 1, "reduce_scatter": 1} if sequence_parallel else {"all_reduce": 1}
    backward = {**forward, "all_reduce": 1}  # the norm's under sequence parallelism
    for direction, calls, wanted in (("forward", seen.forward, forward), ("backward", seen.backward, backward)):
        if size > 1 and calls != wanted:
            found, needed = (", ".join(f"{n} {kind}" for kind, n in sorted(one.items())) for one in (calls, wanted))
            raise Wrong(
                f"The {direction} pass {where} calls {found or 'nothing'}, where {needed} is enough: gate and up share "
                "their input, and nothing between the products needs the other ranks."
            )
