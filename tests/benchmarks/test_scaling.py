"""benchmarks/scaling.py: the simulated ranks list what real ranks would, and what the host does grows slowly enough. Of
data and metrics nothing is quadratic, and what a rank keeps and a resume reads do not grow at all."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.scaling_checkpoint import (
    FSDP,
    Layout,
    checkpoint_cost,
    curves_of,
    layouts_fsdp,
    simulated_module,
    tables_of,
    tensors_of,
)
from benchmarks.lib.scaling_curve import Curve, Point, order_of_growth
from benchmarks.lib.scaling_data import blend_curves, corpus_curves, write_corpus
from benchmarks.lib.scaling_metrics import iteration_points, report_point, resume_point
from benchmarks.lib.scaling_start import ITERATIONS, object_gathers, place_rank
from benchmarks.scaling import draw, table, too_steep
from megatron.checkpoint.save_plan import BoxTable, SavePlanner
from megatron.data.indexed_dataset import IndexedDataset
from megatron.torch_compat import fsdp_parameters

TINY = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4"
LAYOUTS = {
    "data": Layout(TINY, 8),
    "ZeRO-1, TP, PP": Layout(TINY, 16, tp=2, pp=2),
    "FSDP, PP": Layout(TINY, 16, pp=2, sharding=FSDP),
}


def rows(table: BoxTable) -> list[tuple[object, ...]]:
    names = [table.tensors.names[place] for place in table.tensor]
    numbers = np.column_stack((table.offsets, table.sizes, *table.divisions.columns)).tolist()
    return sorted((name, *row) for name, row in zip(names, numbers))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_simulated_rank_lists_what_its_own_code_lists(name: str) -> None:
    run = LAYOUTS[name].run()
    tables = [pickle.loads(one).planner_data for one in tables_of(run, workers=1)]
    for rank in range(run.grid.world_size):
        planner = SavePlanner(rank)
        planner.set_up_planner(dict(tensors_of(simulated_module(run, rank))))
        own = planner.create_local_plan().planner_data
        assert rows(tables[rank]) == rows(own)
        assert set(tables[rank].tensors.names) == set(own.tensors.names)


@pytest.mark.parametrize("name", ["ZeRO-1, TP, PP", "FSDP, PP"])
def test_all_ranks_together_have_every_element_and_write_equally_much(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("megatron.checkpoint.save_plan.SLICE_BYTES", 1 << 16)
    run = LAYOUTS[name].run()
    planner = SavePlanner(0)
    planner.create_global_plan([pickle.loads(one) for one in tables_of(run, workers=1)])
    written = np.zeros(run.grid.world_size, np.int64)
    for saved in planner.saved.values():
        saved.add_bytes(written)
    # A stage may have more than another, but its ranks write about the same.
    for stage in run.grid.groups(("tp", "cp", "dp")):
        assert written[list(stage)].max() < 1.05 * written[list(stage)].min()


def test_plans_of_a_checkpoint_grow_at_most_like_ranks() -> None:
    costs = [checkpoint_cost(Layout(TINY, ranks), Layout(TINY, 4, tp=2), workers=1) for ranks in (8, 32, 128)]
    # A rank has its shard of each bucket and its share of the weights: the more ranks, the fewer boxes.
    boxes = [cost.boxes / cost.ranks for cost in costs]
    assert boxes == sorted(boxes, reverse=True)
    assert costs[-1].received / costs[-1].ranks < 4000
    sizes = [curve for curve in curves_of("tiny", costs) if "lists" in curve.name or "manifest" in curve.name]
    assert len(sizes) == 2 and not too_steep(sizes)


def test_under_fsdp_rank_0_plans_as_many_boxes_for_every_number_of_ranks() -> None:
    costs = [checkpoint_cost(*layouts_fsdp(ranks, TINY), workers=1) for ranks in (8, 64)]
    assert costs[0].boxes == costs[1].boxes
    # Ranks without a box send an empty list; the manifest has names of files.
    assert (costs[1].received - costs[0].received) / 56 < 1000
    assert costs[1].manifest - costs[0].manifest < 56 * 120


def test_ranks_gather_few_objects_at_start_and_none_in_an_iteration() -> None:
    gathers = object_gathers()
    assert {one.iteration for one in gathers} <= {0, ITERATIONS}
    assert sum(one.bytes for one in gathers) < 1500, gathers


def test_a_rank_of_a_hundred_thousand_finds_its_groups() -> None:
    num_groups, num_stages = 8, 16
    assert place_rank(131072) == num_groups + num_stages


def test_fsdp_makes_no_views_of_weights_for_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_parameters(), "_chunk_with_empty", lambda *_, **__: pytest.fail("a view for every rank"))
    simulated_module(layouts_fsdp(16384, TINY)[0].run(), 16383)


def test_a_curve_that_is_too_steep_is_named(tmp_path: Path) -> None:
    square = Curve("squares", "ranks", tuple(Point(n, n * n, n) for n in (1, 10, 100)), "≤ 1 s")
    assert too_steep([square]) == ["squares: seconds grow with the power 2.00 of ranks, more than 1.00"]
    assert table([square])[-1] == "| squares | 100 ranks | 1e+04 | 100 B | 2.00 | 1.00 | ≤ 1 s |"
    draw([square], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


# --- data and metrics ----------------------------------------------------------------------------------------
# Limits are between two whole orders, since seconds of small sizes say little more on a busy machine.


def test_order_of_growth_is_the_exponent() -> None:
    points = [Point(size, 3e-6 * size**2, size if size > 10 else 0) for size in (10, 100, 1000)]
    curve = Curve("squares", "numbers", tuple(points))
    assert abs(order_of_growth(curve, "seconds") - 2) < 1e-9 and abs(order_of_growth(curve, "bytes") - 1) < 1e-9


def test_corpus_made_by_formula_is_one_that_can_be_read(tmp_path: Path) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "corpus", 3000))
    corpus.check_sequences()
    assert len(corpus) == 3000 and corpus.num_tokens == int(corpus.sequence_lengths.sum())
    assert np.array_equal(corpus.get(2999), np.zeros(1024))


def test_building_an_order_is_linear_and_a_rank_keeps_nothing_of_it() -> None:
    built, opened, mapped = corpus_curves((20_000, 200_000, 800_000))
    assert order_of_growth(built, "seconds") < 1.5
    # Four bytes for the order and four for the lengths, beside the samples and 12 MB of buffers.
    assert built.points[-1].bytes < 800_000 * 10 + 64e6
    assert opened.points[-1].bytes < 4e6
    # The lengths and the order, shared by all processes of a machine.
    assert mapped.points[-1].bytes < 800_000 * 10 + 16e6


def test_cost_of_a_blend_is_linear_in_its_corpora() -> None:
    built, opened = blend_curves((2, 8, 32), samples=1000)
    assert order_of_growth(built, "seconds") < 1.5 and order_of_growth(opened, "seconds") < 1.5
    assert opened.points[-1].bytes < 16e6


def test_neither_an_iteration_nor_a_resume_grows_with_the_iterations_before() -> None:
    sizes = (250, 1000, 4000)
    iteration = Curve("", "", tuple(iteration_points(sizes)))
    resume = Curve("", "", tuple(_quickest(resume_point, size) for size in (4000, 64_000)))
    assert order_of_growth(iteration, "seconds") < 0.5 and order_of_growth(resume, "seconds") < 0.6
    assert iteration.points[-1].bytes < 2e6 and resume.points[-1].bytes < 4e6


def test_a_report_is_linear_in_the_iterations() -> None:
    report = Curve("", "", tuple(_quickest(report_point, size) for size in (500, 8000)))
    assert order_of_growth(report, "seconds") < 1.5 and order_of_growth(report, "bytes") < 1.2


def _quickest(measure: Callable[[int], Point], size: int) -> Point:
    """Of three measurements of milliseconds, the one that other processes disturbed least."""
    return min((measure(size) for _ in range(3)), key=lambda point: point.seconds)
