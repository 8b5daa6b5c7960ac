"""tools/preprocess_data.py as people run it: same bytes with any number of workers, or one sentence."""

import gzip
import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from tests.data.corpora import CORPUS_A, golden_documents, md5

pytestmark = pytest.mark.processes

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "999"]


def preprocess(directory: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Run the tool in ``directory``, which is not the repository."""
    command = [sys.executable, str(TOOL), *flags]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)


def write_lines(path: Path, documents: list[Any]) -> None:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def as_text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def test_golden_corpus_comes_out_byte_for_byte(tmp_path: Path) -> None:
    documents = [{"text": as_text(document[:-1])} for document in golden_documents(CORPUS_A)[:-1]]
    write_lines(tmp_path / "a.jsonl", documents)
    done = preprocess(tmp_path, "--input", "a.jsonl", "--output-prefix", "out/a", "--append-eod", *NULL)
    assert done.returncode == 0, done.stderr
    assert "9 documents, 49 tokens, 0 empty documents skipped" in done.stdout
    dataset = IndexedDataset(str(tmp_path / "out" / "a_text_document"))
    assert [dataset.get(i).tolist() for i in range(9)] == golden_documents(CORPUS_A)[:-1]
    again = preprocess(tmp_path, "--input", "a.jsonl", "--output-prefix", "out/a", "--append-eod", *NULL)
    assert "WARNING: overwriting" in again.stderr


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
        done = preprocess(tmp_path, *inputs, *prefix, *NULL)
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


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_line_is_one_sentence_and_leaves_nothing(tmp_path: Path, workers: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n\n{"text": "1"\n')
    done = preprocess(tmp_path, "--input", "in.jsonl", "--output-prefix", "out", "--workers", workers, *NULL)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("ERROR: ") and "in.jsonl, line 3 is not valid JSON" in done.stderr
    assert done.stderr.count("\n") == 1, "one line, no traceback"
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "1 2 3"}] * 2000)
    flags = ["--input", "in.jsonl", "--output-prefix", "out", "--log-interval", "9999", *NULL]
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", sys.executable, str(TOOL), *flags]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("ERROR: out_text_document.bin and .idx cannot be written")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_ended_run_leaves_no_output_and_no_worker(tmp_path: Path, sign: signal.Signals) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "1 2 3"}] * 300_000)
    flags = ["--input", "in.jsonl", "--output-prefix", "out", "--workers", "2", *NULL]
    process = subprocess.Popen([sys.executable, str(TOOL), *flags], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "documents" in process.stderr.readline()
    process.send_signal(sign)
    process.wait(timeout=120)
    ready, _, _ = select.select([process.stderr], [], [], 60)
    assert ready and not process.stderr.read().count("Traceback")  # it ends once no worker holds the pipe any more
    left = [name for name in os.listdir(tmp_path) if sign == signal.SIGTERM or not name.endswith(".incomplete")]
    assert left == ["in.jsonl"]
