"""Runs on data in its less usual forms: corpora of their own for every split, remote ones, and data without a loss."""

import math
import re
from pathlib import Path

import pytest

from tests.data.corpora import CORPUS_A, golden_documents, write
from tests.end_to_end.run_process import REPOSITORY, call_training, iterations, losses

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
    assert outcome.exit_code == 2
    assert "Evaluation needs validation data: set --valid-data-path" in outcome.stderr


def test_a_corpus_shorter_than_a_sample_is_refused_as_the_page_for_megatron_says(tmp_path: Path) -> None:
    write("short", [[1, 2, 3, 999]])
    page = " ".join((REPOSITORY / "docs/coming_from_megatron.md").read_text().split())
    (quoted,) = re.findall(r"\*\*A corpus shorter than one sample\*\*[^:]*: `([^`]*)`", page)
    words = r"[^ ]+".join(map(re.escape, quoted.split("…")))
    for path in (["short"], ["0.9", "a", "0.1", "short"]):
        outcome = call_training([*MODEL, "--split", "1", "--data-path", *path])
        assert outcome.exit_code != 0
        (error,) = outcome.errors
        assert re.search(words, error), error
    # Without weights it counts for the samples that it has.
    call_training([*MODEL, "--split", "1", "--data-path", "a", "--metrics-jsonl", "alone"]).succeeded()
    call_training([*MODEL, "--split", "1", "--data-path", "a", "short", "--metrics-jsonl", "blend"]).succeeded()
    assert losses(Path("alone")) == losses(Path("blend"))
    # One sample is enough to be repeated.
    write("sample", [list(range(9))])
    call_training([*MODEL, "--split", "1", "--data-path", "0.5", "a", "0.5", "sample"]).succeeded()


def test_a_global_batch_without_a_loss_says_so() -> None:
    write("ends", [[999]] * 100)
    outcome = call_training([*MODEL, "--data-path", "ends", "--split", "1", "--eod-mask-loss"])
    assert outcome.exit_code == 1
    assert "Iteration 1 has no loss, because every token of its global batch is masked" in outcome.stderr


def test_synthetic_data_has_the_vocabulary_of_the_model_that_is_named() -> None:
    """An untrained model is as uncertain as its vocabulary is large."""
    small = "--model llama3.2-1b --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 8"
    run = "--seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 0 --num-workers 0 --log-interval 1 --mock-data"
    for flags, vocabulary in (([], 128256), (["--vocab-size", "500"], 500)):
        call_training([*small.split(), *run.split(), *flags, "--metrics-jsonl", "metrics"]).succeeded()
        assert iterations(Path("metrics"))[0]["lm_loss"] == pytest.approx(math.log(vocabulary), rel=0.02)
