"""--record-tensors: one recording of a step whatever the layout, its file, and nothing that remains when it is off."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import megatron_llama as ml
from megatron.comparison.bisection import rows
from megatron.comparison.experiment import Request, read_steps, recorded
from megatron.errors import DataError
from megatron.features.record_tensors import listener
from megatron.features.record_tensors.recording import (
    FORMAT,
    Recording,
    TensorName,
    fingerprint,
    load_recording,
    save_recording,
    whole,
)
from tests.comparison.faults import CP, EP, EXPERTS, FSDP, RECOMPUTE, TP_SP, ZERO_BUBBLE
from tests.comparison.in_process import MODEL, InProcess, Ranks, side

LAYOUTS = {
    "": (TP_SP, f"{CP} --micro-batch-size 1", ZERO_BUBBLE, FSDP, RECOMPUTE),
    EXPERTS: (EP, f"{EXPERTS} {TP_SP}"),
}
"""The flags of one process, and the layouts that compute the same."""


def steps_of(flags: str, ranks: dict[int, Ranks], directory: Path) -> list[Recording]:
    config, world_size = side(flags)
    config = recorded(config, directory / "records", Request(), fp64=True)
    InProcess(ranks)("A", config, world_size, Request(), directory)
    return read_steps(directory / "records")


@pytest.mark.parametrize("flags", LAYOUTS, ids=("dense", "experts"))
def test_layouts_have_the_same_recordings(flags: str, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    wanted = steps_of(flags, ranks, tmp_path / "one")
    words = {name.name.rpartition(".")[2] for name in wanted[0].tensors}
    assert {"tokens", "rotated_key", "core_attention", "loss", "router" if flags else "gate"} <= words
    assert {name.direction for name in wanted[0].tensors} >= {"input", "forward", "gradient", "weight", "update"}
    for number, layout in enumerate(LAYOUTS[flags]):
        found = steps_of(layout, ranks, tmp_path / str(number))
        for one, other in zip(wanted, found):
            assert one.tensors.keys() == other.tensors.keys(), layout
        worst = max(rows(wanted, found), key=lambda row: row.distance)
        assert worst.distance < 1e-11, (layout, worst)


def test_no_hook_remains_outside_of_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without the flag nor before and after the iteration that it names is anything called or kept."""
    calls: list[str] = []

    def noted(*inputs: Any) -> Any:
        calls.append("")
        return fingerprint(*inputs)

    monkeypatch.setattr(listener, "fingerprint", noted)

    def trained(flags: str) -> list[tuple[int, float]]:
        """The fingerprints and the loss of each of three steps."""
        found = []
        with ml.Run.from_flags(f"{MODEL} --fp64 {flags}") as run:
            executor = run._trainer.module.executor
            losses = executor.token_losses
            for step in run.steps(3):
                found.append((len(calls), step.loss))
                calls.clear()
                modules = [module for chunk in run.chunks for module in chunk.modules()]
                assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
                assert executor.recorder is None and executor.token_losses == losses
                assert run._trainer.data.train.kept is None
        return found

    off = trained("")
    on = trained(f"--record-tensors {tmp_path} --record-tensors-iterations 2")
    assert [count for count, _ in off] == [0, 0, 0]
    assert [count > 0 for count, _ in on] == [False, True, False]
    assert [loss for _, loss in on] == [loss for _, loss in off]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000002.batch.safetensors", "iter_0000002.safetensors",
    ]  # fmt: skip


def a_recording() -> Recording:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(70, 33, generator=generator)
    gain = matrix[0]
    return Recording(
        {"iteration": 4, "loss": 2.5, "kernels": {"rope": "eager"}},
        {
            TensorName("forward", "loss"): whole(matrix),
            TensorName("weight", "final_layernorm.weight"): whole(gain),
        },
    )


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    wanted = a_recording()
    save_recording(tmp_path / "made" / "one.safetensors", wanted)
    found = load_recording(tmp_path / "made" / "one.safetensors")
    assert found.facts == wanted.facts and list(found.tensors) == wanted.ordered()
    for name, one in wanted.tensors.items():
        other = found.tensors[name]
        assert (one.shape, one.digest, one.squares) == (other.shape, other.digest, other.squares)
        assert np.array_equal(one.sketch, other.sketch) and np.array_equal(one.elements, other.elements)
        assert one.distance(other) == 0


def test_what_is_no_recording_is_refused_in_one_sentence(tmp_path: Path) -> None:
    save_recording(tmp_path / "whole", a_recording())
    content = (tmp_path / "whole").read_bytes()
    files = {
        "half": content[: len(content) // 2],
        "text": b"loss 2.5\n" * 40,
        "empty": b"",
        "older": content.replace(FORMAT.encode(), b"megatron-llama-recording-0"),
        "facts": content.replace(b"iteration", b'iteration"'),
    }
    for name, damaged in files.items():
        (tmp_path / name).write_bytes(damaged)
    save_file({"digest": np.zeros(1, np.uint64)}, tmp_path / "part", {"format": FORMAT, "facts": "{}", "tensors": "[]"})
    save_file({"weight": np.zeros(3)}, tmp_path / "model")
    arrays = {"digest": np.zeros(0, np.uint64), **{name: np.zeros(0) for name in ("squares", "sketch", "elements")}}
    listed = json.dumps([["forward", "loss", 1, 1]])
    save_file(arrays, tmp_path / "listed", {"format": FORMAT, "facts": "{}", "tensors": listed})
    for path in (*map(tmp_path.joinpath, files), *(tmp_path / name for name in ("part", "model", "listed", "none"))):
        with pytest.raises(DataError) as refused:
            load_recording(path)
        sentence = str(refused.value)
        assert str(path) in sentence and "recording" in sentence and "\n" not in sentence and sentence[-1] == "."


def test_equal_bits_are_equal_also_where_numbers_are_not_finite() -> None:
    matrix = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    assert whole(matrix).distance(whole(matrix.clone())) == 0
    assert not whole(matrix).distance(whole(torch.tensor([[1.0, 4.0], [2.0, 3.0]]))) <= 1
