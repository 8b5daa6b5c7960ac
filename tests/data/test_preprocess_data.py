"""tools/preprocess_data.py: the bytes of one plain run whatever the inputs, workers and partitions; or one sentence."""

import gzip
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.commands.datasets import find_prefixes
from megatron.commands.preprocess_data import PreprocessConfig, preprocess
from megatron.commands.preprocess_work import Counts, EncodedKey, EncodeTask, Work, encode_batch
from megatron.commands.tool import HeldSignals
from megatron.config.data import TokenizerConfig
from megatron.data.corpus_writer import IndexedDatasetWriter, merge_datasets
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.storage import find_files, open_stored
from megatron.data.text_inputs import (
    Batch,
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
from megatron.data.tokenizers import NullTokenizer, shared_tokenizer
from megatron.errors import ConfigError, DataError, UserError
from tests.data.corpora import md5, write
from tests.data.texts import LINES, NULL, TEXTS, documents_of
from tests.end_to_end.run_process import run_python

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


PLAIN = InputFormat()


def texts_of(ranges: Iterable[SourceRange], form: InputFormat = PLAIN) -> list[str]:
    """The documents of ranges as their readers find them."""
    parsed = (parse_documents(batch, ("text",), "--json-keys") for batch in read_batches(ranges, form))
    return [texts[0] for documents in parsed for _, texts in documents]


@pytest.mark.parametrize("case", FORMATS)
def test_every_format_gives_the_same_documents(inputs: Path, case: str) -> None:
    name, flags = FORMATS[case]
    assert run(inputs, "out", str(inputs / name), **flags).documents == len(TEXTS)
    assert documents_of(inputs, "out") == TEXTS
    small = InputFormat(separation=flags.get("text_documents", "file"), batch_bytes=300)
    ranges = tuple(whole_ranges(list_sources([str(inputs / name)])))
    assert [text.replace("\n", " ") for text in texts_of(ranges, small)] == TEXTS
    work = Work(ranges, EncodeTask(NULL, small, True, False), str(inputs / "batches"), 1000, 1)
    assert work.run(lambda _: None).documents == len(TEXTS)
    assert documents_of(inputs, "batches") == TEXTS


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


BAD_INPUTS: list[tuple[str, Any, str]] = [
    ("a.jsonl", b'{"text": "1"', "line 3 is not valid JSON"),
    ("a.jsonl", b"[1]", "line 3 is not a JSON object"),
    ("a.jsonl", b'{"content": "1"}', "line 3 has no key 'text': name the right key with --json-keys"),
    ("a.jsonl", b'{"text": 1}', "line 3 has no text under the key 'text'"),
    ("a.jsonl", b'{"text": "\\ud800"}', "line 3 holds half of a surrogate pair"),
    ("a.jsonl", b'{"text": "1000"}', "line 3 cannot be tokenized: Token id 1000 in the text is outside 0..999"),
    ("a.txt", b"\xff", r"document 1 is not valid UTF-8 .*--skip-bad-documents"),
    ("lines.txt", b"\xff", "line 3 is not valid UTF-8"),
    ("a.parquet", ["1", None], "row 2 has no text under the key 'text'"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), BAD_INPUTS)
def test_a_bad_document_is_named_and_leaves_nothing(tmp_path: Path, name: str, content: Any, sentence: str) -> None:
    path = tmp_path / name
    if isinstance(content, list):
        write_parquet(path, content)
    else:
        first = b'{"text": "1"}\n\n' if name == "a.jsonl" else b"1\n\n"
        path.write_bytes(first + content + b"\n")
    with pytest.raises(DataError, match=f"{path}, {sentence}"):
        run(tmp_path, "out", str(path), text_documents="line" if name == "lines.txt" else "file")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("nowhere.jsonl", {}, "nowhere.jsonl does not exist"),
        ("empty.jsonl", {}, "have no document with text"),
        ("short.jsonl.gz", {}, "short.jsonl.gz is not a complete gzip file"),
        ("short.jsonl.zst", {}, "short.jsonl.zst is not a complete zstd file"),
        ("short.parquet", {}, "short.parquet is not a complete parquet file"),
        ("empty.jsonl", {"output_prefix": "empty.jsonl/out"}, "cannot be written"),
        ("empty.jsonl", {"tokenizer": TokenizerConfig()}, "A tokenizer is required: set --tokenizer-type"),
        ("empty.jsonl", {"workers": 0}, "--workers and --log-interval must be at least 1"),
        ("empty.jsonl", {"json_keys": ("a", "a")}, "names a key twice"),
    ],
)
def test_bad_flags_and_files_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flags: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text('{"text": ""}\n')
    Path("short.jsonl.gz").write_bytes(gzip.compress(LINES)[:-20])
    Path("short.jsonl.zst").write_bytes(zstd(LINES)[:-9])
    write_parquet(Path("short.parquet"), ["1"])
    os.truncate("short.parquet", os.path.getsize("short.parquet") - 9)
    before = sorted(os.listdir())
    with pytest.raises(UserError, match=sentence):
        preprocess(PreprocessConfig((name,), **{"output_prefix": "out", "tokenizer": NULL, **flags}))
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("name", "separation", "sentence"),
    [
        ("a.jsonl", "file", "has a line of more than"),
        ("a.txt", "file", "too long for one document"),
        ("a.txt", "paragraph", "has no blank line"),
    ],
)
def test_a_document_without_end_is_refused(tmp_path: Path, name: str, separation: Any, sentence: str) -> None:
    (tmp_path / name).write_text("1 " * 400 + ("\n1 " * 400 if separation == "paragraph" else "1 " * 400))
    form = InputFormat(separation=separation, batch_bytes=100, max_document_bytes=1000)
    with pytest.raises(DataError, match=sentence):
        texts_of(whole_ranges(list_sources([str(tmp_path / name)])), form)


# --- tokens --------------------------------------------------------------------------------------------------


class UncheckedTokenizer(NullTokenizer):
    """Returns ids outside of the vocabulary, too, as a defective library might."""

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def encoded(text: str, vocab_size: int, append_eod: bool) -> EncodedKey:
    batch = Batch("text.txt", "line", 1, 0, len(text), text.encode())
    (key,) = encode_batch(
        batch, EncodeTask(NULL, InputFormat(), append_eod, False), UncheckedTokenizer(vocab_size)
    ).keys
    return key


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, np.uint16), (100_000, np.int32)])
@pytest.mark.parametrize("append_eod", [True, False])
def test_tokens_have_the_dtype_of_the_file(vocab_size: int, dtype: type, append_eod: bool) -> None:
    key = encoded("1 2 3\n\n4\n   \n5 6\n", vocab_size, append_eod)
    end = [vocab_size] if append_eod else []
    assert key.tokens.tolist() == [1, 2, 3, *end, 4, *end, 5, 6, *end]
    assert key.tokens.dtype == dtype
    assert key.lengths.tolist() == [length + len(end) for length in (3, 1, 2)]


@pytest.mark.parametrize("bad", [65_536 + 7, -1])
def test_ids_outside_of_the_vocabulary_reach_the_writer_unchanged(tmp_path: Path, bad: int) -> None:
    key = encoded(f"1 {bad} 3\n", 100, True)
    with pytest.raises(DataError, match=str(bad)), IndexedDatasetWriter(str(tmp_path / "out"), 100) as writer:
        writer.add_documents(key.tokens, key.lengths)
    assert not list(tmp_path.iterdir())


# --- parts of workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1, 20, 29, 1000, 1 << 22])
def test_workers_read_every_byte_of_local_lines_once(inputs: Path, part_bytes: int) -> None:
    """Lines may be longer than a part, and begin in another."""
    form = InputFormat(batch_bytes=part_bytes)
    parts = list(divide_among_workers(whole_ranges(list_sources([str(inputs / "in.jsonl")])), form))
    ranges = [part for part in parts if isinstance(part, SourceRange)]
    assert len(parts) == len(ranges) == -(-len(LINES) // part_bytes)
    batches = [batch for part in ranges for batch in read_batches([part], form)]
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
    monkeypatch.setattr("megatron.commands.preprocess_data.merge_datasets", slowly)
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
    with pytest.raises(DataError, match="with other skip_bad_documents: set the flags as they were, or remove"):
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
        assert piece.start > 0 and 50 < len(texts_of([piece])) < 80
    finally:
        memory.rm("/corpus", recursive=True)


def test_a_url_without_its_package_or_file() -> None:
    with pytest.raises(DataError, match=r"gs://bucket/a.jsonl needs a package .*: pip install gcsfs\."):
        find_files("gs://bucket/a.jsonl")
    with pytest.raises(DataError, match=r"never://a cannot be opened"):
        open_stored("never://a")
    with pytest.raises(DataError, match=r"memory://nothing does not exist .* or is empty"):
        list_sources(["memory://nothing"])


# --- the tool as people run it -------------------------------------------------------------------------------

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
NULL_FLAGS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "999"]


def write_lines(path: Path, documents: list[Any]) -> None:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def as_text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.fixture
def corpus(tmp_path: Path) -> list[dict[str, str]]:
    """Documents of two keys in a plain and a gzipped file."""
    generator = random.Random(0)
    documents = []
    for _ in range(5000):
        size = generator.choice([0, 1, 20, 200])
        documents.append({key: as_text(generator.choices(range(999), k=size)) for key in ("text", "title")})
    write_lines(tmp_path / "one.jsonl", documents[:2000])
    with gzip.open(tmp_path / "two.jsonl.gz", "wt") as file:
        file.write("\n\n".join(json.dumps(document) for document in documents[2000:]))  # blank lines; no last newline
    return documents


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, corpus: list[dict[str, str]]) -> None:
    inputs = ["--input", "one.jsonl", "two.jsonl.gz", "--json-keys", "text", "title", "--append_eod"]
    for workers in ("1", "2"):
        prefix = ["--output-prefix", f"w{workers}", "--workers", workers]
        done = run_python(str(TOOL), *inputs, *prefix, *NULL_FLAGS, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "5,000 documents," in done.stdout
        assert "5,000 documents," in done.stderr, "progress is reported"
    for key in ("text", "title"):
        for kind in (".bin", ".idx", ".digests.json"):
            one, two = (md5(str(tmp_path / f"w{workers}_{key}_document{kind}")) for workers in (1, 2))
            assert one == two
        dataset = IndexedDataset(str(tmp_path / f"w2_{key}_document"))
        expected = [[*map(int, document[key].split()), 999] for document in corpus if document[key]]
        assert [dataset.get(i).tolist() for i in range(len(dataset))] == expected
    assert len(os.listdir(tmp_path)) == 2 + 12


@pytest.mark.parametrize(
    ("workers", "last_line", "sentence"),
    [
        ("1", '{"text": "1"\n', "ERROR: in.jsonl, line 2001 is not valid JSON"),
        ("2", '{"text": "1"\n', "ERROR: in.jsonl, line 2001 is not valid JSON"),
        ("1", "", "ERROR: out_text_document.bin and .idx cannot be written"),
    ],
)
def test_a_bad_line_or_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, workers: str, last_line: str, sentence: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1 2 3"}\n' * 2000 + last_line)
    flags = ["--input", "in.jsonl", "--output-prefix", "out", "--log-interval", "9999", "--workers", workers]
    blocks = "unlimited" if last_line else "4"  # of a file
    limited = ["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "bash", sys.executable, str(TOOL), *flags, *NULL_FLAGS]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1, "one line, no traceback"
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_no_lock_is_held(tmp_path: Path, sign: signal.Signals) -> None:
    # An exception in the middle of a lock, a join or a finalizer of the pool made a terminated run hang, or was lost.
    write_lines(tmp_path / "in.jsonl", [{"text": "1 2 3"}] * 1000)
    form = InputFormat(batch_bytes=300)
    reports = []

    def report(_: Counts) -> None:
        os.kill(os.getpid(), sign)
        reports.append("not interrupted")

    before = signal.signal(sign, lambda *_: sys.exit(143))
    try:
        ranges = tuple(whole_ranges(list_sources([str(tmp_path / "in.jsonl")])))
        work = Work(ranges, EncodeTask(NULL, form, True, False), str(tmp_path / "out"), 1000, 2)
        with pytest.raises(SystemExit, match="143"):
            work.run(report)
        assert reports == ["not interrupted"] and os.listdir(tmp_path) == ["in.jsonl"]
        with pytest.raises(SystemExit), HeldSignals():
            os.kill(os.getpid(), sign)
            reports.append("the end of the context")
        assert reports[1:] == ["the end of the context"]
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), sign)
    finally:
        signal.signal(sign, before)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_ended_run_leaves_no_output_and_no_worker(tmp_path: Path, sign: signal.Signals) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "1 2 3 " * 50}] * 100_000)  # eight batches
    flags = ["--input", "in.jsonl", "--output-prefix", "out", "--workers", "2", *NULL_FLAGS]
    process = subprocess.Popen([sys.executable, str(TOOL), *flags], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "documents" in process.stderr.readline()
    process.send_signal(sign)
    process.wait(timeout=120)
    ready, _, _ = select.select([process.stderr], [], [], 60)
    assert ready and not process.stderr.read().count("Traceback")  # it ends once no worker holds the pipe any more
    left = [name for name in os.listdir(tmp_path) if sign == signal.SIGTERM or not name.endswith(".incomplete")]
    assert left == ["in.jsonl"]
