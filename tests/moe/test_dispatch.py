"""Tokens to rows and back, against plain indexing; dispatchers on real ranks against one process, in fp64: outputs, and
the gradients of tokens, weights and experts."""

from dataclasses import dataclass
from typing import Any, get_args
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import Function

from megatron.config.model import TokenDispatcherType
from megatron.core.communication import CollectiveRecord, Work
from megatron.core.moe import dispatch
from megatron.core.moe.dispatch import AssumedCounts, Dispatched, RowOrder, rows_of, sum_of_choices, token_dispatcher
from megatron.core.moe.layer import MoELayer
from megatron.core.moe.routing import Routing, RoutingRule, balanced_routing
from megatron.core.ops.grouped import RowCounts
from megatron.core.topology import RankGrid, Topology
from megatron.planner.simulated_rank import ShapeTracker, SimulatedTopology
from megatron.torch_compat import FakeTensorMode
from tests.late_transport import LateTopology
from tests.rank_pool import RankPool
from tests.staged_transport import StagedTopology


def keys_of(num_tokens: int, topk: int, num_keys: int, seed: int) -> Tensor:
    return torch.randint(num_keys, (num_tokens, topk), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000))
def test_rows_are_sorted_by_key_and_then_by_choice(num_tokens: int, topk: int, num_keys: int, seed: int) -> None:
    keys = keys_of(num_tokens, topk, num_keys, seed)
    order = RowOrder.sorted_by(keys)
    wanted = sorted(range(keys.numel()), key=lambda choice: (keys.flatten()[choice].item(), choice))
    assert order.choices.tolist() == wanted
    assert order.rows.flatten()[order.choices].tolist() == list(range(keys.numel()))
    assert order.tokens.tolist() == [choice // topk for choice in wanted]


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_gradients_are_those_of_plain_indexing(num_tokens: int, topk: int, seed: int, is_weighted: bool) -> None:
    """Also if only the first rows are here, or none."""
    torch.manual_seed(seed)
    keys = keys_of(num_tokens, topk, 3, seed)
    order = RowOrder.sorted_by(keys, int(torch.randint(keys.numel() + 1, ())))
    tokens, weights, direction = randn(num_tokens, 3), randn(num_tokens, topk), torch.randn(num_tokens, 3).double()
    scale = torch.rand(order.choices.numel(), 1).double()
    results = []
    for is_plain in (True, False):
        if is_plain:
            rows = tokens[order.tokens] * scale
            chosen = torch.zeros(keys.numel(), 3).double().index_put((order.choices,), rows).view(num_tokens, topk, 3)
            output = (chosen * weights.unsqueeze(2) if is_weighted else chosen).sum(dim=1)
        else:
            output = sum_of_choices(rows_of(tokens, order) * scale, order, weights if is_weighted else None)
        inputs = (tokens, weights) if is_weighted else (tokens,)
        results.append([output, *torch.autograd.grad(output, inputs, direction)])
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("weighted", [False, True])
def test_16_bit_rows_are_added_in_fp32(weighted: bool) -> None:
    """256 + 1 + 1 + … in bf16 would stay 256."""
    rows = torch.ones(9, 1, dtype=torch.bfloat16)
    rows[0] = 256
    order = RowOrder.sorted_by(torch.arange(9).unsqueeze(0))
    total = sum_of_choices(rows, order, torch.ones(1, 9) if weighted else None)
    assert total.dtype == torch.bfloat16
    assert total.item() == 264


def test_weights_of_16_bit_rows_keep_their_precision() -> None:
    """The gradient of fp32 weights is fp32, and rows and their gradients are in bf16."""
    rows = torch.full((2, 4), 3.0, dtype=torch.bfloat16).requires_grad_()
    weights = torch.tensor([[1.001, 0.501]]).requires_grad_()
    order = RowOrder.sorted_by(torch.tensor([[0, 1]]))
    total = sum_of_choices(rows, order, weights)
    total.sum().backward()
    assert total.dtype == torch.bfloat16
    assert total[0, 0].item() == torch.tensor(3 * 1.502).bfloat16().item()
    assert weights.grad is not None and rows.grad is not None
    assert weights.grad.tolist() == [[12.0, 12.0]]
    assert rows.grad.dtype == torch.bfloat16
    assert rows.grad[:, 0].tolist() == torch.tensor([1.001, 0.501]).bfloat16().tolist()


TOKENS, HIDDEN, WIDTH, EXPERTS = 6, 5, 4, 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A layout, and what the router chose."""

    name: str
    ep: int
    etp: int
    choice: str = "random"
    topk: int = 2
    probs_on_input: bool = False
    topology: type[Topology] = Topology
    order: str = "tp-cp-ep-pp-dp"


def tensor(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def choose(case: Case, rank: int) -> Tensor:
    """The experts of a rank's tokens, ``[n, k]``."""
    scores = tensor(1000 + rank, TOKENS, EXPERTS)
    if case.choice == "an expert without tokens":
        scores[:, 2] = -100.0
    if case.choice == "one expert for all":
        scores[:, 1] = 100.0
    if case.choice == "one expert for the tokens of a rank":
        scores[:, rank % EXPERTS] = 100.0
    return scores.topk(case.topk).indices


@dataclass
class Results:
    """Of one rank's tokens."""

    output: Tensor
    tokens: Tensor
    """Gradient of the tokens."""
    weights: Tensor
    experts: tuple[Tensor, Tensor]
    """Gradients of all experts, from the tokens of all ranks."""
    num_rows: int = 0


def inputs_of(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights, and the gradient of the output."""
    tokens = tensor(rank, TOKENS, HIDDEN).requires_grad_()
    weights = tensor(100 + rank, TOKENS, case.topk).abs().requires_grad_()
    return tokens, weights, tensor(200 + rank, TOKENS, HIDDEN)


def all_experts() -> tuple[Tensor, Tensor]:
    return tensor(7, EXPERTS, WIDTH, HIDDEN).requires_grad_(), tensor(8, EXPERTS, HIDDEN, WIDTH).requires_grad_()


def expert(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.nn.functional.silu(rows @ up.t()) @ down.t()


def in_one_process(case: Case, size: int) -> list[Results]:
    """The results of every rank, from a loop over tokens and choices."""
    up, down = all_experts()
    gradients: list[tuple[Tensor, Tensor, Tensor]] = []
    for rank in range(size):
        tokens, weights, direction = inputs_of(case, rank)
        rows = []
        for token, chosen in enumerate(choose(case, rank).tolist()):
            row = torch.zeros(HIDDEN, dtype=torch.float64)
            for choice, number in enumerate(chosen):
                weight = weights[token, choice]
                if case.probs_on_input:
                    row = row + expert(tokens[token] * weight, up[number], down[number])
                else:
                    row = row + expert(tokens[token], up[number], down[number]) * weight
            rows.append(row)
        output = torch.stack(rows)
        (output * direction).sum().backward()
        assert tokens.grad is not None and weights.grad is not None
        gradients.append((output.detach(), tokens.grad, weights.grad))
    assert up.grad is not None and down.grad is not None
    return [Results(*of_rank, (up.grad, down.grad)) for of_rank in gradients]


def run_experts(dispatched: Dispatched, up: Tensor, down: Tensor) -> Tensor:
    parts = [expert(dispatched.rows[rows], up[at], down[at]) for at, rows in enumerate(dispatched.counts.slices())]
    assert dispatched.counts.device.tolist() == list(dispatched.counts.host)
    assert dispatched.counts.total == dispatched.rows.shape[0]
    return torch.cat(parts)


def on_rank(case: Case) -> Results:
    """The results of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = case.topology(RankGrid(dp=size, ep=case.ep, etp=case.etp, order=case.order), rank, CPU)
    topology.open(*dispatch.DISPATCHERS[case.name].groups)
    dispatcher = token_dispatcher(case.name, EXPERTS, topology, case.probs_on_input)
    tokens, weights, direction = inputs_of(case, rank)
    up, down = all_experts()
    first = topology.coordinates["ep"] * (EXPERTS // case.ep)
    part = slice(first, first + EXPERTS // case.ep)
    first = topology.coordinates["etp"] * (WIDTH // case.etp)
    columns = slice(first, first + WIDTH // case.etp)
    dispatched = dispatcher.start(tokens, Routing(choose(case, rank), weights)).wait()
    output = dispatched.combine(run_experts(dispatched, up[part, columns], down[part, :, columns]))
    (output * direction).sum().backward()
    assert tokens.grad is not None and weights.grad is not None
    assert up.grad is not None and down.grad is not None
    for gradient in (up.grad, down.grad):
        dist.all_reduce(gradient)  # all parts, of all tokens
    return Results(output.detach(), tokens.grad, weights.grad, (up.grad, down.grad), dispatched.rows.shape[0])


LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 2, 2)]
"""Ranks, EP, ETP. With EP 4 every rank has one expert."""
CHOICES = ["random", "an expert without tokens", "one expert for all", "one expert for the tokens of a rank"]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", dispatch.DISPATCHERS)
@pytest.mark.parametrize(("size", "ep", "etp"), LAYOUTS)
def test_results_are_those_of_one_process(
    four_ranks: RankPool, size: int, ep: int, etp: int, name: str, choice: str
) -> None:
    topk = 1 if choice.startswith("one expert") else 2
    # Two thirds of the cases on transports whose results exist only after their wait.
    topology = (Topology, LateTopology, StagedTopology)[(CHOICES.index(choice) + ep + etp) % 3]
    case = Case(name, ep, etp, choice, topk, probs_on_input=choice == "one expert for all", topology=topology)
    for found, wanted in zip(four_ranks.run(on_rank, case, world_size=size), in_one_process(case, size), strict=True):
        pairs = [(found.output, wanted.output), (found.tokens, wanted.tokens), (found.weights, wanted.weights)]
        for one, other in (*pairs, *zip(found.experts, wanted.experts, strict=True)):
            assert one.shape == other.shape
            assert (one - other).abs().max() < 1e-12 * other.abs().max()


def test_every_name_of_the_flag_has_a_dispatcher() -> None:
    assert set(get_args(TokenDispatcherType)) == dispatch.DISPATCHERS.keys()


# Bytes


def balanced_bytes(ep: int, etp: int) -> tuple[int, int, int]:
    """Bytes of rows over ``ep`` and over ``etp`` in the passes of a layer, and of counts, with forced balance."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = Topology(RankGrid(dp=size, ep=ep, etp=etp), rank, CPU)
    records: list[CollectiveRecord] = []
    for axis in ("ep", "etp"):
        topology.communicator(axis).observer = records.append
    tokens = tensor(rank, 8, HIDDEN).float().requires_grad_()
    routing = balanced_routing(tensor(rank, 8, EXPERTS).float(), RoutingRule(EXPERTS, 2))
    dispatched = token_dispatcher("alltoall", EXPERTS, topology).start(tokens, routing).wait()
    dispatched.combine(dispatched.rows * 2).sum().backward()

    def total(axis: str, kinds: tuple[str, ...]) -> int:
        return sum(record.num_bytes for record in records if record.axes == axis and record.kind in kinds)

    return total("ep", ("exchange",)), total("etp", ("exchange",)), total("ep", ("all_to_all",))


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (2, 2)])
def test_bytes_are_those_of_the_formula(four_ranks: RankPool, ep: int, etp: int) -> None:
    """4 n k h itemsize (EP - 1) / EP over ``ep``: rows and outputs, forward and backward. Over ``etp`` the same rows go
    to the other ranks, and in the backward pass of each."""
    tokens, topk, itemsize = 8, 2, 4
    rows = tokens * topk * HIDDEN * itemsize
    wanted = 4 * rows * (ep - 1) // ep, 4 * rows * (etp - 1), EXPERTS * 8
    assert four_ranks.run(balanced_bytes, ep, etp, world_size=4) == [wanted] * 4


# Overlap


class Beside(Function):
    """Other work, which notes when it runs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("beside")
        return inputs * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("beside")
        return gradients[0] * 3, None


def events_of_a_layer(name: str) -> tuple[list[str], list[str]]:
    """Starts and waits of row messages, and other work, of both passes."""
    rank = dist.get_rank()
    topology = LateTopology(RankGrid(dp=2, ep=2), rank, CPU)
    events: list[str] = []
    right = Work.wait

    def wait(self: Work[Tensor]) -> Tensor:
        result = right(self)
        if self._works and isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == HIDDEN:
            events.append("wait")
        return result

    def observe(record: CollectiveRecord) -> None:
        # Counts, choices and weights have fewer bytes than a row for each token.
        if record.num_bytes >= HIDDEN * 8 * TOKENS // 2:
            events.append("start")

    for axes in dispatch.DISPATCHERS[name].groups:
        topology.communicator(*axes).observer = observe
    case = Case(name, 2, 1, "one expert for all", 1)
    tokens, weights, _ = inputs_of(case, rank)
    with patch.object(Work, "wait", wait):
        pending = token_dispatcher(name, 2, topology).start(
            tokens, Routing(torch.arange(TOKENS).remainder(2).unsqueeze(1), weights)
        )
        other = Beside.apply(tokens, events)
        dispatched = pending.wait()
        events.append("experts")
        assert dispatched.overlap is not None
        dispatched.overlap.put(lambda: events.append("weight gradient"))
        output = dispatched.combine(dispatched.rows.tanh()) + other
        forward = events.copy()
        events.clear()
        output.sum().backward()
    return forward, events


@pytest.mark.parametrize("name", dispatch.DISPATCHERS)
def test_other_work_runs_between_start_and_wait_in_both_passes(four_ranks: RankPool, name: str) -> None:
    for forward, backward in four_ranks.run(events_of_a_layer, name, world_size=2):
        assert forward == ["start", "beside", "wait", "experts", "start", "wait"]
        assert backward == ["start", "wait", "start", "beside", "weight gradient", "wait"]


@pytest.mark.parametrize(
    ("overlaps", "wanted"),
    [(True, ["start", "shared", "wait", "experts"]), (False, ["start", "wait", "experts", "shared"])],
)
def test_shared_experts_run_during_the_dispatch_only_on_request(overlaps: bool, wanted: list[str]) -> None:
    events: list[str] = []

    def factor(name: str, by: float) -> Mock:
        def multiply(x: Tensor, *arguments: Any) -> Tensor:
            events.append(name)
            return x * by

        return Mock(side_effect=multiply)

    def start(tokens: Tensor, routing: Routing) -> Work[Dispatched]:
        events.append("start")

        def finish() -> Dispatched:
            events.append("wait")
            return Dispatched(tokens, RowCounts.of([tokens.shape[0]]), lambda outputs: outputs)

        return Work((), finish)

    router = Mock(return_value=Routing(torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)))
    experts, shared = factor("experts", 2.0), factor("shared", 10.0)
    layer = MoELayer(nn.Identity(), router, Mock(start=start), experts, shared, overlaps)
    assert layer(torch.ones(3, 2, 4)).unique().tolist() == [12.0]
    assert events == wanted


# Row counts of a dry run


def simulated(name: str, ep: int, etp: int, load: float, topology: Topology | None = None) -> tuple[list[int], int]:
    """Rows of each expert, and rows, of a rank without values."""
    tracker = ShapeTracker()
    grid = RankGrid(dp=ep * etp, ep=ep, etp=etp)
    topology = topology or SimulatedTopology(grid, 0, CPU, tracker, lambda communicator: lambda record: None)
    with FakeTensorMode(), tracker:
        tokens = torch.empty(64, HIDDEN).requires_grad_()
        routing = Routing(torch.zeros(64, 2, dtype=torch.int64), torch.empty(64, 2).requires_grad_())
        pending = token_dispatcher(name, EXPERTS, topology, assumed_load=load).start(tokens, routing)
        dispatched = pending.wait()
        output = dispatched.combine(dispatched.rows * 2)
        output.sum().backward()
        assert output.shape == tokens.shape
        assert tokens.grad is not None and tokens.grad.shape == tokens.shape
        return list(dispatched.counts.host), dispatched.rows.shape[0]


@pytest.mark.parametrize("name", dispatch.DISPATCHERS)
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_a_dry_run_assumes_the_load(name: str, ep: int, etp: int) -> None:
    """n k rows for each etp rank, whatever EP is: each EP rank brings its own tokens."""
    even = 64 * 2 * etp
    assert simulated(name, ep, etp, 1.0) == ([even * ep // EXPERTS] * (EXPERTS // ep), even)
    if ep > 1:
        assert simulated(name, ep, etp, 1.25) == ([even * ep * 5 // 4 // EXPERTS] * (EXPERTS // ep), even * 5 // 4)
        assert simulated(name, ep, etp, ep) == ([even * ep * ep // EXPERTS] * (EXPERTS // ep), even * ep)


def test_a_dry_run_is_never_balanced_by_accident() -> None:
    """A dispatcher that copies counts refuses tensors without values, in which every count would be 1."""
    with pytest.raises(AssertionError, match="assume a load"):
        simulated("alltoall", 1, 1, 1.0, Topology(RankGrid(), 0, CPU))


def test_the_assumed_load_is_that_of_the_own_experts() -> None:
    """Of 12 rows of a source, with a load of 1.5: 9 for the two experts of this rank, 3 for the other two."""
    sent, received = torch.empty(4), torch.empty(2, 2)
    assert AssumedCounts(1.5, 2, 1).read(sent, received, 12) == ([2, 1, 5, 4], [5, 4, 5, 4])
    for load, ep in ((2.5, 2), (-1.0, 2), (1.5, 1)):
        with pytest.raises(AssertionError):
            AssumedCounts(load, ep, 0)


def test_real_ranks_count_their_rows(four_ranks: RankPool) -> None:
    """All tokens to one expert: its rank has all rows, the others none."""
    for name in dispatch.DISPATCHERS:
        found = four_ranks.run(on_rank, Case(name, 4, 1, "one expert for all", 1), world_size=4)
        assert [result.num_rows for result in found] == [0, 4 * TOKENS, 0, 0]
