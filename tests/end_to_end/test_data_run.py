"""Runs on data in its less usual forms: corpora of their own for every split, remote ones, and data without a loss."""

from pathlib import Path

import pytest

from tests.data.test_indexed_dataset import CORPUS_A, golden_documents, write
from tests.end_to_end.run_process import call_training, iterations

MODEL = [
    *("--model", "tiny", "--num-layers", "1", "--seq-length", "8", "--micro-batch-size", "2"),
    *("--global-batch-size", "2", "--train-iters", "3", "--lr", "1e-3", "--num-workers", "0"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "999", "--log-interval", "1"),
]


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("a", golden_documents(CORPUS_A))
    write("b", golden_documents(CORPUS_A, start=500))


def test_remote_corpora_of_each_split_train_as_local_ones(tmp_path: Path) -> None:
    common = [*MODEL, "--data-cache-path", "cache", "--eval-interval", "2", "--eval-iters", "1"]
    records = []
    for name, root in (("local", ""), ("remote", f"file://{tmp_path}/")):
        paths = ["--train-data-path", f"{root}a", "--valid-data-path", f"{root}b"]
        call_training([*common, *paths, "--metrics-jsonl", name]).succeeded()
        records.append([record["lm_loss"] for record in iterations(Path(name))])
    assert len(records[0]) == 3 and records[0] == records[1]


def test_evaluation_without_data_of_its_own_is_refused() -> None:
    outcome = call_training([*MODEL, "--train-data-path", "a", "--eval-interval", "2"])
    assert outcome.exit_code == 1
    assert "Evaluation needs data of its own: give it with --valid-data-path" in outcome.stderr


def test_a_global_batch_without_a_loss_says_so() -> None:
    write("ends", [[999]] * 100)
    outcome = call_training([*MODEL, "--data-path", "ends", "--split", "1", "--eod-mask-loss"])
    assert outcome.exit_code == 1
    assert "Iteration 1 has no loss, because every token of its global batch is masked" in outcome.stderr
