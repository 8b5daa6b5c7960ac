"""A run on a damaged corpus ends on all ranks with the file, the block and the first iteration that read it."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus_digests import digests_path
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.digests import BLOCK_BYTES
from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import ExitCode
from tests.end_to_end.run_process import Outcome, call_training, fork_training, losses

SEED = 1234
_MODEL = (
    "--model tiny --num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --seq-length 64 --num-attention-heads 2 "
    "--num-query-groups 1 --micro-batch-size 1 --global-batch-size 2 --train-iters 20 --lr 1e-3 --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 99 --log-interval 1 --data-cache-path cache --metrics-jsonl metrics"
)
MODEL = _MODEL.split()
FLAGS = [*MODEL, "--split", "1", "--data-path", "corpus"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 13 blocks, of documents so long that a sample reads few of them."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(5)
    with IndexedDatasetWriter(str(folder / "corpus"), 100) as writer:
        for _ in range(65):
            writer.add_document(generator.integers(99, size=100_000, dtype=np.uint16))
    return folder


@pytest.fixture(autouse=True)
def here(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the corpus in the working directory."""
    shutil.copytree(corpus, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def first_iterations() -> dict[int, int]:
    """By block: the first iteration whose samples have tokens in it, by a walk over samples."""
    dataset = GPTDataset(IndexedDataset("corpus"), 0, 40, SampleSettings(64, SEED, "1"))
    offsets, lengths = dataset.corpus.byte_offsets, dataset.corpus.sequence_lengths
    found: dict[int, int] = {}
    for sample in range(40):
        row = int(dataset.order.shuffle_index[sample])
        (document, start), (last, stop) = dataset.order.sample_index[row : row + 2].tolist()
        while (document, start) <= (last, stop):
            sequence = int(dataset.order.document_index[document])
            if start == lengths[sequence]:
                document, start = document + 1, 0
                continue
            found.setdefault((int(offsets[sequence]) + 2 * start) // BLOCK_BYTES, sample // 2 + 1)
            start += 1
    return found


def damage(block: int) -> None:
    """One bit of the last byte of a block but one: of its token's low byte, so the id stays in the vocabulary."""
    place = min((block + 1) * BLOCK_BYTES, os.path.getsize("corpus.bin")) - 2
    with open("corpus.bin", "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def assert_names(outcome: Outcome, block: int, iteration: int) -> None:
    assert outcome.exit_code == ExitCode.ACTION_REQUIRED
    place = rf"bytes {block * BLOCK_BYTES} to \d+ \(block {block}\)"
    assert re.search(
        rf"corpus\.bin is damaged in {place}, whose digest is not the one in corpus\.digests\.json; iteration "
        rf"{iteration} is the first to train on it: .*continue from an earlier one",
        outcome.refusal(),
    )
    assert "Traceback" not in outcome.stderr


def test_when_another_rank_finds_it_all_end_with_one_sentence() -> None:
    used = first_iterations()
    block = next(block for block in sorted(used) if block % 2 == 1)
    damage(block)
    paths = {"corpus", "cache", "metrics"}  # the ranks have a working directory of their own
    flags = [os.path.abspath(word) if word in paths else word for word in FLAGS]
    assert_names(fork_training([*flags, "--train-iters", "1000"], 2), block, used[block])


def test_a_run_that_ends_before_its_blocks_were_compared_compares_them_and_saves_nothing() -> None:
    used = first_iterations()
    block = max(used, key=lambda block: used[block])
    damage(block)
    outcome = call_training([*FLAGS, "--data-verification-rate", "1e-6", "--save", "run"])
    assert_names(outcome, block, used[block])
    assert len(losses(Path("metrics"))) == 20
    assert not list(Path("run").glob("iter_*"))


def test_a_block_that_the_run_does_not_read_does_not_end_it() -> None:
    unused = min(set(range(13)) - first_iterations().keys())
    damage(unused)
    call_training(FLAGS).succeeded()


def test_evaluation_data_count_too() -> None:
    shutil.copytree(".", "../other")
    for name in ("corpus.bin", "corpus.idx", "corpus.digests.json"):
        shutil.move(f"../other/{name}", name.replace("corpus", "valid"))
    with open("valid.bin", "r+b") as file:
        file.write(bytes(os.path.getsize("valid.bin")))
    splits = ["--train-data-path", "corpus", "--valid-data-path", "valid", "--eval-interval", "20", "--eval-iters", "1"]
    outcome = call_training([*MODEL, *splits])
    assert outcome.exit_code == ExitCode.ACTION_REQUIRED
    assert re.search(r"valid\.bin is damaged in bytes \d+ to \d+ .*; the validation split reads it", outcome.errors[0])


def test_a_corpus_without_digests_is_said_once() -> None:
    os.remove(digests_path("corpus"))
    outcome = call_training([*FLAGS, "--train-iters", "2"]).succeeded()
    sentence = "> no corpus.digests.json: the tokens are not verified"
    assert (outcome.stdout + outcome.stderr).count(sentence) == 1
    assert "tools/inspect_dataset.py corpus --write-digests" in outcome.stdout
