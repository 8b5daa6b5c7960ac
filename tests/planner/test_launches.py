"""Recorded launches: kinds, bytes, shapes of GEMMs, FLOPs of attention, recompute; what a rank sends, and where."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse_command_line
from megatron.core.communication import CollectiveRecord, Communicator
from megatron.core.ops.attention import AttentionMask
from megatron.core.topology import RankGrid, single_process
from megatron.planner.launches import Launch, LaunchRecorder, ProductShape, Traffic, axis_of, expert_placement_advice
from megatron.planner.simulated_rank import simulated_kernels
from tests.planner.planned_run import planned_run
from tests.recorded_step import record_step

META = torch.device("meta")
BF16, FP32 = torch.bfloat16, torch.float32
HOST = "--optimizer-cpu-offload"


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def test_gemms_have_their_shape_and_say_whether_they_add_to_a_main_gradient() -> None:
    with LaunchRecorder() as recorder:
        empty(8, 16) @ empty(32, 16).t()
        torch.addmm(empty(8, 32), empty(8, 16), empty(16, 32))
        torch.bmm(empty(3, 8, 16), empty(3, 16, 32))
        torch.ops.aten.mm.dtype_out(empty(8, 16), empty(16, 32), FP32, out=empty(8, 32, dtype=FP32))
    assert [launch.product for launch in recorder.launches] == [
        ProductShape(8, 32, 16, BF16),
        ProductShape(8, 32, 16, BF16, is_accumulated=True),
        ProductShape(8, 32, 16, BF16, count=3),
        ProductShape(8, 32, 16, BF16, is_accumulated=True),
    ]
    assert {launch.kind for launch in recorder.launches} == {"gemm"}


def test_attention_has_the_flops_of_its_two_products() -> None:
    query, key = empty(2, 4, 64, 32), empty(2, 4, 128, 32)
    packed, starts = empty(256, 4, 32), torch.arange(0, 257, 64, dtype=torch.int32, device=META)
    with LaunchRecorder() as recorder:
        for is_causal in (True, False):
            torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, key, None, True, 0.0, is_causal)
        short = empty(256, 2, 32)
        torch.ops.aten._flash_attention_forward(packed, short, short, starts, starts, 64, 64, 0.0, True, False)
    whole, chunks = 4 * 2 * 4 * 64 * 128 * 32, 4 * 4 * (4 * 64 * 64) * 32
    assert [launch.kind for launch in recorder.launches] == ["attention"] * 3
    assert [launch.flops for launch in recorder.launches] == [0.5 * whole, whole, 0.5 * chunks]
    assert [launch.length for launch in recorder.launches] == [0, 0, 64]


@pytest.mark.parametrize(("queries", "keys", "window"), [(64, 64, 7), (64, 64, 80), (48, 64, 20), (64, 48, 30)])
def test_attention_in_a_window_has_the_flops_of_its_visible_keys(queries: int, keys: int, window: int) -> None:
    """Without half of the diagonal of a causal tile, as without a window."""
    is_causal = queries == keys
    query, key = empty(2 * queries, 4, 32), empty(2 * keys, 4, 32)
    starts = torch.arange(3, dtype=torch.int32, device=META)
    lengths = starts * queries, starts * keys, queries, keys
    sides = {"window_size_left": window, "window_size_right": 0 if is_causal else -1}
    with LaunchRecorder() as recorder:
        torch.ops.aten._flash_attention_forward(query, key, key, *lengths, 0.0, is_causal, False, **sides)
    positions = torch.arange(keys)
    hidden = AttentionMask(is_causal, window).hidden(torch.arange(queries) + keys - queries, positions)
    assert hidden is not None
    visible = int((~hidden).sum()) - (queries / 2 if is_causal else 0)
    (launch,) = recorder.launches
    assert launch.flops == 4 * 2 * 4 * 32 * visible


def recorded(flags: str, num_gpus: int) -> list[Launch]:
    model = "--model llama3-8b --num-layers 2 --mock-data --bf16 --seq-length 1024 --kernel attention=cudnn"
    training = "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3"
    return record_step(planned_run(f"{model} {training} {flags}", num_gpus), 0, 2)


def test_a_recomputed_layer_is_marked_and_skips_its_last_product() -> None:
    launches = recorded("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 1)
    again = [launch for launch in launches if launch.is_recomputed]
    assert sum(launch.product is not None for launch in again) == 2 * 3  # of one layer, two microbatches
    assert sum(launch.kind == "attention" for launch in again) == 2


def test_a_shard_on_the_host_is_copied_once_each_way_and_launches_no_update() -> None:
    small = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --vocab-size 512"
    plain, on_host = (Counter(one.kind for one in recorded(f"{small} {one}", 1)) for one in ("", HOST))
    # Six weights in each layer, and three others.
    assert on_host["host sync"] - plain["host sync"] == 2 * (2 * 6 + 3)
    assert on_host["elementwise"] < plain["elementwise"] and on_host["gemm"] == plain["gemm"]


# --- kinds and bytes -------------------------------------------------------------------------------------------

MATRIX = 4 * 8 * 16
"""Bytes of :func:`matrix`."""


def matrix() -> Tensor:
    return torch.empty(8, 16, device=META)


def kinds_and_bytes(launches: Sequence[Launch]) -> list[tuple[str, int]]:
    return [(launch.kind, launch.num_bytes) for launch in launches]


def test_views_allocations_and_work_on_the_host_launch_nothing() -> None:
    with LaunchRecorder() as recorder:
        matrix().t().unflatten(0, (4, 4))[:, 1].detach()
        (torch.ones(5) + 1).tolist()
        torch.zeros(0, device=META)
    assert recorder.launches == []


def test_bytes_are_those_of_the_elements_read_and_written() -> None:
    with LaunchRecorder() as recorder:
        one, other = matrix(), matrix()
        one + other
        one.mul_(2)
        one.copy_(other)
        one + one[:1].expand(8, 16)
        one[:4].zero_()
    expected = (3 * MATRIX, 2 * MATRIX, 2 * MATRIX, 2 * MATRIX + MATRIX // 8, MATRIX // 2)
    assert kinds_and_bytes(recorder.launches) == [("elementwise", size) for size in expected]


def test_lookups_read_what_they_write() -> None:
    with LaunchRecorder() as recorder:
        rows = torch.empty(3, dtype=torch.int64, device=META)
        found = matrix()[rows]  # [3, 16]
        matrix().index_add_(0, rows, found)
    assert [launch.num_bytes for launch in recorder.launches] == [24 + 2 * 4 * 48, 24 + 3 * 4 * 48]


def test_a_fused_kernel_is_one_launch() -> None:
    def scale_and_add(into: Tensor, summand: Tensor, unused: Tensor) -> Tensor:
        into.mul_(2).add_(summand.exp())
        return into.sum(dim=1)

    with LaunchRecorder() as recorder:
        recorder.fused(scale_and_add, matrix(), matrix(), matrix())
    # Read: into and summand. Written: into and the sums of eight rows.
    assert kinds_and_bytes(recorder.launches) == [("elementwise", 3 * MATRIX + 32)]


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("triton", ["2 + table"]),
        ("compiled", ["2 + table", "2"]),  # into a temporary, which is copied back
        ("eager", ["3", "4 + table", "3"]),  # a copy in fp32, the product in place, and the copy back
    ],
)
def test_a_rotation_is_simulated_as_what_it_launches(name: str, passes: list[str]) -> None:
    """``passes`` over the activations in bf16, and the table of a sequence, by launch."""
    config = parse_command_line(
        f"--model tiny --mock-data --vocab-size 61 --bf16 --seq-length 64 --micro-batch-size 2 "
        f"--kernel rope={name}".split()
    )
    activations, table = empty(64, 2, 4 * 8), torch.empty(64, 1, 1, 4, dtype=torch.complex64, device=META)
    with LaunchRecorder() as recorder:
        rotate = simulated_kernels(config, single_process(), torch.device("cuda"), 61, recorder).layers.rotate
        rotate(activations, table)
    expected = [int(one[0]) * 2 * 64 * 2 * 32 + ("table" in one) * 64 * 4 * 8 for one in passes]
    assert kinds_and_bytes(recorder.launches) == [("elementwise", size) for size in expected]


def test_host_syncs_are_what_the_host_waits_for() -> None:
    with LaunchRecorder() as recorder:
        numbers = matrix()
        numbers[0].tolist()
        float(numbers.sum())
        torch.ones(4).to(META)
        torch.ones(4).to(META, non_blocking=True)
        numbers.nonzero()
    kinds = [launch.kind for launch in recorder.launches]
    assert kinds == ["host sync", "elementwise", "host sync", "host sync", "host copy", "elementwise", "host sync"]


# --- traffic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all_reduce", 150), ("all_gather", 75), ("reduce_scatter", 75), ("all_to_all", 75), ("send", 100)],
)
def test_bytes_sent_are_those_of_a_ring(kind: str, sent: int) -> None:
    traffic = Traffic(rank=6, node_size=8)
    near, far = (Communicator(ranks, 6, "dp") for ranks in ((4, 5, 6, 7), (6, 14, 22, 30)))
    for ranks in (near, far):
        observe = traffic.observer(ranks)
        observe(CollectiveRecord(kind, "dp", 4, 100))
        observe(CollectiveRecord("receive", "dp", 4, 100, peer=5))
    assert traffic.by_axis == {"dp": 2 * sent}
    assert traffic.by_link == {"in node": sent, "across": sent}
    traffic.observer(far)(CollectiveRecord("send", "pp F down", 4, 10, peer=14))
    traffic.observer(far)(CollectiveRecord("shift", "cp", 4, 1, peer=7))
    assert traffic.by_link == {"in node": sent + 1, "across": sent + 10}
    assert traffic.by_axis == {"dp": 2 * sent, "pp": 10, "cp": 1}


@pytest.mark.parametrize(
    ("axes", "axis"),
    [("ep", "ep"), ("etp", "etp"), ("etpxep", "ep"), ("edp", "edp"), ("edp_shard", "edp"), ("edp_replicate", "edp")],
)
def test_the_traffic_of_experts_has_axes_of_its_own(axes: str, axis: str) -> None:
    assert axis_of(axes) == axis


@pytest.mark.parametrize(
    "grid",
    [
        RankGrid(tp=2, pp=4, dp=8, ep=8, order="tp-cp-ep-dp-pp"),
        RankGrid(tp=2, pp=4, dp=8, ep=8, order="dp-tp-cp-ep-pp"),
        RankGrid(dp=64, ep=8),
        RankGrid(pp=2, dp=4, ep=4),
        RankGrid(tp=2, pp=4, dp=8, etp=2),
        RankGrid(tp=8, pp=8, dp=8),
        RankGrid(pp=4, dp=32, ep=16),
    ],
    ids=["ordered", "another order", "no pipeline", "one node", "pairs", "dense", "larger than a node"],
)
def test_there_is_advice_only_where_another_order_is_better(grid: RankGrid) -> None:
    assert expert_placement_advice(grid, 8) is None
    # The default order spreads the experts of a pipeline over nodes.
    advice = expert_placement_advice(RankGrid(tp=2, pp=4, dp=8, ep=8), 8)
    assert advice is not None and "0 1 8 9 16 17 24 25" in advice and "--rank-order tp-cp-ep-dp-pp" in advice


@pytest.mark.parametrize(("ep", "etp"), [(8, 1), (4, 2)])
@pytest.mark.parametrize(("node_size", "is_spread"), [(4, False), (8, True), (16, True), (32, False), (72, False)])
def test_the_advice_depends_on_the_size_of_a_node(node_size: int, is_spread: bool, ep: int, etp: int) -> None:
    """Eight experts every second of 32 ranks: they fit in a node of 32, and no order brings them into one of 4."""
    grid = RankGrid(tp=2, pp=4, dp=8, ep=ep, etp=etp)
    assert (expert_placement_advice(grid, node_size) is not None) == is_spread
