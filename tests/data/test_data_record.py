"""Two records of data agree exactly where a run would read the same samples, and otherwise say what differs."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data.corpus_digests import digests_path
from megatron.data.data_record import (
    BLOCK_BYTES,
    SAMPLED_BLOCKS,
    build_record,
    evaluation_differences,
    record_corpus,
    sampled_blocks,
    training_differences,
)
from megatron.data.dataset_builder import read_sources
from megatron.data.indexed_dataset import IndexedDataset
from tests.data.corpora import CORPUS_A, golden_documents, write


@given(total=st.integers(0, 40 * BLOCK_BYTES), unit=st.sampled_from([1, 2, 4, 8]))
def test_sampled_blocks_lie_in_the_file_and_reach_both_ends(total: int, unit: int) -> None:
    total -= total % unit
    blocks = sampled_blocks(total, unit)
    assert len(blocks) <= SAMPLED_BLOCKS and all(0 < length <= BLOCK_BYTES for _, length in blocks)
    assert all(start % unit == 0 and start + length <= total for start, length in blocks)
    if total:
        assert blocks[0][0] == 0 and sum(blocks[-1]) == total
    if total <= SAMPLED_BLOCKS * BLOCK_BYTES:
        covered = 0
        for start, length in blocks:
            assert start <= covered
            covered = start + length
        assert covered == total
    else:
        gaps = np.diff([start for start, _ in blocks])
        assert gaps.max() - gaps.min() <= 2 * unit


def test_a_corpus_is_recorded_by_its_bytes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", golden_documents(CORPUS_A))
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    found = record_corpus(IndexedDataset(prefix))
    assert found["path"] == prefix
    assert (found["index_bytes"], found["token_bytes"]) == (len(index), len(tokens))
    assert found["index_xxh3_128"] == xxhash.xxh3_128_hexdigest(index)
    assert found["block_xxh3_128"] == [xxhash.xxh3_128_hexdigest(tokens)]
    assert found == record_corpus(IndexedDataset(prefix, mmap=False))
    url = f"file://{prefix}"
    assert record_corpus(IndexedDataset(url, index_cache=str(tmp_path / "cache"))) == {**found, "path": url}


def test_a_long_corpus_is_recorded_by_blocks_of_it(tmp_path: Path) -> None:
    tokens = np.random.default_rng(3).integers(999, size=1_500_000)
    prefix = write(tmp_path / "a", [tokens.tolist()])
    content = Path(f"{prefix}.bin").read_bytes()
    wanted = [
        xxhash.xxh3_128_hexdigest(content[start : start + length]) for start, length in sampled_blocks(len(content), 2)
    ]
    assert record_corpus(IndexedDataset(prefix))["block_xxh3_128"] == wanted
    assert len(set(wanted)) == SAMPLED_BLOCKS


# --- differences ---------------------------------------------------------------------------------------------


def record_of(
    *words: str, tokenizer: TokenizerConfig | None = None, splits: tuple[int, ...] = (0, 1), **flags: Any
) -> Any:
    """The record of a run on the corpora of ``words``, as a manifest gives it back."""
    data = DataConfig(**{"data_path": words, "seq_length": 8, **flags})
    sources = read_sources(data)
    record = build_record(
        data,
        tokenizer or TokenizerConfig("NullTokenizer", vocab_size=999),
        sources,
        {prefix: record_corpus(IndexedDataset(prefix)) for prefix in sources.prefixes()},
        used_splits=splits,
        seed=7,
        vocabulary_size=1000,
        end_of_document=999,
        micro_batch_size=2,
        data_parallel_size=4,
    )
    return json.loads(json.dumps(record))


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Three corpora."""
    return [write(tmp_path / name, golden_documents(CORPUS_A, start=100 * place)) for place, name in enumerate("abc")]


def blend(prefixes: list[str], *weights: float) -> tuple[str, ...]:
    return tuple(word for weight, prefix in zip(weights, prefixes) for word in (str(weight), prefix))


def test_equal_data_have_no_differences(prefixes: list[str]) -> None:
    words = blend(prefixes, 0.7, 0.3)
    for same in (
        record_of(*blend(prefixes, 70, 30)),
        record_of(*words, split="969,30,1"),
        record_of(*blend(prefixes, 0.7, 0.3, 0), num_workers=7, data_cache_path="elsewhere"),
        record_of(*words, mmap_bin_files=False),
    ):
        assert training_differences(record_of(*words), same) == []
        assert evaluation_differences(record_of(*words), same) == []


def test_corpora_may_lie_elsewhere(prefixes: list[str], tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    saved, corpora = record_of(*blend(prefixes, 0.7, 0.3)), [golden_documents(CORPUS_A, start) for start in (0, 100)]
    moved = [write(tmp_path / "moved" / f"{name}x", corpus) for name, corpus in zip("ab", corpora)]
    assert training_differences(saved, record_of(*blend(moved, 0.7, 0.3))) == []
    swapped = [write(tmp_path / "moved" / name, corpus) for name, corpus in zip("ab", corpora[::-1])]
    assert training_differences(saved, record_of(*blend(swapped, 0.7, 0.3))) == [
        f"weight of {swapped[1]}: 0.7 in the checkpoint, 0.3 now",
        f"weight of {swapped[0]}: 0.3 in the checkpoint, 0.7 now",
    ]


def test_a_difference_names_both_sides(prefixes: list[str]) -> None:
    a, b, c = prefixes
    same = ("0.7", a, "0.3", b)
    saved = record_of(*same)

    def differences(*words: str, **changes: Any) -> list[str]:
        return training_differences(saved, record_of(*words, **changes))

    assert differences("0.5", a, "0.3", b) == [f"weight of {a}: 0.7 in the checkpoint, 0.5 now"]
    assert differences("0.7", a, "0.3", b, "0.1", c) == [f"corpus {c}: absent in the checkpoint, weight 0.1 now"]
    assert differences("0.7", a) == [f"corpus {b}: weight 0.3 in the checkpoint, absent now"]
    assert differences("0.3", b, "0.7", a) == [f"order of the corpora: {a}, {b} in the checkpoint, {b}, {a} now"]
    assert differences(a, b) == [
        f"weight of {a}: 0.7 in the checkpoint, by number of samples now",
        f"weight of {b}: 0.3 in the checkpoint, by number of samples now",
    ]
    assert differences(*same, seq_length=16) == ["--seq-length: 8 in the checkpoint, 16 now"]
    assert differences(*same, split="9,1") == ["--split: 969, 30, 1 in the checkpoint, 9,1 now"]
    assert differences(*same, sample_order="extendable") == [
        "--sample-order: megatron in the checkpoint, extendable now"
    ]
    assert differences(*same, eod_mask_loss=True) == ["--eod-mask-loss: off in the checkpoint, on now"]
    assert differences(*same, dataloader_type="cyclic") == ["--dataloader-type: single in the checkpoint, cyclic now"]
    assert differences(mock_data=True) == ["--mock-data: off in the checkpoint, on now"]


def test_every_setting_counts(prefixes: list[str]) -> None:
    saved = record_of(prefixes[0], dataloader_type="cyclic")
    settings = saved.keys() - {"corpora", "blends"}
    assert len(settings) == 17
    for name in settings:
        now = copy.deepcopy(saved)
        now[name] = "1,1" if name == "split" else "another"
        assert len(training_differences(saved, now)) == 1, name
        # A field that an older record lacks is not compared.
        del now[name]
        assert training_differences(saved, now) == [] == training_differences(now, saved)


def test_other_content_under_the_same_name_is_named(prefixes: list[str]) -> None:
    saved = record_of(prefixes[0])
    tokens = Path(f"{prefixes[0]}.bin")
    numbers = np.frombuffer(tokens.read_bytes(), "<u2")
    tokens.write_bytes(numbers[::-1].tobytes())
    digests = [xxhash.xxh3_128_hexdigest(content.tobytes()) for content in (numbers, numbers[::-1])]
    assert training_differences(saved, record_of(prefixes[0])) == [
        f"digest of sampled block 0 of {tokens} (1 of 1 blocks differ): {digests[0]} in the checkpoint, "
        f"{digests[1]} now"
    ]
    write(prefixes[0], golden_documents([*CORPUS_A[:-2], 5, 5]))
    beginning = f"digest of {prefixes[0]}.idx: {saved['corpora'][0]['index_xxh3_128']}"
    assert any(line.startswith(beginning) for line in training_differences(saved, record_of(prefixes[0])))


def test_bytes_between_the_sampled_blocks_count_where_all_digests_are_known(tmp_path: Path) -> None:
    tokens = np.random.default_rng(3).integers(999, size=1_500_000)
    prefix = write(tmp_path / "a", [tokens.tolist()])
    saved = record_of(prefix)
    first, second = sampled_blocks(2 * len(tokens), 2)[:2]
    tokens[(sum(first) + second[0]) // 4] ^= 1
    write(prefix, [tokens.tolist()])
    (line,) = training_differences(saved, record_of(prefix))
    assert line.startswith(f"content of {digests_path(prefix)}: {saved['corpora'][0]['all_blocks']} in the checkpoint")
    Path(digests_path(prefix)).unlink()
    assert training_differences(saved, record_of(prefix)) == []


def test_another_tokenizer_file_of_the_same_size_is_named(prefixes: list[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    def record(path: Path) -> Any:
        return record_of(prefixes[0], tokenizer=TokenizerConfig("HuggingFaceTokenizer", str(path)))

    for path in (tmp_path / "t.json", tmp_path / "model" / "tokenizer.json"):
        path.write_text("content 1")
    saved = record(tmp_path / "t.json")
    assert training_differences(saved, record(tmp_path / "model")) == []
    (tmp_path / "t.json").write_text("content 2")
    (line,) = training_differences(saved, record(tmp_path / "t.json"))
    both = [xxhash.xxh3_128_hexdigest(text) for text in (b"content 1", b"content 2")]
    assert line == f"digest of the file of --tokenizer-model: {both[0]} in the checkpoint, {both[1]} now"


def test_data_of_evaluation_are_apart(prefixes: list[str]) -> None:
    a, b, c = prefixes
    saved, now = (record_of(train_data_path=(a,), valid_data_path=(valid,)) for valid in (b, c))
    assert training_differences(saved, now) == []
    assert evaluation_differences(saved, now) == [
        f"valid split: corpus {b}: weight by number of samples in the checkpoint, absent now",
        f"valid split: corpus {c}: absent in the checkpoint, weight by number of samples now",
    ]
    without = record_of(train_data_path=(a,), splits=(0,))
    assert evaluation_differences(saved, without) == [] == evaluation_differences(without, now)
