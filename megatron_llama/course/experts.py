"""Checks exercise 7: dispatch and combine of a top-k router, by a dense computation in fp64 on ranks in one process."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.core.moe.dispatch import RowOrder
from megatron.core.moe.routing import Routing, RoutingRule, count_choices, route
from megatron_llama.course.lesson import Wrong

HIDDEN = 3


@dataclass(frozen=True)
class Case:
    """A layer of experts, divided among ranks with some tokens each; ``idle`` experts have no tokens."""

    tokens: int
    topk: int
    experts: int
    ranks: int
    idle: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"With {self.topk} of {self.experts} experts on {self.ranks} ranks"


CASES = (Case(6, 2, 8, 4, idle=(3, 7)), Case(5, 3, 6, 2, idle=(0, 1, 2)), Case(4, 1, 4, 4), Case(1, 2, 2, 1))


def check(answer: ModuleType) -> str:
    """Compare rows, counts, outputs and gradients; raises :class:`Wrong`."""
    error = max(check_layer(answer, case, seed) for seed, case in enumerate(CASES))
    case = CASES[0]
    rows = case.ranks * case.tokens * case.topk
    return (
        f"{case}, two of which have no tokens, {rows} rows were sent and came back, {rows // case.experts} for an even "
        f"expert; outputs and gradients are those of the dense layer to {max(error, 1e-17):.0e} in fp64."
    )


def check_layer(answer: ModuleType, case: Case, seed: int) -> float:
    """Send the rows of all ranks to their experts and back; the largest error of outputs and gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    matrices = normal(case.experts, HIDDEN, HIDDEN)
    tokens = [normal(case.tokens, HIDDEN).requires_grad_() for _ in range(case.ranks)]
    routings = []
    for _ in range(case.ranks):
        logits = normal(case.tokens, case.experts)
        logits[:, case.idle] -= 100.0
        routing = route(logits, RoutingRule(case.experts, case.topk, pre_softmax=True))
        routings.append(Routing(routing.experts, routing.weights.detach().requires_grad_()))
    dispatched = []
    for own, routing in zip(tokens, routings):
        dispatched.append(answer.dispatch(own, routing.experts, case.experts, case.ranks))
        check_dispatch(dispatched[-1], own, routing.experts, case)
    error = 0.0
    for one, outputs, own, routing in zip(dispatched, exchanged(dispatched, matrices), tokens, routings):
        found = answer.combine(outputs, one.choices, routing.weights)
        # The definition: every token through each of its experts, one after another.
        products = torch.stack([own @ matrix for matrix in matrices], dim=1)  # [n, E, h]
        rows = products[torch.arange(case.tokens).unsqueeze(1), routing.experts]  # [n, k, h]
        wanted = (rows * routing.weights.unsqueeze(2)).sum(dim=1)
        check_outputs(found, wanted, rows, outputs, one.choices, routing.weights, case)
        error = max(error, (found - wanted).abs().max().item(), gradient_error(found, wanted, own, routing, case))
    return error


def exchanged(dispatched: list[Any], matrices: Tensor) -> list[Tensor]:
    """The outputs of the experts for the rows of each rank: an all-to-all, the experts of each rank, and the way back.

    A rank gets rows sorted by source, then by expert, and knows from the counts which expert each is for.
    """
    num_local = len(matrices) // len(dispatched)
    returned: list[list[Tensor]] = [[] for _ in dispatched]
    for rank in range(len(dispatched)):
        for source, one in enumerate(dispatched):
            received = one.rows.split(one.rows_for_ranks)[rank]
            local = range(rank * num_local, (rank + 1) * num_local)
            parts = received.split([one.rows_of_experts[expert] for expert in local])
            returned[source] += [part @ matrices[expert] for expert, part in zip(local, parts)]
    return [torch.cat(parts) for parts in returned]


def check_dispatch(one: Any, tokens: Tensor, experts: Tensor, case: Case) -> None:
    """The order of the rows, their tokens and their counts."""
    order, topk = RowOrder.sorted_by(experts), experts.shape[1]
    choices, chosen = one.choices, experts.flatten()
    if choices.shape != chosen.shape or not choices.sort().values.equal(torch.arange(len(chosen))):
        raise Wrong(
            f"{case}, choices has {len(choices)} numbers and is no permutation of {len(chosen)}: each choice of a "
            "token is one row, so a token of two experts is sent twice."
        )
    if not chosen[choices].equal(chosen.sort().values):
        if chosen.view_as(experts).T.flatten()[choices].equal(chosen.sort().values):
            raise Wrong(
                f"{case}, choices numbers the first choices of all tokens, then the second ones: choice i k + j is "
                "choice j of token i, so flatten experts [n, k] as it is."
            )
        raise Wrong(
            f"{case}, the rows are for the experts {chosen[choices].tolist()} in this order: sort ascending, so that "
            "the rows of an expert are one matrix and those of a rank one message."
        )
    if not choices.equal(order.choices):
        raise Wrong(
            f"{case}, rows of the same expert are not in the order of their choices: sort stably, or sums in another "
            "order differ between two runs in their last bits."
        )
    if one.rows.shape != (len(chosen), HIDDEN) or not one.rows.equal(tokens[choices // topk]):
        hint = "row i has the token of choice choices[i]"
        if one.rows.equal(tokens[choices % len(tokens)]):
            hint = "choices % n is the token of lists that are concatenated choice by choice, [k, n] and not [n, k]"
        elif one.rows.equal(tokens.repeat_interleave(topk, dim=0)):
            hint = "they are in the order of the tokens, while the experts want theirs together"
        raise Wrong(f"{case}, rows has other tokens than choices says: {hint}; the token of choice c is c // k.")
    counts = count_choices(experts, case.experts)
    check_counts("rows_of_experts", one.rows_of_experts, counts, experts, case)
    check_counts("rows_for_ranks", one.rows_for_ranks, counts.view(case.ranks, -1).sum(dim=1), experts, case)


def check_counts(name: str, found: list[int], wanted: Tensor, experts: Tensor, case: Case) -> None:
    """The rows of each expert, or for each rank."""
    if not isinstance(found, list):
        raise Wrong(f"{case}, {name} is of type {type(found).__name__}: return a list of int, by tolist().")
    if found == wanted.tolist():
        return
    counts = count_choices(experts, case.experts)
    hint = "count all choices of all tokens"
    if len(found) < len(wanted):
        hint = "an expert without tokens has the count 0, and the counts after it must not move up"
    elif found == count_choices(experts[:, 0], case.experts).tolist():
        hint = "these are the first choices alone"
    elif found == counts.view(-1, case.ranks).sum(dim=0).tolist():
        hint = "expert e is counted for rank e % ranks, while neighbouring experts share a rank"
    elif len(set(found)) == 1:
        hint = "equal splits send rows to ranks that do not have their expert; a router is never even"
    raise Wrong(f"{case}, {name} is {found} instead of {wanted.tolist()}: {hint}.")


def check_outputs(
    found: Tensor, wanted: Tensor, rows: Tensor, outputs: Tensor, choices: Tensor, weights: Tensor, case: Case
) -> None:
    """Compare with the ``wanted`` sums of ``rows`` ``[n, k, h]`` of the definition, and name what it is instead."""
    if found.shape == wanted.shape and close(found, wanted):
        return
    topk, inverse = weights.shape[1], choices.argsort()
    factors = weights.flatten().unsqueeze(1)  # [n k, 1], by choice

    def sums(by_choice: Tensor) -> Tensor:
        return by_choice.view(rows.shape).sum(dim=1)

    neighbours = (
        "the sum of neighbouring rows: rows are sorted by expert, so bring them back to the order of the choices"
    )
    again = (
        "the sum of rows that were sorted a second time: outputs[choices] is not the inverse of tokens[choices // k]"
    )
    known = {
        "the sum of the outputs without weights: multiply each by its weight": rows.sum(dim=1),
        "the weighted sum divided by k: the weights say already how much of each output counts": wanted / topk,
        "the sum with weights in the order of the tokens: row i has the weight of choice choices[i]": (
            sums((outputs * factors)[inverse])
        ),
        "the sum with weights that were divided by their sum: the router has made them, so use them as they are": (
            wanted / weights.sum(dim=1, keepdim=True)
        ),
        neighbours: sums(outputs * factors[choices]),
        f"{neighbours} before weights multiply them": sums(outputs * factors),
        again: sums((outputs * factors[choices])[choices]),
        f"{again}, choices.argsort() is": sums(outputs[choices] * factors),
        "one output of each token: assignment keeps the last row of a token, so add them": (
            torch.zeros_like(wanted).index_put((choices // topk,), outputs * factors[choices])
        ),
        "not the sum of each token's outputs times their weights: look at the order of each factor": found,
    }
    what = next(name for name, value in known.items() if value.shape == found.shape and close(found, value))
    raise Wrong(f"{case}, combine returns {what}.")


def gradient_error(found: Tensor, wanted: Tensor, tokens: Tensor, routing: Routing, case: Case) -> float:
    """The largest error of the gradients of weights and tokens."""
    direction = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view_as(wanted)
    inputs = {"weights": routing.weights, "tokens": tokens}
    hints = {"weights": "the router learns through them alone", "tokens": "the layers below learn through them"}
    errors = []
    for name, one in inputs.items():
        (right,) = torch.autograd.grad(wanted, one, direction, retain_graph=True)
        gradient = None
        if found.requires_grad:
            (gradient,) = torch.autograd.grad(found, one, direction, retain_graph=True, allow_unused=True)
        if gradient is None or not close(gradient, right):
            state = "have no gradient" if gradient is None else "have another gradient than in the dense layer"
            raise Wrong(f"{case}, the outputs are right and the {name} {state}: do not detach or copy; {hints[name]}.")
        errors.append((gradient - right).abs().max().item())
    return max(errors)


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.double(), wanted, rtol=1e-11, atol=1e-12)
