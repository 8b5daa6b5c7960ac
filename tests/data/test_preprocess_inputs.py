"""Inputs, bad documents, partitions and merging of tools/preprocess_data.py: always the bytes of one plain run."""

import gzip
import json
import os
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from megatron.commands.inspect_dataset import InspectConfig, inspect
from megatron.commands.merge_datasets import find_prefixes
from megatron.commands.preprocess_data import PreprocessConfig, preprocess
from megatron.commands.preprocessing.progress import Counts
from megatron.config.data import TokenizerConfig
from megatron.data import text_inputs
from megatron.data.corpus_digests import corpus_fingerprint
from megatron.data.encoding import shared_tokenizer
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.merging import merge_datasets
from megatron.data.storage import find_files, open_stored
from megatron.data.text_inputs import (
    InputFormat,
    SourceRange,
    cut_in_partitions,
    divide_among_workers,
    list_sources,
    parse_documents,
    place_of,
    read_batches,
    whole_ranges,
)
from megatron.errors import ConfigError, DataError
from tests.data.corpora import md5, write
from tests.data.texts import LINES, NULL, TEXTS, documents_of

pytestmark = pytest.mark.processes


def run(directory: Path, name: str, *inputs: str, **flags: Any) -> Counts:
    """Preprocess into ``directory`` under ``name``."""
    return preprocess(PreprocessConfig(inputs, str(directory / name), NULL, append_eod=True, **flags))


def zstd(content: bytes) -> bytes:
    import pyarrow

    compressed: bytes = pyarrow.compress(content, "zstd", asbytes=True)
    return compressed


def write_parquet(path: Path, texts: list[str | None]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"number": list(range(len(texts))), "text": texts}), path, row_group_size=70)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """The same documents in every format; and a folder that holds them in parts."""
    (tmp_path / "in.jsonl").write_bytes(LINES)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "in.jsonl.zst").write_bytes(zstd(LINES[:999]) + zstd(LINES[999:]))
    (tmp_path / "lines.txt").write_text("\r\n".join(TEXTS) + "\r\n\r\n")
    (tmp_path / "paragraphs.txt.gz").write_bytes(gzip.compress("\n \n\n".join(TEXTS).replace(" ", "\n", 1).encode()))
    write_parquet(tmp_path / "in.parquet", [*TEXTS])
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(b"".join(LINES.splitlines(keepends=True)[:50]))
    write_parquet(folder / "b" / "part.parquet", [*TEXTS[50:120]])
    for number, text in enumerate(TEXTS[120:]):
        (folder / f"c{number:03}.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (folder / "LICENSE").write_text("no data")
    return tmp_path


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "jsonl": ("in.jsonl", {}),
    "gzip": ("in.jsonl.gz", {}),
    "zstd": ("in.jsonl.zst", {}),
    "lines": ("lines.txt", {"text_documents": "line"}),
    "paragraphs": ("paragraphs.txt.gz", {"text_documents": "paragraph"}),
    "parquet": ("in.parquet", {}),
    "folder": ("folder", {}),
    "glob": ("i*.jsonl", {}),
}


@pytest.mark.parametrize("batch_bytes", [300, 1 << 19])
@pytest.mark.parametrize("case", FORMATS)
def test_every_format_gives_the_same_documents(
    inputs: Path, case: str, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_inputs, "BATCH_BYTES", batch_bytes)
    name, flags = FORMATS[case]
    assert run(inputs, "out", str(inputs / name), **flags).documents == len(TEXTS)
    assert documents_of(inputs, "out") == TEXTS


def test_datasets(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"content": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_bytes(LINES)
    run(tmp_path, "streamed", f"dataset:{tmp_path / 'files'}")
    assert documents_of(tmp_path, "streamed") == TEXTS
    name = f"dataset:{tmp_path / 'saved'}"
    with pytest.raises(DataError, match="has no column 'text', but content: name the right one with --json-keys"):
        run(tmp_path, "out", name)
    preprocess(PreprocessConfig((name,), str(tmp_path / "out"), NULL, json_keys=("content",)))
    assert len(IndexedDataset(str(tmp_path / "out_content_document"))) == len(TEXTS)
    with pytest.raises(ConfigError, match="--partitions cannot cut dataset:"):
        run(tmp_path, "out", name, partitions=2)
    with pytest.raises(DataError, match=r"cannot be opened \(.*check --input, --dataset-config"):
        run(tmp_path, "out", f"dataset:{tmp_path / 'nowhere'}")


# --- remote files --------------------------------------------------------------------------------------------


def test_files_behind_a_url(inputs: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("in.jsonl.gz", "in.parquet", "in.jsonl.zst", "in.jsonl"):
        memory.pipe(f"/corpus/{name}", (inputs / name).read_bytes())
    try:
        assert run(inputs, "out", "memory://corpus/").documents == 4 * len(TEXTS)
        assert documents_of(inputs, "out") == 4 * TEXTS
        assert run(inputs, "one", "memory://corpus/*.parquet").documents == len(TEXTS)
        (piece,) = cut_in_partitions(list_sources(["memory://corpus/in.jsonl"]), 3, "file")[1]
        assert piece.start > 0 and len(list(read_batches([piece], InputFormat()))) == 1
    finally:
        memory.rm("/corpus", recursive=True)


def test_a_url_without_its_package_or_file() -> None:
    with pytest.raises(DataError, match=r"gs://bucket/a.jsonl needs a package .*: pip install gcsfs\."):
        find_files("gs://bucket/a.jsonl")
    with pytest.raises(DataError, match=r"never://a cannot be opened"):
        open_stored("never://a")
    with pytest.raises(DataError, match=r"memory://nothing does not exist .* or is empty"):
        list_sources(["memory://nothing"])


# --- bad documents -------------------------------------------------------------------------------------------

BAD = (
    b'{"text": "1"}\n\n{"text": \n{"content": "2"}\n{"text": ""}\n{"text": "1000"}\n{"text": "\xff"}\n[]\n{"text": "3"}'
)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_documents_are_counted_and_named(tmp_path: Path, workers: int) -> None:
    (tmp_path / "in.jsonl").write_bytes(BAD)
    counts = run(tmp_path, "out", str(tmp_path / "in.jsonl"), skip_bad_documents=True, workers=workers)
    assert documents_of(tmp_path, "out") == ["1", "3"]
    assert (counts.documents, counts.empty, counts.num_bad) == (3, 1, 5)
    numbers = [line.split("line ")[1].split()[0] for line in counts.bad]
    assert numbers == ["3", "4", "6", "7", "8"]
    assert "5 bad documents skipped:" in counts.summary() and "line 4 has no key 'text'" in counts.summary()


def test_bad_text_and_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"1 2\n\xff\n")
    with pytest.raises(DataError, match=r"bad.txt, line 2 is not valid UTF-8 .*--skip-bad-documents"):
        run(tmp_path, "out", str(tmp_path / "bad.txt"), text_documents="line")
    with pytest.raises(DataError, match=r"bad.txt, document 1 is not valid UTF-8"):
        run(tmp_path, "out", str(tmp_path / "bad.txt"))
    write_parquet(tmp_path / "bad.parquet", ["1", None])
    with pytest.raises(DataError, match=r"bad.parquet, row 2 has no text under the key 'text'"):
        run(tmp_path, "out", str(tmp_path / "bad.parquet"))
    (tmp_path / "short.parquet").write_bytes((tmp_path / "bad.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"short.parquet is not a complete parquet file"):
        run(tmp_path, "out", str(tmp_path / "short.parquet"))
    (tmp_path / "short.jsonl.zst").write_bytes(zstd(LINES)[:-9])
    with pytest.raises(DataError, match=r"short.jsonl.zst is not a complete zstd file"):
        run(tmp_path, "out", str(tmp_path / "short.jsonl.zst"))
    assert not list(tmp_path.glob("out*"))


def test_a_document_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_inputs, "MAX_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(text_inputs, "BATCH_BYTES", 100)
    for name, sentence in (("a.jsonl", "has a line of more than"), ("a.txt", "too long for one document")):
        (tmp_path / name).write_text("1 " * 2000)
        with pytest.raises(DataError, match=sentence):
            run(tmp_path, "out", str(tmp_path / name))


# --- parts of workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1, 20, 29, 1000, 1 << 22])
def test_workers_read_every_byte_of_local_lines_once(
    inputs: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines may be longer than a part, and begin in another."""
    monkeypatch.setattr(text_inputs, "BATCH_BYTES", part_bytes)
    parts = list(divide_among_workers(whole_ranges(list_sources([str(inputs / "in.jsonl")])), InputFormat()))
    assert all(isinstance(part, SourceRange) for part in parts) and len(parts) == -(-len(LINES) // part_bytes)
    batches = [batch for part in parts for batch in read_batches([part], InputFormat())]  # type: ignore[list-item]
    assert b"".join(batch.records for batch in batches) == LINES  # type: ignore[misc]
    assert sum(batch.stored_bytes for batch in batches) == len(LINES)


def test_what_cannot_be_cut_is_read_for_the_workers(inputs: Path) -> None:
    sources = list_sources([str(inputs / name) for name in ("in.jsonl.gz", "in.parquet")])
    parts = list(divide_among_workers(whole_ranges(sources), InputFormat()))
    assert len(parts) == 2 and not any(isinstance(part, SourceRange) for part in parts)


# --- partitions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 300])
def test_partitions_hold_every_document_once_and_in_order(inputs: Path, count: int) -> None:
    sources = list_sources([str(inputs / "in.jsonl"), str(inputs / "in.jsonl.gz"), str(inputs / "in.jsonl")])
    parts = cut_in_partitions(sources, count, "file")
    assert len(parts) == count
    found, places = [], []
    for batch in (batch for part in parts for batch in read_batches(part, InputFormat())):
        for number, texts in parse_documents(batch, ("text",), "--json-keys"):
            found.append(texts[0])
            places.append(place_of(batch, number))
    assert found == 3 * TEXTS
    names = [inputs / name for name in ("in.jsonl", "in.jsonl.gz", "in.jsonl")]
    assert places == [f"{name}, line {number + 1}" for name in names for number in range(len(TEXTS))]


def test_partitions_in_turn_and_together_give_the_bytes_of_one_run(inputs: Path) -> None:
    names = [str(inputs / "in.jsonl"), str(inputs / "folder")]
    whole = run(inputs, "whole", *names)
    for number in (2, 0, 1):
        assert not (inputs / "turn_text_document.idx").exists()
        counts = run(inputs, "turn", *names, partitions=3, partition=number)
    together = run(inputs, "together", *names, partitions=2, workers=2)
    for other in (counts, together):
        assert (other.documents, other.tokens, other.text_bytes) == (whole.documents, whole.tokens, whole.text_bytes)
    for kind in (".bin", ".idx"):
        expected = md5(str(inputs / f"whole_text_document{kind}"))
        assert {md5(str(inputs / f"{name}_text_document{kind}")) for name in ("turn", "together")} == {expected}
    assert sorted(os.listdir(inputs / "turn_partitions")) == ["merged.json"]


def test_a_run_that_starts_again_does_what_is_missing(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(inputs / "in.jsonl")
    run(inputs, "out", name, partitions=3, partition=1)
    part = inputs / "out_partitions" / "1-of-3_text_document.bin"
    before = part.stat().st_mtime_ns
    run(inputs, "out", name, partitions=3, partition=1)
    assert part.stat().st_mtime_ns == before
    assert "Partition 1 is complete already" in capsys.readouterr().err
    run(inputs, "out", name, partitions=3)
    assert documents_of(inputs, "out") == TEXTS
    run(inputs, "out", name, partitions=3)
    assert "is complete already" in capsys.readouterr().err


def test_two_nodes_that_end_last_merge_once(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other waits and tells the same; by a lock that needs no flock, which many cluster file systems lack."""
    merges = []

    def slowly(prefixes: list[str], output: str) -> tuple[int, int]:
        merges.append(output)
        other.start()
        time.sleep(0.5)
        return merge_datasets(prefixes, output)

    def run_other() -> None:
        found.append(run(inputs, "out", name, partitions=2, partition=0))

    name, found = str(inputs / "in.jsonl"), []
    other = threading.Thread(target=run_other)
    monkeypatch.setattr("megatron.commands.preprocessing.partitions.merge_datasets", slowly)
    run(inputs, "out", name, partitions=2, partition=0)
    found.append(run(inputs, "out", name, partitions=2, partition=1))
    other.join()
    assert len(merges) == 1 and [counts.documents for counts in found] == 2 * [len(TEXTS)]
    assert documents_of(inputs, "out") == TEXTS


def test_no_more_partitions_work_at_a_time_than_there_are_workers(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    started: list[SpawnProcess] = []
    start = SpawnProcess.start

    def counting(process: SpawnProcess) -> None:
        start(process)
        # Only these: other tests may have left children that are still alive.
        started.append(process)
        alive.append(sum(child.is_alive() for child in started))

    monkeypatch.setattr(SpawnProcess, "start", counting)
    name = str(inputs / "in.jsonl")
    run(inputs, "together", name, partitions=4, workers=2)
    assert len(alive) == 4 and max(alive) == 2
    assert documents_of(inputs, "together") == TEXTS


def test_partitions_of_other_inputs_or_flags_are_refused(inputs: Path) -> None:
    name = str(inputs / "in.jsonl")
    run(inputs, "out", name, partitions=3, partition=1)
    with pytest.raises(
        DataError, match="was made with other skip_bad_documents: set the flags as they were, or remove"
    ):
        run(inputs, "out", name, partitions=3, partition=1, skip_bad_documents=True)
    with open(name, "ab") as file:
        file.write(b'{"text": "1"}\n')
    with pytest.raises(DataError, match="was made with other inputs"):
        run(inputs, "out", name, partitions=3, partition=1)
    with pytest.raises(ConfigError, match=r"--partition 3 is none of 0\.\.2"):
        run(inputs, "out", name, partitions=3, partition=3)


def test_partitions_of_another_end_of_documents_are_refused(inputs: Path) -> None:
    """A tokenizer.json stays the same when the file beside it names another token."""
    from tokenizers import Tokenizer, models

    def run_part(number: int, end: str) -> None:
        (inputs / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        shared_tokenizer.cache_clear()
        config = TokenizerConfig("HuggingFaceTokenizer", str(inputs / "tokenizer.json"))
        name, out = str(inputs / "in.jsonl"), str(inputs / "out")
        preprocess(PreprocessConfig((name,), out, config, append_eod=True, partitions=2, partition=number))

    Tokenizer(models.WordLevel({"<a>": 0, "<b>": 1, "?": 2}, unk_token="?")).save(str(inputs / "tokenizer.json"))
    run_part(0, "<a>")
    with pytest.raises(DataError, match="was made with other end_of_document: set the flags as they were, or remove"):
        run_part(0, "<b>")


def test_a_bad_document_ends_all_partitions(inputs: Path) -> None:
    (inputs / "bad.jsonl").write_bytes(LINES + b"{\n")
    with pytest.raises(DataError, match=f"bad.jsonl, line {len(TEXTS) + 1} is not valid JSON"):
        run(inputs, "out", str(inputs / "bad.jsonl"), partitions=2)
    assert not (inputs / "out_text_document.idx").exists()
    assert not list((inputs / "out_partitions").glob("*.incomplete"))


# --- merging and looking -------------------------------------------------------------------------------------


def test_merging_keeps_sequences_and_documents(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a", [[1, 2], [3]])
    write(tmp_path / "in" / "b", [])
    write(tmp_path / "in" / "c", [[4], [5, 6, 7]])
    with open(tmp_path / "in" / "a.bin", "ab") as file:
        file.write(b"left over")
    prefixes = find_prefixes((str(tmp_path / "in"),))
    assert merge_datasets(prefixes, str(tmp_path / "out")) == (4, 7)
    expected = write(tmp_path / "expected", [[1, 2], [3], [4], [5, 6, 7]])
    for kind in (".bin", ".idx"):
        assert md5(str(tmp_path / f"out{kind}")) == md5(expected + kind)
    write(tmp_path / "large", [[1]], vocab_size=100_000)
    with pytest.raises(DataError, match=r"stores tokens as uint16, .* as int32: datasets of different tokenizers"):
        merge_datasets([prefixes[0], str(tmp_path / "large")], str(tmp_path / "both"))
    with pytest.raises(DataError, match="is also an input: choose another --output-prefix"):
        merge_datasets(prefixes, prefixes[0])


def test_what_is_in_a_dataset(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4], [5, 6, 998]])
    config = InspectConfig(
        prefix, plot=tmp_path / "plot.png", documents=(0, 2), max_tokens=2, check=True, tokenizer=NULL
    )
    text = "\n".join(inspect(config))
    for part in ("documents  3", "tokens     7 (uint16, 14 bytes)", "document 2: 3 tokens, the first 2", "5 6", "yes:"):
        assert part in text
    assert (tmp_path / "plot.png").stat().st_size > 0
    assert "           2 .. 3                       2 ####" in "\n".join(inspect(InspectConfig(prefix)))
    small = TokenizerConfig("NullTokenizer", vocab_size=900)
    with pytest.raises(DataError, match=r"document 2 holds token id 998, which is not in the vocabulary of 901 ids"):
        list(inspect(InspectConfig(prefix, check=True, tokenizer=small)))
    with pytest.raises(ConfigError, match=r"--documents 3 is none of 0\.\.2"):
        list(inspect(InspectConfig(prefix, documents=(3,))))
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(34 + 3 * 4 + 8)
        file.write(b"\x00" * 8)
    with pytest.raises(DataError, match="sequence 1 does not begin where the one before ends: write the data again"):
        list(inspect(InspectConfig(prefix, check=True)))


def test_the_digests_of_a_dataset_are_shown_compared_and_made(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4], [5, 6, 998]])
    checked = InspectConfig(prefix, check=True)
    assert f"digests    fingerprint {corpus_fingerprint(prefix)}" in "\n".join(inspect(checked))
    assert "digests    match every byte of both files" in list(inspect(checked))
    for kind in (".bin", ".idx"):
        good = Path(prefix + kind).read_bytes()
        Path(prefix + kind).write_bytes(good[:20] + bytes([good[20] ^ 1]) + good[21:] if kind == ".idx" else b"x" * 14)
        with pytest.raises(DataError, match=r"a\.bin is damaged" if kind == ".bin" else r"a\.idx"):
            list(inspect(checked))
        Path(prefix + kind).write_bytes(good)
    Path(f"{prefix}.bin").write_bytes(b"\1\0" * 7)
    list(inspect(InspectConfig(prefix, write_digests=True)))
    assert "digests    match every byte of both files" in list(inspect(checked))
    os.remove(f"{prefix}.digests.json")
    assert "digests    none" in "\n".join(inspect(checked))
    with pytest.raises(ConfigError, match="make the digests where the files are local"):
        list(inspect(InspectConfig(f"file://{prefix}", write_digests=True)))
