"""Runs on data in its less usual forms: corpora of their own for every split, remote ones, data without a loss; several
validation sets, whole sets, and evaluation without training data."""

import math
import re
from pathlib import Path

import pytest

from tests.data.corpora import CORPUS_A, golden_documents, write
from tests.end_to_end.run_process import (
    REPOSITORY,
    Corpus,
    Flags,
    Record,
    call_training,
    flags_of,
    fork_training,
    iterations,
    losses,
    records,
    tokenize,
    write_documents,
)

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
        error = call_training([*MODEL, "--split", "1", "--data-path", *path]).refusal()
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


# --- validation sets ------------------------------------------------------------------------------------------

ALONE: Flags = {
    "data_path": None,
    "split": None,
    "train_iters": None,
    "lr": None,
    "lr_warmup_iters": None,
    "skip_train": True,
    "fp64": True,
    "global_batch_size": None,
}
"""No training data, no length, no learning rate."""


def tokenized(corpus: Corpus, directory: Path, documents: int, first: int) -> Path:
    write_documents(directory / "text.jsonl", documents, first)
    return tokenize(directory / "text.jsonl", corpus.tokenizer)


@pytest.fixture(scope="module")
def one(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of a few hundred samples."""
    return tokenized(corpus, tmp_path_factory.mktemp("one"), documents=3, first=0)


@pytest.fixture(scope="module")
def other(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second, smaller corpus."""
    return tokenized(corpus, tmp_path_factory.mktemp("other"), documents=2, first=100)


def evaluation(corpus: Corpus, trained: Path, metrics: Path, changes: Flags, processes: int = 1) -> Record:
    """The record of an evaluation of the trained model."""
    flags = flags_of(corpus, **{**ALONE, "load": trained, "metrics_jsonl": metrics, **changes})
    outcome = call_training(flags) if processes == 1 else fork_training(flags, processes)
    outcome.succeeded()
    (record,) = records(metrics)
    return record


def test_whole_sets_have_losses_by_name(corpus: Corpus, one: Path, other: Path, trained: Path, tmp_path: Path) -> None:
    """On two ranks with microbatches of three samples, which divide neither set."""
    both: Flags = {"valid_data_path": [str(one), str(other)], "full_validation": True}
    names: Flags = {"multiple_validation_sets": True, "validation_set_names": ["all", "two"]}
    alone = evaluation(corpus, trained, tmp_path / "one.jsonl", {**both, **names, "micro_batch_size": 1})
    ranks = evaluation(corpus, trained, tmp_path / "two.jsonl", {**both, **names, "micro_batch_size": 3}, processes=2)
    blended = evaluation(corpus, trained, tmp_path / "blended.jsonl", {**both, "micro_batch_size": 2})
    losses = {key: value for key, value in alone.items() if key.startswith("validation_")}
    assert list(losses) == [
        *("validation_loss", "validation_bits_per_byte"),
        *("validation_loss/all", "validation_bits_per_byte/all"),
        *("validation_loss/two", "validation_bits_per_byte/two"),
    ]
    assert {key: ranks[key] for key in losses} == pytest.approx(losses, rel=1e-9)
    for key in ("validation_loss", "validation_bits_per_byte"):
        assert blended[key] == pytest.approx(losses[key], rel=1e-9)
    assert abs(losses["validation_loss/two"] - losses["validation_loss"]) > 1e-6


def test_a_whole_set_is_every_sample_once(corpus: Corpus, other: Path, trained: Path, tmp_path: Path) -> None:
    """As a number of batches of one sample that is the number of samples."""
    one: Flags = {"valid_data_path": str(other), "micro_batch_size": 1}
    whole = evaluation(corpus, trained, tmp_path / "whole.jsonl", {**one, "full_validation": True})
    from megatron.data.indexed_dataset import IndexedDataset

    samples = (IndexedDataset(str(other)).num_tokens - 1) // 32
    batches = evaluation(corpus, trained, tmp_path / "batches.jsonl", {**one, "eval_iters": samples})
    fewer = evaluation(corpus, trained, tmp_path / "fewer.jsonl", {**one, "eval_iters": samples - 1})
    assert whole["validation_loss"] == pytest.approx(batches["validation_loss"], rel=1e-12)
    assert whole["validation_loss"] != pytest.approx(fewer["validation_loss"], rel=1e-9)


def test_training_evaluates_whole_sets_at_every_interval(corpus: Corpus, other: Path, tmp_path: Path) -> None:
    """Weights that do not change have the same loss each time, and the console and TensorBoard name the sets."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags: Flags = {
        "data_path": None,
        "split": None,
        "train_data_path": str(corpus.prefix),
        "valid_data_path": [str(other), str(other)],
        "multiple_validation_sets": True,
        "full_validation": True,
        "train_iters": 2,
        "lr": 0,
        "lr_warmup_iters": 0,
        "eval_interval": 1,
        "fp64": True,
        "metrics_jsonl": tmp_path / "metrics.jsonl",
        "tensorboard_dir": tmp_path / "events",
    }
    outcome = call_training(flags_of(corpus, **flags)).succeeded()
    evaluations = [record for record in records(tmp_path / "metrics.jsonl") if "validation_loss" in record]
    assert [record["iteration"] for record in evaluations] == [1, 2]
    values = [record[f"validation_loss{name}"] for record in evaluations for name in ("", "/0", "/1")]
    assert values == pytest.approx([values[0]] * 6, rel=1e-12)
    assert f" validation-0 loss at iteration 1 | lm loss value: {values[0]:.6E} | lm loss PPL: " in outcome.stdout
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in events.Scalars("lm loss validation-1")] == [1, 2]
    assert [event.step for event in events.Scalars("lm loss validation-1 vs samples")] == [8, 16]
    assert [event.step for event in events.Scalars("bits-per-byte validation-1")] == [1, 2]


def test_what_cannot_be_evaluated_is_one_sentence(corpus: Corpus, other: Path, trained: Path) -> None:
    weights: Flags = {"valid_data_path": ["0.5", str(other), "0.5", str(corpus.prefix)]}
    cases: list[tuple[Flags, str]] = [
        ({**weights, "full_validation": True}, "--full-validation reads every sample once"),
        ({**weights, "multiple_validation_sets": True}, "--multiple-validation-sets evaluates every corpus"),
        (
            {"valid_data_path": str(other), "multiple_validation_sets": True, "validation_set_names": ["a", "b"]},
            "--validation-set-names has 2 names, but there are 1",
        ),
        ({"valid_data_path": str(other), "full_validation": True, "seq_length": 2**14}, "use a shorter --seq-length"),
        ({"data_path": str(corpus.prefix), "split": "1,0,0"}, "--skip-train has nothing to evaluate"),
    ]
    for changes, sentence in cases:
        outcome = call_training(flags_of(corpus, **{**ALONE, "load": trained, **changes}))
        assert outcome.exit_code == 2, changes
        assert sentence in outcome.errors[0], outcome.errors
