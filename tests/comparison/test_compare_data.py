"""The first sample that differs between two runs."""

from pathlib import Path

import pytest

from megatron.comparison.data import compare_data
from megatron.comparison.finding import Comparison
from megatron.comparison.side import Side
from megatron.config.command_line import parse_command_line
from megatron.data.corpus_writer import IndexedDatasetWriter

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 2 --vocab-size 64 --lr 1e-3 "
)


def compared(words: str, others: str) -> Comparison:
    a, b = (parse_command_line((BASE + one).split()) for one in (words, others))
    return compare_data(Side("A", Path(), "run", a), Side("B", Path(), "run", b))


@pytest.mark.parametrize(("length", "iterations"), [(5, 3), (30, 20)])
def test_equal_samples_up_to_the_end_of_the_shorter_run(length: int, iterations: int) -> None:
    result = compared(
        f"--mock-data --train-iters {length}", f"--mock-data --train-iters {min(3 + length // 30 * 27, 30)}"
    )
    assert not result.differences and result.is_complete
    assert result.compared == f"The samples of {iterations} iterations."


def test_another_seed_differs_in_the_first_token() -> None:
    result = compared("--mock-data --train-iters 3", "--mock-data --train-iters 3 --seed 7")
    (found,) = result.differences
    assert found.what == "tokens" and "iteration 1, sample 0, position 0" in found.remark


def test_a_missing_corpus_is_said() -> None:
    missing = "--data-path nowhere/corpus --tokenizer-type NullTokenizer --vocab-size 63 --train-iters 3"
    result = compared(missing, missing)
    assert not result.is_complete and "nowhere/corpus" in result.compared


def write_corpus(prefix: Path, changed: int | None) -> str:
    """A corpus of 20 documents; in the one ``changed`` every token is 9."""
    with IndexedDatasetWriter(str(prefix), 64) as writer:
        for number in range(20):
            writer.add_document([9 if number == changed else number % 8] * 16 + [63])
    return f"--data-path {prefix} --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size 63 --train-iters 10"


def test_a_document_that_differs_is_found(tmp_path: Path) -> None:
    words, others = write_corpus(tmp_path / "a", None), write_corpus(tmp_path / "b", 7)
    assert not compared(words, words).differences
    (found,) = compared(words, others).differences
    assert (found.what, found.a, found.b) == ("tokens", "7", "9")
