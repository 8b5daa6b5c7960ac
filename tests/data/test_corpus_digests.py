"""The digests beside a corpus: equal to a slow computation, made by every tool that writes one, and damage is named."""

import os
import random
import re
from pathlib import Path

import pytest
import xxhash

from megatron.commands.preprocess_data import PreprocessConfig, preprocess
from megatron.data import corpus_digests
from megatron.data.corpus_digests import (
    check_file,
    compute_digests,
    corpus_fingerprint,
    digests_path,
    encode_digests,
    file_digests,
    read_digests,
    write_digests,
)
from megatron.data.corpus_writer import IndexedDatasetWriter
from megatron.data.digests import BLOCK_BYTES, new_digests
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from tests.data.corpora import write_corpus
from tests.data.file_damage import flip
from tests.data.texts import LINES, NULL

pytestmark = pytest.mark.processes


def slow_digests(path: str) -> list[int]:
    content = Path(path).read_bytes()
    starts = range(0, len(content), BLOCK_BYTES)
    return [xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES]) for start in starts]


def assert_right(prefix: str) -> None:
    digests = read_digests(prefix)
    assert digests is not None
    for kind, file in ((".bin", digests.tokens), (".idx", digests.index)):
        assert file.blocks.tolist() == slow_digests(prefix + kind)
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
    starts = range(0, len(content), BLOCK_BYTES)
    wanted = [xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES]) for start in starts]
    digests = file_digests(digester)
    assert digests.blocks.tolist() == wanted and digests.size == len(content)


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
