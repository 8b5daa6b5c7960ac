"""What a past version of the code saved, this one loads, and trains on as that version did."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.checkpointing import load_checkpoint
from megatron.checkpoint.manifest import read_checkpoint
from megatron.checkpoint.schema import FORMAT_VERSION
from tests.checkpoint.frozen_checkpoints import (
    CASES,
    FROZEN,
    LENGTH,
    SAVED_AT,
    computed_iterations,
    flags_of_case,
    start_of,
    this_machine,
)
from tests.end_to_end.run_process import (
    Record,
    assert_same_tensors,
    bytes_under,
    call_training,
    checkpoint_of,
    fork_training,
)

pytestmark = pytest.mark.processes

KEPT = sorted(FROZEN.glob("v*/*"))
FIRST_IN_SHARED_MEMORY = 9
"""Ranks of earlier format versions exchanged over gloo."""


def version_of(path: Path) -> int:
    """The format version of a frozen checkpoint."""
    return int(path.parent.name.removeprefix("v"))


VERSIONS = [f"v{version}" for version in sorted({version_of(path) for path in KEPT})]


def identity(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


def run_in_ci(path: Path) -> bool:
    """Whether the run goes on in CI, too: from the first format of each case."""
    return path.parent.name == next(version for version in VERSIONS if (FROZEN / version / path.name).exists())


@pytest.fixture(params=KEPT, ids=identity)
def kept(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of one frozen checkpoint, which must not change."""
    folder: Path = request.param
    before = bytes_under(folder)
    yield folder
    assert bytes_under(folder) == before


def test_there_is_one_of_every_case_and_of_the_current_format() -> None:
    """Whoever raises the format version freezes checkpoints of it: python -m tests.checkpoint.frozen_checkpoints."""
    assert {folder.name for folder in (FROZEN / f"v{FORMAT_VERSION}").iterdir()} == set(CASES)
    assert all((checkpoint_of(folder, start_of(folder.name)) / "manifest.json").exists() for folder in KEPT)


def expected(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return document


def run_from(start: Path, name: str, directory: Path, **changes: Any) -> Path:
    """Copy the checkpoint ``start`` into ``directory`` and go on from it; the metrics."""
    shutil.copytree(start, directory / "save" / start.name)
    flags = flags_of_case(CASES[name], directory, **changes)
    processes = CASES[name].processes
    (call_training(flags) if processes == 1 else fork_training(flags, processes)).succeeded()
    return directory / "metrics.jsonl"


def assert_like_the_past(records: list[Record], folder: Path) -> None:
    """To the bit on the same kind of processor and libraries, else within rounding of the run's format."""
    was = expected(folder)
    if was["machine"] == this_machine():
        assert records == was["records"]
    tolerance = CASES[folder.name].tolerance
    assert len(records) == len(was["records"])
    for record, past in zip(records, was["records"]):
        for key, value in past.items():
            if key in ("lm_loss", "grad_norm") and value is not None:
                assert math.isclose(record[key], value, rel_tol=tolerance), (key, record, past)
            else:
                assert record[key] == value, (key, record, past)


def test_every_number_is_loaded(kept: Path) -> None:
    """Each global tensor, bit for bit, from the entries that other code reads: their keys are ``name@offset``."""
    iteration = start_of(kept.name)
    directory = checkpoint_of(kept, iteration)
    shapes = json.loads((directory / "manifest.json").read_text())["manifest"]["tensors"]
    entries = {key: entry for path in directory.glob("*.safetensors") for key, entry in load_file(path).items()}
    dtypes = {key.rpartition("@")[0]: entry.dtype for key, entry in entries.items()}
    loaded = {name: torch.zeros(record["shape"], dtype=dtypes[name]) for name, record in shapes.items()}
    load_checkpoint(kept, iteration, loaded)
    unseen = {name: tensor.numel() for name, tensor in loaded.items()}
    for key, entry in entries.items():
        name, _, offset = key.rpartition("@")
        place = tuple(slice(int(at), int(at) + size) for at, size in zip(offset.split(","), entry.shape))
        assert loaded[name][place].equal(entry), key
        unseen[name] -= entry.numel()
    assert not any(unseen.values()), unseen
    assert read_checkpoint(kept, iteration).state["iteration"] == iteration


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(path, marks=() if run_in_ci(path) else pytest.mark.slow(reason="up to three runs of four ranks"))
        for path in KEPT
    ],
    ids=identity,
    indirect=True,
)
def test_the_run_goes_on_as_it_did(kept: Path, tmp_path: Path) -> None:
    """With the metrics that the past version had, and to the bit as from a checkpoint that this version writes."""
    iteration = start_of(kept.name)
    frozen = checkpoint_of(kept, iteration)
    # Sums of four ranks have other bits over gloo than in shared memory.
    backend = {} if version_of(kept) >= FIRST_IN_SHARED_MEMORY else {"distributed_backend": "gloo"}
    metrics = run_from(frozen, kept.name, tmp_path / "old", save_interval=1, **backend, **CASES[kept.name].first_flags)
    assert_like_the_past(computed_iterations(metrics), kept)
    last = LENGTH if iteration == SAVED_AT else LENGTH - SAVED_AT
    # What this version wrote one iteration later, and gone on from there.
    again = checkpoint_of(tmp_path / "old" / "save", iteration + 1)
    rest = run_from(again, kept.name, tmp_path / "second", **backend)
    assert computed_iterations(rest) == computed_iterations(metrics)[1:]
    assert_same_tensors(
        checkpoint_of(tmp_path / "second" / "save", last), checkpoint_of(tmp_path / "old" / "save", last)
    )
