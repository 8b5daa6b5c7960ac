"""Experts compute what one MLP for each expert computes, in every layout of their weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import Recomputed
from megatron.core.gradient import MainGrad, WeightGradStore, attach_main_grad, compute_deferred
from megatron.core.kernels.selection import LayerKernels
from megatron.core.moe.layer import Experts, ExpertShard
from megatron.core.moe.transfer import BackwardOverlap
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, PaddedGroupedGemm, RowCounts, TorchGroupedGemm
from megatron.core.parameter import info_of, initialize_parameters
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.layers import LayerContext
from megatron.core.topology import single_process
from megatron.planner.launches import LaunchRecorder
from megatron.torch_compat import FakeTensorMode
from tests.parallel.layout_run import MODEL

NUM_EXPERTS, HIDDEN, WIDTH = 4, 16, 24
CONFIG = replace(MODEL, hidden_size=HIDDEN, num_experts=NUM_EXPERTS, moe_ffn_hidden_size=WIDTH)
COUNTS = ((5, 1, 33, 16), (0, 7, 40, 0), (0, 0, 0, 0))
STALE = 1e6
"""What the last step left in a gradient buffer."""


def experts_of(
    shard: ExpertShard | None = None,
    store: WeightGradStore | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float64,
    gemm: GroupedGemm | None = None,
) -> Experts:
    topology = single_process()
    context = LayerContext(
        TensorParallel(topology.tensor_parallel),
        dtype,
        device or topology.device,
        weight_gradients=store or WeightGradStore(),
    )
    kernels = LayerKernels(grouped_gemm=gemm or LoopGroupedGemm())
    experts = Experts("layers.3.mlp.experts", CONFIG, context, kernels, shard or ExpertShard())
    if device is None:
        initialize_parameters(experts.parameters(), seed=3)
    return experts


def shards(ep_size: int, etp_size: int) -> Iterator[ExpertShard]:
    for ep_rank, etp_rank in product(range(ep_size), range(etp_size)):
        yield ExpertShard(ep_rank, ep_size, etp_rank, etp_size)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_mlp_for_each(counts: Sequence[int], rows: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """The definition, by autograd: ``fc1`` ``[E 2f, h]`` and ``fc2`` ``[E h, f]``."""
    outputs = []
    for x, first, second in zip(rows.split(list(counts)), fc1.chunk(NUM_EXPERTS), fc2.chunk(NUM_EXPERTS)):
        gate, up = first.chunk(2)
        outputs.append(F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), second))
    return torch.cat(outputs)


def expected_passes(rows: Tensor, gradient: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Output, and the gradients of the rows and of both weights."""
    leaves = [one.detach().clone().requires_grad_() for one in (rows, *experts_of().parameters())]
    output = one_mlp_for_each(counts, *leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, gradient)


def main_grads_of(experts: Experts) -> list[MainGrad]:
    main_grads = [MainGrad(torch.full(one.shape, STALE, dtype=torch.float64)) for one in experts.parameters()]
    for parameter, main_grad in zip(experts.parameters(), main_grads):
        attach_main_grad(parameter, main_grad)
    return main_grads


def assert_all_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_experts_are_one_mlp_for_each_expert(counts: tuple[int, ...], recomputes: bool) -> None:
    experts, rows = experts_of(), random(sum(counts), HIDDEN).requires_grad_()
    main_grads = main_grads_of(experts)
    if recomputes:
        experts.set_submodule("swiglu_fc2", Recomputed(experts.swiglu_fc2))
    gradient = random(sum(counts), HIDDEN, seed=1)
    output = experts(rows, RowCounts.of(counts))
    output.backward(gradient)
    assert rows.grad is not None
    found = (output.detach(), rows.grad, *(main_grad.buffer for main_grad in main_grads))
    assert_all_close(found, expected_passes(rows, gradient, counts))


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_a_microbatch_gives_each_weight_one_gradient(counts: tuple[int, ...], defers: bool) -> None:
    """Also without any row; the first overwrites what the last step left, the second adds."""
    store = WeightGradStore()
    experts = experts_of(store=store)
    main_grads = main_grads_of(experts)
    calls = []
    for number, main_grad in enumerate(main_grads):
        main_grad.on_accumulated = lambda number=number: calls.append(number)
    expected = [torch.zeros(()), torch.zeros(())]
    for microbatch in range(2):
        rows, gradient = (random(sum(counts), HIDDEN, seed=10 * microbatch + seed) for seed in (1, 2))
        output = experts(rows.clone().requires_grad_(), RowCounts.of(counts))
        calls.clear()
        if defers:
            with store.deferring() as deferred:
                output.backward(gradient)
            assert calls == []
            compute_deferred(deferred)
        else:
            output.backward(gradient)
        assert sorted(calls) == [0, 1]
        expected = [one + other for one, other in zip(expected, expected_passes(rows, gradient, counts)[2:])]
        assert_all_close([main_grad.buffer for main_grad in main_grads], expected)


def test_a_weight_gradient_waits_for_its_overlap_in_a_gradient_buffer() -> None:
    """Without a buffer, autograd needs the gradient at once."""
    experts, counts = experts_of(), COUNTS[0]
    rows, gradient = (random(sum(counts), HIDDEN, seed=seed) for seed in (1, 2))
    expected = expected_passes(rows, gradient, counts)[2:]
    rows.requires_grad_()
    output = experts(rows, RowCounts.of(counts), BackwardOverlap())
    assert_all_close(torch.autograd.grad(output, list(experts.parameters()), gradient), expected)
    main_grads, overlap = main_grads_of(experts), BackwardOverlap()
    experts(rows, RowCounts.of(counts), overlap).backward(gradient)
    assert [main_grad.is_filled for main_grad in main_grads] == [False, True]
    overlap.run()
    assert_all_close([main_grad.buffer for main_grad in main_grads], expected)


@pytest.mark.parametrize(("ep_size", "etp_size"), [*product((1, 2, 4), (1, 2, 3))])
def test_every_layout_has_the_same_facts_and_each_weight_once(ep_size: int, etp_size: int) -> None:
    whole = list(experts_of().parameters())
    found = [torch.full_like(one, torch.nan) for one in whole]
    for shard in shards(ep_size, etp_size):
        parameters = list(experts_of(shard).parameters())
        infos = [info_of(one) for one in parameters]
        assert [(info.name, info.global_shape, info.init_std) for info in infos] == [
            ("layers.3.mlp.experts.linear_fc1.weight", (NUM_EXPERTS * 2 * WIDTH, HIDDEN), CONFIG.init_method_std),
            ("layers.3.mlp.experts.linear_fc2.weight", (NUM_EXPERTS * HIDDEN, WIDTH), CONFIG.residual_init_std),
        ]
        assert all(info.is_expert and info.weight_decay and info.tensor_parallel_sharded for info in infos)
        assert [one.numel() for one in parameters] == [one.numel() // (ep_size * etp_size) for one in whole]
        for target, parameter, info in zip(found, parameters, infos):
            for box in info.boxes:
                place = tuple(slice(start, start + size) for start, size in zip(box.global_offset, box.shape))
                assert bool(target[place].isnan().all())
                target[place] = box.view(parameter.detach())
    for one, other in zip(found, whole):
        assert torch.equal(one, other.detach())
    assert float(found[0].std()) == pytest.approx(CONFIG.init_method_std, rel=0.05)


@pytest.mark.parametrize("is_fake", [False, True])
@pytest.mark.parametrize("gemm", [LoopGroupedGemm(), PaddedGroupedGemm(), TorchGroupedGemm()])
def test_tensors_without_memory_have_the_shapes_of_the_counts(gemm: GroupedGemm, is_fake: bool) -> None:
    """As in the dry run (fake tensors) and where launches are counted (the meta device)."""
    device = torch.device("cpu" if is_fake else "meta")
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.device("meta"):
        experts = experts_of(device=device, dtype=torch.bfloat16, gemm=gemm)
        rows = torch.empty(55, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
        counts = RowCounts((5, 1, 33, 16), torch.empty(4, dtype=torch.int64, device=device))
        output = experts(rows, counts)
        assert output.shape == (55, HIDDEN)
        output.backward(torch.empty_like(output))
        assert rows.grad is not None and rows.grad.shape == rows.shape
        for parameter in experts.parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape


def test_a_grouped_gemm_is_one_launch() -> None:
    with LaunchRecorder() as recorder:
        experts = experts_of(device=torch.device("meta"), dtype=torch.bfloat16, gemm=TorchGroupedGemm())
        rows = torch.empty(55, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
        counts = RowCounts((5, 1, 33, 16), torch.empty(4, dtype=torch.int64, device="meta"))
        recorder.launches.clear()
        output = experts(rows, counts)
        output.backward(torch.empty_like(output))
    kinds = [launch.kind for launch in recorder.launches]
    assert kinds.count("gemm") == 6
    assert "host sync" not in kinds
