"""Files of the PyPI package megatron-core are read here and ours there.

The package is called ``megatron``, too, so it is installed into a directory of its own, from which only child processes
import.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_order import blend_targets, normalize
from tests.data.corpora import md5, write

PACKAGE = "megatron-core==0.16.1"
pytestmark = pytest.mark.slow(reason="installs megatron-core, and imports it in other processes")

LENGTHS = np.random.default_rng(7).integers(1, 60, size=200).tolist()
DOCUMENTS = [np.random.default_rng(place).integers(0, 999, size=n).tolist() for place, n in enumerate(LENGTHS)]

WRITE = """
import json, numpy, sys, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
builder = IndexedDatasetBuilder("theirs.bin", dtype=numpy.uint16)
for document in json.load(open("documents.json")):
    builder.add_document(torch.tensor(document), [len(document)])
builder.finalize("theirs.idx")
"""

READ = """
import json
from megatron.core.datasets.indexed_dataset import IndexedDataset
dataset = IndexedDataset("ours")
json.dump([dataset[i].tolist() for i in range(len(dataset))], open("read.json", "w"))
"""

ORDER = """
import json, sys, torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

class Tokenizer:
    vocab_size, eod, pad, unique_identifiers = 1000, 999, 1000, {"class": "Tokenizer"}

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
paths = {"train": (["ours", "theirs"], [0.7, 0.3]), "valid": (["ours"], None), "test": None}
for name, source in {
    "single": {"blend": (["ours"], None), "split": "8,1,1"},
    "blend": {"blend": (["ours", "theirs"], [0.7, 0.3]), "split": "8,1,1"},
    "splits": {"blend_per_split": [paths["train"], paths["valid"], paths["test"]]},
}.items():
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=32, tokenizer=Tokenizer(), path_to_cache="their_cache",
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, **source,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [400, 20, 0], lambda: True, config).build()
    samples = [[d[i]["tokens"].tolist() for i in range(n)] for d, n in zip(built[:2], (400, 20))]
    json.dump(samples, open(name + ".json", "w"))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with megatron-core; what it needs is in this environment."""
    target = tmp_path_factory.mktemp("megatron_core")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run([*pip, "--target", str(target), PACKAGE], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return target


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with our corpus and the documents."""
    monkeypatch.chdir(tmp_path)
    write("ours", DOCUMENTS)
    Path("documents.json").write_text(json.dumps(DOCUMENTS))
    return tmp_path


def run_there(package: Path, script: str, *arguments: str) -> None:
    """Run ``script`` in a process that finds megatron-core's ``megatron``, and not this repository's."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]


def test_both_write_the_same_bytes_and_read_each_other(package: Path) -> None:
    run_there(package, WRITE)
    run_there(package, READ)
    assert [md5(f"theirs{kind}") for kind in (".bin", ".idx")] == [md5(f"ours{kind}") for kind in (".bin", ".idx")]
    theirs = IndexedDataset("theirs")
    assert [theirs.get(i).tolist() for i in range(len(theirs))] == DOCUMENTS
    assert json.loads(Path("read.json").read_text()) == DOCUMENTS


def samples(dataset: GPTDataset | BlendedDataset, count: int) -> list[list[int]]:
    return [dataset[index]["tokens"].tolist() for index in range(count)]


def test_orders_are_the_same_over_epochs_blends_and_splits(directory: Path, package: Path) -> None:
    run_there(package, WRITE)
    run_there(package, ORDER, str(directory / "rendezvous"))
    corpora = [IndexedDataset("ours"), IndexedDataset("theirs")]

    def single(settings: SampleSettings, split: int, count: int) -> list[list[int]]:
        return samples(GPTDataset(corpora[0], split, count, settings), count)

    def blend(settings: SampleSettings, split: int, count: int) -> list[list[int]]:
        weights = normalize([0.7, 0.3])
        targets, built = blend_targets(weights, count, 0.005)
        children = [GPTDataset(corpus, split, n, settings) for corpus, n in zip(corpora, built, strict=True)]
        return samples(BlendedDataset(children, weights, sum(targets), split), count)

    shared, apart = SampleSettings(32, 1234, "8,1,1"), SampleSettings(32, 1234, None)
    found = {name: json.loads(Path(f"{name}.json").read_text()) for name in ("single", "blend", "splits")}
    assert found["single"] == [single(shared, 0, 400), single(shared, 1, 20)]
    assert found["blend"] == [blend(shared, 0, 400), blend(shared, 1, 20)]
    assert found["splits"] == [blend(apart, 0, 400), single(apart, 1, 20)]
