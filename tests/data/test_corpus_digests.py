"""The digests beside a corpus: equal to a slow computation, made by every tool that writes one, and damage is named."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megatron.data import corpus_digests
from megatron.data.corpus_digests import (
    BLOCK_BYTES,
    check_file,
    compute_digests,
    corpus_fingerprint,
    digests_path,
    encode_digests,
    file_digests,
    new_digests,
    read_digests,
    write_digests,
)
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.merging import merge_datasets
from megatron.errors import DataError

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parents[2]


def write_large(prefix: Path, megabytes: int = 3, seed: int = 0) -> str:
    """A corpus of random tokens over several blocks, whose last block is not full."""
    generator = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), 60_000) as writer:
        for _ in range(megabytes * 5 + 1):
            writer.add_documents(generator.integers(60_000, size=100_100, dtype=np.uint16), [50, 100_000, 0, 50])
    return str(prefix)


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
    prefix = write_large(tmp_path / "large")
    assert os.path.getsize(f"{prefix}.bin") > 3 * BLOCK_BYTES
    assert_right(prefix)
    with IndexedDatasetWriter(str(tmp_path / "empty"), 100):
        pass
    assert_right(str(tmp_path / "empty"))


def test_merging_leaves_digests_too(tmp_path: Path) -> None:
    prefixes = [write_large(tmp_path / "one", 1), write_large(tmp_path / "two", 1, seed=1)]
    merge_datasets(prefixes, str(tmp_path / "both"))
    assert_right(str(tmp_path / "both"))


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
    prefix = write_large(tmp_path / "corpus", 1)
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
    prefix = write_large(tmp_path / "corpus")
    digests = read_digests(prefix)
    assert digests is not None
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(BLOCK_BYTES + 17)
        byte = file.read(1)[0]
        file.seek(BLOCK_BYTES + 17)
        file.write(bytes([byte ^ 1]))
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
    prefix = write_large(tmp_path / "corpus", 1)
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
    prefix = write_large(tmp_path / "corpus", 1)
    monkeypatch.setattr(corpus_digests, "FORMAT_VERSION", 2)
    write_digests(prefix, compute_digests(prefix))
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"format version 2 .* where this code reads version 1"):
        read_digests(prefix)


def test_no_reader_finds_old_digests_beside_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of the replacement: what can be opened fits its digests."""
    prefix = write_large(tmp_path / "corpus", 1)
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
    write_large(tmp_path / "corpus", 1, seed=1)
    assert steps == 6


def preprocess(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": f"{n} {n + 1}"}) + "\n" for n in range(50)))
    command = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", "in.jsonl"]
    command += ["--output-prefix", "out", "--tokenizer-type", "NullTokenizer", "--vocab-size", "99", *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("more", [(), ("--partitions", "2", "--workers", "2")])
def test_the_tool_writes_digests_and_says_what_it_overwrites(tmp_path: Path, more: tuple[str, ...]) -> None:
    assert "overwriting" not in preprocess(tmp_path, *more).stderr
    prefix = str(tmp_path / "out_text_document")
    assert_right(prefix)
    before = Path(digests_path(prefix)).read_bytes()
    for name in os.listdir(tmp_path):
        if name.endswith("_partitions"):
            (tmp_path / name / "merged.json").unlink()
    said = preprocess(tmp_path, *more).stderr
    size = os.path.getsize(f"{prefix}.bin")
    assert re.search(
        rf"WARNING: overwriting out_text_document\.bin \({size} bytes, written 20\d\d-.*\) and out_text_document\.idx "
        r"\(.*\): use another --output-prefix",
        said,
    )
    assert Path(digests_path(prefix)).read_bytes() == before
