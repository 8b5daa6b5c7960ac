"""From the flags and the files that they name to datasets: corpora of each split, blends, orders, refusals."""

import json
import os
import re
import resource
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data.corpus_digests import Share, check_indexes
from megatron.data.dataset_builder import Blend, Sources, build_datasets, parse_data_path, read_sources
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset
from megatron.data.indexed_dataset import IndexedDataset, check_document_ends
from megatron.data.order_cache import description_hash
from megatron.errors import ConfigError, DataError, UserError
from tests.data.corpora import CORPUS_A, build, golden_documents, stamps, tokens_of, write
from tests.forked import fork_context

pytestmark = pytest.mark.usefixtures("corpora")
BOTH = ("0.7", "a", "0.3", "b")


# --- the forms of the flags ----------------------------------------------------------------------------------


def test_every_form_names_the_same_corpora() -> None:
    Path("blend.txt").write_text("0.7 a\n0.3 b\n")
    Path("splits.json").write_text(json.dumps({"train": "0.7 a 0.3 b", "valid": ["b"], "test": None}))
    both = Blend(["a", "b"], [0.7, 0.3])
    assert read_sources(DataConfig(data_path=BOTH)) == Sources((both,) * 3, "969, 30, 1")
    assert read_sources(DataConfig(data_args_path="blend.txt")) == Sources((both,) * 3, "969, 30, 1")
    apart = Sources((both, Blend(["b"], None), None), None)
    assert read_sources(DataConfig(train_data_path=BOTH, valid_data_path=("b",))) == apart
    assert read_sources(DataConfig(per_split_data_args_path="splits.json")) == apart
    assert [apart.has(index) for index in range(3)] == [True, True, False]
    assert apart.prefixes() == ["a", "b"]
    shared = read_sources(DataConfig(data_path=("a",), split="9,1"))
    assert [shared.has(index) for index in range(3)] == [True, True, False]


def test_corpora_of_a_split_are_that_split_as_a_whole() -> None:
    """With the order that Megatron-LM gives a corpus which is all train (its seed does not know of splits)."""
    train, valid, test = build(counts=(7, 1, 0), train_data_path=("a",), valid_data_path=("b",))
    whole, _, _ = build("a", counts=(7, 0, 0))
    assert tokens_of(train) == tokens_of(whole)
    assert test is None and sorted(set(valid.order.document_index[:].tolist())) == [0, 1, 2]
    assert train.description["split"] is None and train.description["split_matrix"] is None
    assert (train.description["index_split"], valid.description["index_split"]) == ("train", "valid")


def test_single_corpus_of_a_split_loses_its_weight_and_pairs_keep_theirs() -> None:
    train, valid, _ = build(counts=(7, 5, 0), train_data_path=("1", "a"), valid_data_path=BOTH)
    assert isinstance(train, GPTDataset) and train.description["num_samples"] == 7
    assert isinstance(valid, BlendedDataset) and valid.description["weights"] == [0.7, 0.3]
    assert isinstance(build("1", "a")[0], BlendedDataset)


def test_surplus_and_threads_change_what_is_built_and_nothing_else() -> None:
    (plain, _, _), (more, _, _) = build(*BOTH), build(*BOTH, mid_level_dataset_surplus=1.0)
    assert [child["num_samples"] for child in plain.description["datasets"]] == [10, 5]
    assert [child["num_samples"] for child in more.description["datasets"]] == [18, 8]
    threaded, _, _ = build(*BOTH, num_dataset_builder_threads=4, data_cache_path="other")
    assert tokens_of(threaded) == tokens_of(plain)


BLEND = {"data_args_path": "file"}
PER_SPLIT = {"per_split_data_args_path": "file"}
ONE_OBJECT = "must contain one object with the key train"
SECRET = r"--data-args-path https://\*\*\*@host/a contains a password"
THIRD: dict[str, Any] = {"counts": (1, 1, 0), "split": "2,1"}


@pytest.mark.parametrize(
    ("flags", "content", "sentence"),
    [
        ({"data_args_path": "nowhere"}, None, r"The file of data arguments nowhere cannot be read \(No such file"),
        ({"data_args_path": "a.bin"}, None, r"a\.bin is not text \(.*\): use another"),
        (BLEND, " \n", "--data-args-path file lists no corpus"),
        (BLEND, "0 a 0 b", "--data-args-path has weights .*must not be negative or all zero"),
        (BLEND, "-1 a 2 b", "--data-args-path has weights .*must not be negative"),
        (BLEND, "1 https://me:hidden@host/a", SECRET),
        (BLEND, "https://hidden@host/a", SECRET),
        (PER_SPLIT, "{", "--per-split-data-args-path file is not JSON"),
        (PER_SPLIT, "[" * 100_000, "--per-split-data-args-path file is not JSON"),
        (PER_SPLIT, '["a"]', ONE_OBJECT),
        (PER_SPLIT, '{"valid": ["a"]}', ONE_OBJECT),
        (PER_SPLIT, '{"train": ["a"], "dev": ["b"]}', ONE_OBJECT),
        (PER_SPLIT, '{"train": ["a"], "valid": 1}', ONE_OBJECT),
        (PER_SPLIT, '{"train": [0, "a"]}', "The train path has weights"),
        (PER_SPLIT, '{"train": ["ftp://me:hidden@host/a"]}', "The train path ftp://.*password"),
        ({"train_data_path": ("a",)}, None, "5 samples of the valid split are needed, but --valid-data-path gives it"),
        ({"train_data_path": ("a",), "valid_data_path": ("b",), "seq_length": 30}, None, "has 20 tokens.*give it more"),
        ({}, None, "There is no corpus: set --data-path"),
        ({"data_path": ("a",), "seq_length": None}, None, "--seq-length is missing"),
        ({"data_path": ("nowhere",)}, None, r"nowhere\.idx does not exist"),
        (
            {"data_path": ("a",), "split": "1"},
            None,
            "5 samples of the valid split are needed, but --split '1' gives it",
        ),
        ({"data_path": ("a",), "split": "x"}, None, "--split 'x' must be"),
        ({"data_path": ("b",), **THIRD}, None, "The valid split of b has 6 tokens in 1 documents"),
        ({"data_path": ("b", "b"), **THIRD}, None, "No corpus of --data-path has tokens for one sample"),
    ],
)
def test_bad_files_and_splits_are_one_sentence(flags: Any, content: str | None, sentence: str) -> None:
    if content is not None:
        Path("file").write_text(content)
    with pytest.raises(UserError, match=sentence) as caught:
        build(**{"counts": (1, 5, 0), **flags})
    assert "\n" not in str(caught.value)


# --- damage that only the whole index shows ------------------------------------------------------------------

LENGTHS_AT, OFFSETS_AT = 34, 34 + 4 * len(CORPUS_A)


@pytest.mark.parametrize(
    ("place", "value"), [(LENGTHS_AT + 4 * 3, struct.pack("<i", -4)), (OFFSETS_AT + 8 * 3, struct.pack("<q", 94))]
)
def test_a_sequence_outside_of_the_tokens_is_named(place: int, value: bytes) -> None:
    with open("a.idx", "r+b") as file:
        file.seek(place)
        file.write(value)
    with pytest.raises(DataError, match=r"a\.idx places sequence 3 .*outside of a\.bin: write the data again"):
        build("a")


# --- ends of documents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["reset_attention_mask", "dataloader_inter_document_masking", "reset_position_ids"])
def test_flags_for_documents_refuse_a_corpus_without_ends(flag: str) -> None:
    write("endless", [list(range(n)) for n in (9, 0, 30, 4, 40)])
    build("endless", eod_mask_loss=True)
    with pytest.raises(DataError, match=r"None of 4 documents of endless ends with .* 999.*--append-eod, or remove"):
        build("endless", **{flag: True})
    build("a", **{flag: True})


def test_some_documents_may_lack_their_end() -> None:
    write("mixed", [[1, 2], [3, 999], [4]])
    check_document_ends(IndexedDataset("mixed"), 999)
    write("empty", [[], []])
    check_document_ends(IndexedDataset("empty"), 999)


def test_data_path_is_prefixes_or_pairs() -> None:
    assert parse_data_path(("a",)) == (["a"], None)
    assert parse_data_path(("a", "b")) == (["a", "b"], None)
    assert parse_data_path(("0.7", "a", "3", "b")) == (["a", "b"], [0.7, 3.0])
    assert parse_data_path(("0", "a", "3", "b")) == (["b"], [3.0])
    with pytest.raises(ConfigError, match="--data-path has weights"):
        parse_data_path(("nan", "a"))


def test_a_weight_without_a_prefix_is_refused_unless_a_corpus_has_its_name() -> None:
    for words in (("0.5", "a", "0.5"), ("a", "0.5", "b", "0.5"), ("0.5", "a", "b")):
        with pytest.raises(ConfigError, match=r"--data-path .* has the weight 0.5 without a prefix after it: write a"):
            parse_data_path(words)
    Path("2024.idx").touch()
    assert parse_data_path(("a", "b", "2024")) == (["a", "b", "2024"], None)


def test_one_corpus_and_its_default_cache() -> None:
    train, valid, test = build("a", counts=(7, 0, 0))
    assert isinstance(train, GPTDataset) and valid is None and test is None
    assert description_hash(train.description) == "7eed49f6baa69ba17261e1457380063c"
    assert len(stamps("cache/GPTDataset_indices")) == 5
    build("a", counts=(7, 0, 0), data_cache_path="elsewhere")
    assert stamps("elsewhere").keys() == stamps("cache/GPTDataset_indices").keys()


def test_blend_without_weights_is_proportional_to_the_samples() -> None:
    train, _, _ = build("a", "b", counts=(8, 0, 0))  # one epoch has 6 and 2
    assert len(train) == 8 and np.bincount(train.dataset_index[:]).tolist() == [6, 2]
    train, _, _ = build("a", "b", counts=(80, 0, 0))  # ten epochs
    assert len(train) == 80 and np.bincount(train.dataset_index[:]).tolist() == [60, 20]
    assert len(set(map(tuple, tokens_of(train)))) > 40


def test_blend_of_many_small_shares_gets_enough_samples() -> None:
    """Rounding every share up makes the blend outgrow what the large corpus was built for."""
    pairs = [word for _ in range(40) for word in ("0.001", "b")]
    train, _, _ = build("0.9", "a", *pairs, counts=(20, 0, 0))
    assert {len(tokens) for tokens in tokens_of(train)} == {8}


@pytest.mark.parametrize("order", ["extendable", "best-fit"])
@pytest.mark.parametrize("words", [("a",), ("0.7", "a", "0.3", "b"), ("a", "b")])
def test_longer_run_in_such_an_order_begins_with_the_shorter(words: tuple[str, ...], order: str) -> None:
    """Whatever the corpora; in Megatron-LM's order a run past its epoch is shuffled anew."""

    def samples(count: int, order: str, shown: int) -> list[list[int]]:
        return tokens_of(build(*words, counts=(count, 0, 0), sample_order=order)[0])[:shown]

    for shorter, longer in ((5, 8), (8, 90), (30, 31)):
        assert samples(longer, order, shorter) == samples(shorter, order, shorter)
    assert samples(90, "megatron", 8) != samples(8, "megatron", 8)


def test_end_of_document_mask_reaches_the_samples() -> None:
    train, _, _ = build("a", eod_mask_loss=True)
    masked = train[0]["loss_mask"] == 0
    assert masked.any() and (train[0]["tokens"][masked] == 999).all() and "document_starts" not in train[0]
    mock, _, _ = build(mock_data=True, eod_mask_loss=True, counts=(500, 0, 0))
    assert any((mock[i]["loss_mask"] == 0).any() for i in range(500))


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    data = DataConfig(data_path=("a",), seq_length=8)
    with pytest.raises(DataError, match=r"a\.bin holds token id 999, but the vocabulary has ids 0\.\.511"):
        build_datasets(data, vocab_size=512, eod=2, seed=1, sample_counts=(1, 0, 0), tokenizer_description=None)


def read_a_blend(directory: Path, hard: int, pipe: Connection) -> None:
    """Send the length of a sample of 40 corpora, or the refusal, of a process that may open 64 files at first."""
    os.chdir(directory)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    prefixes = tuple(f"corpus{number}" for number in range(40))
    try:
        check_indexes(prefixes, None, Share())
        pipe.send(str(len(build(*prefixes, counts=(80, 0, 0))[0][79]["tokens"])))
    except UserError as error:
        pipe.send(str(error))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hard", "said"),
    [
        (4000, r"8"),
        (1000, r"8"),
        (100, r"40 corpora need 1144 open files .* the hard limit is 100: raise it \(ulimit -Hn\), or merge .*"),
    ],
)
def test_a_blend_may_have_more_files_than_a_process_may_open_at_first(tmp_path: Path, hard: int, said: str) -> None:
    """Many systems let a process open 1,024 files, which are those of 170 corpora."""
    for number in range(40):
        write(f"corpus{number}", golden_documents(CORPUS_A))
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=read_a_blend, args=(tmp_path, hard, theirs))
    process.start()
    process.join(300)
    assert ours.poll() and re.fullmatch(said, words := ours.recv()), words
