"""benchmarks/benchmark_data.py: its contenders write the same bytes, and every row has figures."""

from pathlib import Path
from typing import get_args

import pytest

from benchmarks.benchmark_data import (
    BENCHMARKS,
    Benchmark,
    BenchmarkConfig,
    _check_equal,
    compare_preprocessing,
    preprocess_one_by_one,
)
from benchmarks.lib.data_rows import HEADER, Row
from benchmarks.lib.training_data_rows import loader_rows, order_rows, reading_rows
from benchmarks.lib.verification_rows import verification_rows
from megatron.errors import DataError
from tests.data.texts import LINES, NULL, TEXTS, documents_of

pytestmark = pytest.mark.slow(reason="a benchmark")


def test_contenders_of_the_benchmark_write_the_same(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_bytes(LINES + b'{"text": ""}\n')
    config = BenchmarkConfig(workers=2, repeats=1)
    row = compare_preprocessing(tmp_path / "text.jsonl", len(TEXTS) + 1, NULL, config, preprocess_one_by_one)
    assert row.ours > 0 and row.other and row.ours_peak_mb and row.ours_peak_mb > 10
    assert documents_of(tmp_path, "other") == documents_of(tmp_path, "ours") == TEXTS
    (tmp_path / "other_text_document.bin").write_bytes(b"1")
    with pytest.raises(DataError, match=r"The \.bin files of the two ways differ"):
        _check_equal(tmp_path)


def test_the_data_of_a_run_is_measured(tmp_path: Path) -> None:
    """That there are figures; what they are is for a quiet machine."""
    rows = [next(order_rows(800)), *reading_rows(tmp_path, 20), *loader_rows(tmp_path, 4, num_workers=[1])]
    assert [row.unit for row in rows] == ["s", "ms", "ms", "ms", "%"]
    assert all(row.ours > 0 for row in rows) and rows[-1].ours < 100
    rows = list(verification_rows(tmp_path, 20))
    assert [row.unit for row in rows] == ["GB/s", "GB/s", "ms", "%", "ms", "GB/s"]
    assert all(row.ours > 0 for row in rows)


def test_rows_of_the_benchmark_stand_in_their_columns() -> None:
    assert tuple(BENCHMARKS) == get_args(Benchmark)
    whole, single = Row("a", "documents/s", 1234.0, 617.0, 144.0, 99.0, 1.5), Row("b", "s", 0.25, ours_peak_mb=5.0)
    names = ("ours", "other", "ratio", "of CPU", "peak MB")
    columns = {name: HEADER.index(name) + len(name) for name in names}
    expected = {"ours": "1,234", "other": "617", "ratio": "2.00", "of CPU": "1.50", "peak MB": "144 / 99"}
    assert all(whole.line()[: columns[name]].endswith(value) for name, value in expected.items())
    assert single.line()[: columns["ours"]].endswith("0.250") and single.ratio is None
    assert len(single.line()) == columns["peak MB"] and single.line().endswith(" 5")
