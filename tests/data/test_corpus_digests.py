"""The digests beside a corpus are right and name damage; blocks are compared once, in the order of the samples."""

import os
import random
import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from megatron.commands.preprocess_data import PreprocessConfig, preprocess
from megatron.data import corpus_digests
from megatron.data.corpus_digests import (
    BackgroundComparison,
    BlockComparison,
    Damage,
    SampleRange,
    Share,
    block_uses,
    check_file,
    check_indexes,
    compute_digests,
    corpora_of,
    corpus_fingerprint,
    digests_path,
    encode_digests,
    read_digests,
    write_digests,
)
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.digests import BLOCK_BYTES, FileDigests, new_digests
from megatron.data.gpt_dataset import BlendedDataset, Dataset, GPTDataset, MockDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from tests.data.corpora import write_corpus
from tests.data.file_damage import DAMAGES, flip
from tests.data.texts import LINES, NULL
from tests.end_to_end.run_process import wait_until


def slow_digests(content: bytes) -> bytes:
    starts = range(0, len(content), BLOCK_BYTES)
    return b"".join(xxhash.xxh3_64_digest(content[start : start + BLOCK_BYTES]) for start in starts)


def assert_right(prefix: str) -> None:
    digests = read_digests(prefix)
    assert digests is not None
    for kind, file in ((".bin", digests.tokens), (".idx", digests.index)):
        assert file.digests == slow_digests(Path(prefix + kind).read_bytes())
        assert file.size == os.path.getsize(prefix + kind)
        check_file(prefix + kind, file)
    assert encode_digests(compute_digests(prefix)) == Path(digests_path(prefix)).read_text()


def test_a_writer_leaves_the_digests_of_what_it_wrote(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "large", 0, 1_600_000)
    assert os.path.getsize(f"{prefix}.bin") > 3 * BLOCK_BYTES
    assert_right(prefix)
    with IndexedDatasetWriter(str(tmp_path / "empty"), 100):
        pass
    assert_right(str(tmp_path / "empty"))


@pytest.mark.parametrize("sizes", [[1], [BLOCK_BYTES], [BLOCK_BYTES - 1, 2], [3 * BLOCK_BYTES + 5], [7] * 9, []])
def test_digests_do_not_depend_on_how_a_file_is_given(sizes: list[int]) -> None:
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    digester = new_digests()
    for piece in pieces:
        digester.update(piece)
    content = b"".join(pieces)
    digests = FileDigests.of(digester)
    assert digests.digests == slow_digests(content) and digests.size == len(content)
    assert FileDigests.decode(digests.encode()) == digests


def test_the_fingerprint_changes_with_any_byte(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", 0, 700_000)
    before = corpus_fingerprint(prefix)
    seen = {before}
    for kind in (".bin", ".idx"):
        with open(prefix + kind, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        write_digests(prefix, compute_digests(prefix))
        seen.add(corpus_fingerprint(prefix))
    assert len(seen) == 3
    os.remove(digests_path(prefix))
    assert corpus_fingerprint(prefix) is None


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", 0, 1_600_000)
    digests = read_digests(prefix)
    assert digests is not None
    flip(f"{prefix}.bin", 8 * (BLOCK_BYTES + 17))
    sentence = (
        rf"corpus\.bin is damaged in bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} \(block 1\), .*corpus\.digests\.json"
    )
    with pytest.raises(DataError, match=sentence) as caught:
        check_file(f"{prefix}.bin", digests.tokens)
    assert "copy it again" in str(caught.value) and "--write-digests" in str(caught.value)
    check_file(f"{prefix}.bin", digests.tokens, blocks=[0, 2])
    os.truncate(f"{prefix}.bin", 5)
    with pytest.raises(DataError, match=rf"corpus\.bin has 5 bytes instead of {digests.tokens.size}"):
        check_file(f"{prefix}.bin", digests.tokens)


def test_a_damaged_file_of_digests_is_refused_and_never_taken_for_none(tmp_path: Path) -> None:
    """Every byte counts: the file has a digest of itself."""
    prefix = write_corpus(tmp_path / "corpus", 0, 700_000)
    path = Path(digests_path(prefix))
    good = path.read_bytes()
    chance = random.Random(17)
    places = [*range(80), *chance.sample(range(80, len(good)), 80), len(good) - 1]
    for place in places:
        damaged = bytearray(good)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"corpus\.digests\.json is damaged .*--write-digests"):
            read_digests(prefix)
    for content in (good[:0], good[:-1], good + b"}", b"null", b"[]", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"corpus\.digests\.json is damaged"):
            read_digests(prefix)


def test_another_format_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_corpus(tmp_path / "corpus", 0, 700_000)
    monkeypatch.setattr(corpus_digests, "FORMAT_VERSION", 2)
    write_digests(prefix, compute_digests(prefix))
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"format version 2 .* where this code reads version 1"):
        read_digests(prefix)


def test_no_reader_finds_old_digests_beside_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of the replacement: what can be opened fits its digests."""
    prefix = write_corpus(tmp_path / "corpus", 0, 700_000)
    steps = 0
    real = os.replace

    def replace_and_look(source: str, target: str) -> None:
        nonlocal steps
        for move in (lambda: None, lambda: real(source, target)):
            move()
            steps += 1
            try:
                IndexedDataset(prefix)
            except DataError:
                continue  # there is no .idx
            assert_right(prefix)

    monkeypatch.setattr(os, "replace", replace_and_look)
    write_corpus(tmp_path / "corpus", 1, 700_000)
    assert steps == 6


@pytest.mark.processes
@pytest.mark.parametrize("more", [{}, {"partitions": 2, "workers": 2}])
def test_the_tool_writes_digests_and_says_what_it_overwrites(
    tmp_path: Path, more: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINES)
    config = PreprocessConfig((str(tmp_path / "in.jsonl"),), str(tmp_path / "out"), NULL, **more)  # type: ignore[arg-type]
    preprocess(config)
    assert "overwriting" not in caplog.text
    prefix = f"{tmp_path}/out_text_document"
    assert_right(prefix)
    before = Path(digests_path(prefix)).read_bytes()
    for merged in tmp_path.glob("*_partitions/merged.json"):
        merged.unlink()
    preprocess(config)
    size = os.path.getsize(f"{prefix}.bin")
    wanted = (
        rf"{prefix}\.bin \({size:,} bytes, written 20\d\d-.*\) and {prefix}\.idx \(.*\): use another --output-prefix"
    )
    assert re.search(f"WARNING: overwriting {wanted}", caplog.text)
    assert Path(digests_path(prefix)).read_bytes() == before


# --- comparison, in the order of the samples --------------------------------------------------------------------

ALONE = Share()
SETTINGS = SampleSettings(seq_length=500, seed=1, split="1")


class Watched(IndexedDataset):
    """Notes which blocks are read."""

    def runs(self, places: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        for start, length in places:
            for token in (*range(start, start + length, 100), start + length - 1):
                self.seen.append(token * self.dtype.itemsize // BLOCK_BYTES)
        return super().runs(list(places))

    seen: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora of six and of three blocks."""
    folder = tmp_path_factory.mktemp("corpora")
    write_corpus(folder / "a", 1, 3_000_000)
    write_corpus(folder / "b", 2, 1_300_000)
    return folder


def one(prefix: Path | str) -> GPTDataset:
    return GPTDataset(IndexedDataset(str(prefix)), 0, None, SETTINGS)


def blend(folder: Path) -> BlendedDataset:
    """The same corpus may be there twice."""
    children = [one(folder / name) for name in ("a", "b", "a")]
    return BlendedDataset(children, [0.5, 0.3, 0.2], 1500, 0)


def slow_uses(dataset: Dataset, samples: Sequence[int]) -> list[tuple[int, str, int]]:
    """(position, prefix, block), each block at the first sample whose tokens it holds, by reading the samples."""
    found: dict[tuple[str, int], int] = {}
    watched = []
    for child in dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]:
        assert isinstance(child, GPTDataset)
        child.corpus = Watched(child.corpus.prefix)
        watched.append(child.corpus)
    for position, sample in enumerate(samples):
        for corpus in watched:
            corpus.seen = []
        dataset[sample]
        for corpus in watched:
            for block in corpus.seen:
                found.setdefault((corpus.prefix, block), position)
    return sorted((position, prefix, block) for (prefix, block), position in found.items())


@pytest.mark.parametrize("kind", ["one", "blend"])
def test_the_blocks_of_samples_are_those_that_reading_them_touches(folder: Path, kind: str) -> None:
    dataset: Dataset = one(folder / "a") if kind == "one" else blend(folder)
    samples = np.random.default_rng(0).permutation(len(dataset))[:400]
    uses = block_uses(dataset, samples)
    prefixes = [corpus.prefix for corpus in corpora_of(dataset)]
    found = sorted(zip(uses.positions.tolist(), (prefixes[n] for n in uses.corpora.tolist()), uses.blocks.tolist()))
    assert found == slow_uses(dataset, samples.tolist())
    assert uses.positions.tolist() == sorted(uses.positions.tolist())
    assert len(found) == 6 + (kind == "blend") * 3


def test_synthetic_data_has_no_blocks() -> None:
    mock = MockDataset(1, 8, 100, 10)
    assert corpora_of(mock) == [] and not len(block_uses(mock, np.arange(10)).blocks)


def comparison_of(dataset: Dataset, share: Share = ALONE, cache: str | None = None) -> BlockComparison:
    return BlockComparison(check_indexes([corpus.prefix for corpus in corpora_of(dataset)], cache, share), share)


def all_of(dataset: Dataset) -> SampleRange:
    return SampleRange("train", dataset, 0, len(dataset), lambda start, stop: np.arange(start, stop))


def compare_all(dataset: Dataset, share: Share = ALONE, cache: str | None = None) -> list[Damage | int]:
    return list(comparison_of(dataset, share, cache).compare(all_of(dataset)))


def bytes_of(steps: Sequence[Damage | int]) -> list[int]:
    return [step for step in steps if not isinstance(step, Damage) and step]


def test_ranks_share_the_blocks_and_each_is_read_once(folder: Path) -> None:
    dataset = blend(folder)
    size = sum(os.path.getsize(folder / f"{name}.bin") for name in "ab")
    assert sum(bytes_of(compare_all(dataset))) == size
    shares = [bytes_of(compare_all(dataset, Share(rank, 4))) for rank in range(4)]
    assert sum(map(sum, shares)) == size and max(map(len, shares)) - min(map(len, shares)) <= 1


def damaged(folder: Path, target: Path, kind: str, place: int) -> Path:
    """A copy of the corpora in which one byte of ``a`` is another."""
    shutil.copytree(folder, target)
    flip(target / f"a{kind}", 8 * place + 2)
    return target


def test_every_damaged_block_is_found_by_one_rank_at_its_first_sample(folder: Path, tmp_path: Path) -> None:
    for block in (0, 2, 5):
        copy = damaged(folder, tmp_path / str(block), ".bin", block * BLOCK_BYTES + 7)
        dataset = blend(copy)
        wanted = {
            (prefix, number): position for position, prefix, number in slow_uses(blend(copy), range(len(dataset)))
        }
        found = [step for rank in range(3) for step in compare_all(dataset, Share(rank, 3)) if isinstance(step, Damage)]
        assert {damage.position for damage in found} == {wanted[str(copy / "a"), block]}
        assert f"a.bin is damaged in bytes {block * BLOCK_BYTES} to " in found[0].description


def test_a_damaged_index_is_found_by_one_rank_at_the_start(folder: Path, tmp_path: Path) -> None:
    copy = damaged(folder, tmp_path / "copy", ".idx", os.path.getsize(folder / "a.idx") - 1000)
    refused = 0
    for rank in range(3):
        try:
            check_indexes([str(copy / "b"), str(copy / "a")], None, Share(rank, 3))
        except DataError as error:
            refused += "a.idx is damaged in bytes 0 to " in str(error)
    assert refused == 1
    os.truncate(copy / "b.bin", os.path.getsize(copy / "b.bin") + 1)  # behind what the index knows of
    with pytest.raises(DataError, match=r"b\.bin has \d+ bytes instead of \d+"):
        check_indexes([str(copy / "b")], None, ALONE)


def test_a_corpus_without_digests_passes_and_is_known(folder: Path, tmp_path: Path) -> None:
    copy = damaged(folder, tmp_path / "copy", ".bin", 5)
    os.remove(digests_path(str(copy / "a")))
    assert check_indexes([str(copy / "a")], None, ALONE) == {str(copy / "a"): None}
    assert not any(isinstance(step, Damage) for step in compare_all(blend(copy)))


def test_remote_corpora_are_compared_too(folder: Path, tmp_path: Path) -> None:
    copy, cache = damaged(folder, tmp_path / "copy", ".bin", 3 * BLOCK_BYTES), str(tmp_path / "cache")
    for root, is_damaged in ((folder, False), (copy, True)):
        dataset = GPTDataset(IndexedDataset(f"file://{root}/a", index_cache=cache), 0, None, SETTINGS)
        assert any(isinstance(step, Damage) for step in compare_all(dataset, cache=cache)) == is_damaged
    copy = damaged(folder, tmp_path / "index", ".idx", 100)
    with pytest.raises(DataError, match=r"file://.*a\.idx is damaged in bytes 0 to "):
        check_indexes([f"file://{copy}/a"], cache, ALONE)


# --- beside training -------------------------------------------------------------------------------------------


def in_background(dataset: Dataset, bytes_per_s: float) -> tuple[BlockComparison, BackgroundComparison, SampleRange]:
    comparison, wanted = comparison_of(dataset), all_of(dataset)
    return comparison, BackgroundComparison(comparison, [wanted], bytes_per_s), wanted


def test_a_thread_compares_all_and_ends(folder: Path) -> None:
    comparison, background, _ = in_background(blend(folder), 1e12)
    wait_until(lambda: not comparison.remaining, 60)
    wait_until(lambda: "compare-corpora" not in {thread.name for thread in threading.enumerate()}, 60)
    assert background.found is None
    background.close()


def test_the_rate_is_kept_and_the_end_does_not_wait_for_it(folder: Path) -> None:
    begun = time.monotonic()
    comparison, background, wanted = in_background(blend(folder), 4e6)
    wait_until(lambda: comparison.remaining <= 6, 60)
    assert time.monotonic() - begun > 2 * BLOCK_BYTES / 4e6  # three blocks, of which the last need not be waited for
    background.finish([wanted])
    assert not comparison.remaining and background.found is None


def test_a_thread_says_what_it_finds_and_an_end_finds_what_it_has_not_reached(folder: Path, tmp_path: Path) -> None:
    copy = damaged(folder, tmp_path / "copy", ".bin", 4 * BLOCK_BYTES)
    _, background, _ = in_background(blend(copy), 1e12)
    wait_until(lambda: background.found is not None, 60)
    assert isinstance(background.found, Damage) and "(block 4)" in background.found.description
    _, slow, wanted = in_background(blend(copy), 1.0)
    slow.finish([wanted])
    assert slow.found == background.found
    background.close()


def test_a_thread_whose_file_cannot_be_read_any_more_says_so(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    dataset = blend(copy)
    comparison = comparison_of(dataset)
    os.truncate(copy / "b.bin", 10)
    background = BackgroundComparison(comparison, [all_of(dataset)], 1e12)
    wait_until(lambda: background.found is not None, 60)
    assert isinstance(background.found, DataError) and "b.bin was truncated" in str(background.found)
    background.close()


# --- many damaged corpora --------------------------------------------------------------------------------------


def read_as_training_does(prefix: str) -> list[list[int]]:
    """Samples in their order, compared and then read; :class:`DataError` where training would end."""
    digests = check_indexes([prefix], None, ALONE)
    dataset = one(prefix)
    count = min(100, len(dataset))
    for step in BlockComparison(digests, ALONE).compare(all_of(dataset)._replace(stop=count)):
        if isinstance(step, Damage):
            raise DataError(f"{step.description}.")
    return [dataset[index]["tokens"].tolist() for index in range(count)]


@pytest.mark.parametrize("trials", [60, pytest.param(500, marks=pytest.mark.whole_matrix)])
def test_of_damaged_corpora_none_feeds_other_tokens_and_none_gives_a_traceback(tmp_path: Path, trials: int) -> None:
    good = write_corpus(tmp_path / "good", 7, 700_000)
    wanted = read_as_training_does(good)
    refused = 0
    for trial in range(trials):
        chance = random.Random(f"{trials} {trial}")
        kind, damage = chance.choice((".bin", ".idx")), chance.choice(list(DAMAGES))
        prefix = str(tmp_path / "damaged")
        for suffix in (".bin", ".idx", ".digests.json"):
            shutil.copy(good + suffix, prefix + suffix)
        DAMAGES[damage](Path(prefix + kind), chance)
        try:
            assert read_as_training_does(prefix) == wanted, f"trial {trial}: {damage} of {kind} was read"
        except DataError as error:
            assert "\n" not in str(error) and "damaged" + kind in str(error)
            refused += 1
    print(f"{trials} damaged corpora: {refused} refused, {trials - refused} gave the tokens that were written")
    assert refused > trials * 0.9
