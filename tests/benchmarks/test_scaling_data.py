"""How data and metrics grow: nothing is quadratic, and what a rank keeps and a resume reads do not grow at all.

The limits are between two whole orders, since seconds of small sizes say little more on a busy machine.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.lib.scaling_curve import Curve, Point, order_of_growth
from benchmarks.lib.scaling_data import blend_curves, corpus_curves, write_corpus
from benchmarks.lib.scaling_metrics import iteration_points, report_point, resume_point
from megatron.data.indexed_dataset import IndexedDataset


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
