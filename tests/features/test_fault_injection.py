"""Every injector does what its row of the table says, at its moment, on its rank, and not again after a restart."""

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.checkpoint import CheckpointConfig
from megatron.core.parameter import ParameterInfo, columns_box, padded_rows_box, sharded_boxes
from megatron.data.gpt_dataset import MockDataset
from megatron.data.loader import Patience
from megatron.errors import LoaderError
from megatron.features.faults.flags import (
    FILE,
    ITERATION,
    KINDS,
    LOAD,
    FaultInjector,
    injected,
    parse_fault,
    parse_faults,
)
from megatron.features.faults.listener import (
    EVENT_FAULTS,
    ITERATION_FAULTS,
    SAVE_FAULTS,
    FaultInjection,
    InjectedError,
    flip,
)
from megatron.operation.attempts import read_attempts
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.processes import stat_of
from tests.data.corpora import load
from tests.end_to_end.run_process import (
    TINY_RUN,
    FlagValue,
    Outcome,
    call_training,
    iterations,
    latest_iteration,
    losses,
    wait_until,
    words_of,
)
from tests.forked import fork_context

pytestmark = pytest.mark.processes
PATIENCE = 60.0
IN_LISTENER = {"slow", "delay", "spike"}


def test_every_kind_has_an_injector() -> None:
    assert KINDS.keys() == EVENT_FAULTS.keys() | ITERATION_FAULTS.keys() | SAVE_FAULTS.keys() | IN_LISTENER


# --- faults of a process -------------------------------------------------------------------------------------


def _strike(spec: str, ticks: Any) -> None:
    """Inject a fault in a process whose other thread counts."""

    def count() -> None:
        while True:
            ticks.value += 1
            time.sleep(0.001)

    threading.Thread(target=count, daemon=True).start()
    while ticks.value < 10:
        time.sleep(0.001)
    fault = parse_fault(spec)
    EVENT_FAULTS[fault.kind](fault)


Strike = Callable[[str], tuple[BaseProcess, Any]]


@pytest.fixture
def strike() -> Iterator[Strike]:
    """Starts a process in which a fault is injected; it does not outlive the test."""
    started: list[BaseProcess] = []

    def start(spec: str) -> tuple[BaseProcess, Any]:
        context = fork_context()
        ticks: Any = context.Value(ctypes.c_long, 0, lock=False)
        process = context.Process(target=_strike, args=(spec, ticks), daemon=True)
        process.start()
        started.append(process)
        return process, ticks

    yield start
    for process in started:
        process.kill()
        process.join()


ENDS = {"kill@1": -signal.SIGKILL, "sigterm@1": -signal.SIGTERM, "exit@1:7": 7, "exit@1": 1, "exception@1": 1}
ENDS |= {"oom@1": 1, "sleep@1:0.1": 0}


@pytest.mark.parametrize(("spec", "code"), ENDS.items())
def test_a_process_ends_as_its_fault_says(strike: Strike, spec: str, code: int) -> None:
    process, _ = strike(spec)
    process.join(PATIENCE)
    assert process.exitcode == code


@pytest.mark.parametrize(
    ("spec", "other_threads_run", "state"),
    [("stop@1", False, "T"), ("sleep@1", True, "S"), ("fifo@1", True, "S"), ("gil@1", False, "S")],
)
def test_a_process_hangs_as_its_fault_says(strike: Strike, spec: str, other_threads_run: bool, state: str) -> None:
    """A stopped process and one without the interpreter lock run no Python; the others do, in other threads."""
    process, ticks = strike(spec)
    wait_until(lambda: ticks.value >= 10, PATIENCE)
    wait_until(lambda: stat_of(process.pid or 0)[:1] == [state], PATIENCE)  # of the main thread
    if other_threads_run:
        seen = ticks.value
        wait_until(lambda: ticks.value > seen + 20, PATIENCE)
    else:
        wait_until(lambda: not _advances(ticks), PATIENCE)
    assert process.is_alive()


def _advances(ticks: Any) -> bool:
    seen = ticks.value
    time.sleep(0.3)
    return bool(ticks.value > seen)


@pytest.mark.parametrize(("spec", "sentence"), [("stoploader@1", "has delivered no"), ("failloader@1", "Input/output")])
def test_reads_of_the_loader_stop_or_fail_until_the_run_ends(spec: str, sentence: str) -> None:
    """What has been read ahead is still delivered."""
    injection = FaultInjection(FaultInjector(), CheckpointConfig())
    loader = load(MockDataset(0, 8, 1000, 1000), num_workers=1, patience=(patience := Patience(PATIENCE)))
    next(loader)
    vars(patience)["limit"] = 1.0  # from now on, since a read may take longer on a busy machine
    try:
        ITERATION_FAULTS[spec.partition("@")[0]](parse_fault(spec), NO_TRAINER)
        with pytest.raises(LoaderError, match=sentence):
            list(loader)
    finally:
        injection.close()
    assert len(list(islice(load(MockDataset(0, 8, 1000, 9), num_workers=1), 9))) == 9


# --- bits ----------------------------------------------------------------------------------------------------

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_exactly_one_bit_is_flipped(dtype: torch.dtype) -> None:
    before = torch.randn(5, dtype=dtype)
    for bit in range(8 * dtype.itemsize):
        after = before.clone()
        flip(after, 3, bit)
        changed = after.view(INTEGERS[dtype]) ^ before.view(INTEGERS[dtype])
        assert changed.tolist()[:3] + changed.tolist()[4:] == [0] * 4
        assert int(changed[3]) & (1 << 8 * dtype.itemsize) - 1 == 1 << bit


NO_TRAINER: Any = None
"""For faults that act on no part of the run."""


def trainer_of(info: ParameterInfo, weight: torch.Tensor, start: int = 0) -> Any:
    """A trainer of a model with one parameter."""
    part = SimpleNamespace(info=info, start=start, tensor=weight, gradient=weight, weight=weight)
    states = [SimpleNamespace(kind="exp_avg", info=info, start=start, tensor=weight)]
    data_parallel = SimpleNamespace(local_params=[part], param_shards=[part])
    optimizer = SimpleNamespace(state=lambda: iter(states))
    return SimpleNamespace(module=SimpleNamespace(data_parallel=data_parallel, optimizer=optimizer))


def info_of(local_shape: tuple[int, ...], global_shape: tuple[int, ...], boxes: tuple[object, ...]) -> ParameterInfo:
    return ParameterInfo("weight", global_shape, local_shape, boxes, 0.02, True, True)  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 5), st.integers(1, 10**6), st.data())
def test_padding_is_never_changed(rows: int, rank: int, columns: int, iteration: int, data: st.DataObject) -> None:
    """It is in no checkpoint, so a fault there would be one without effect."""
    global_shape, local_shape, boxes = padded_rows_box(rows, -(-rows // 16) * 16, columns, rank, 4)
    numel = local_shape[0] * columns
    start = data.draw(st.integers(0, numel - 1))
    real = (boxes[0].shape[0] * columns if boxes else 0) - start
    weight = torch.zeros(numel - start)
    fault = parse_fault(f"nan@{iteration}")
    trainer = trainer_of(info_of(local_shape, global_shape, boxes), weight, start)
    if real <= 0:
        with pytest.raises(InjectedError, match="no gradient"):
            ITERATION_FAULTS["nan"](fault, trainer)
        return
    ITERATION_FAULTS["nan"](fault, trainer)
    (place,) = weight.isnan().nonzero().flatten().tolist()
    assert place < real


def test_a_flip_needs_what_it_flips() -> None:
    _, local_shape, boxes = sharded_boxes([8], [4], 0, 1)
    trainer = trainer_of(info_of(local_shape, (8, 4), boxes), torch.ones(32, dtype=torch.bfloat16))
    with pytest.raises(InjectedError, match="16 bits"):
        ITERATION_FAULTS["flip"](parse_fault("flip@1:weight:29"), trainer)
    with pytest.raises(InjectedError, match="no master"):
        ITERATION_FAULTS["flip"](parse_fault("flip@1:master:9"), trainer)
    for target in ("weight", "gradient", "moment"):
        weight = torch.ones(32)
        _, local_shape, boxes = columns_box(8, 4, 0, 1)
        ITERATION_FAULTS["flip"](
            parse_fault(f"flip@1:{target}:3"), trainer_of(info_of(local_shape, (8, 4), boxes), weight)
        )
        assert (weight != 1.0).sum() == 1


# --- when ----------------------------------------------------------------------------------------------------


def attempt(directory: Path, spec: str, rank: int, first: int, last: int) -> list[str]:
    """The faults of one attempt, as ``iteration kind``."""
    injector = FaultInjector(parse_faults(spec), rank, directory)
    return [f"{number} {fault.kind}" for number in range(first, last + 1) for fault in injector.due(ITERATION, number)]


def test_a_fault_is_injected_in_the_first_attempt_that_reaches_it(tmp_path: Path) -> None:
    spec = "kill@3:rank1,stop@5,exit@4:times2,exception@2:always,delay@6+3:0.1"
    assert attempt(tmp_path, spec, 1, 1, 2) == ["2 exception"]
    assert attempt(tmp_path, spec, 1, 1, 3) == ["2 exception", "3 kill"]
    assert attempt(tmp_path, spec, 1, 1, 5) == ["2 exception", "4 exit", "5 stop"]
    # Other ranks have records of their own.
    assert attempt(tmp_path, spec, 0, 2, 5) == ["2 exception", "4 exit", "5 stop"]
    assert attempt(tmp_path, spec, 1, 3, 5) == ["4 exit"]
    assert attempt(tmp_path, spec, 1, 4, 7) == ["6 delay", "7 delay"]
    assert attempt(tmp_path, spec, 1, 2, 9) == ["2 exception"]
    assert attempt(tmp_path, spec, 0, 7, 9) == ["7 delay", "8 delay"]  # an attempt that begins inside
    assert FaultInjector(parse_faults(spec), 0, tmp_path).due(LOAD) == []


def test_the_record_survives_damage(tmp_path: Path) -> None:
    assert attempt(tmp_path, "kill@1", 0, 1, 1) == ["1 kill"]
    with (tmp_path / FILE).open("a") as file:
        file.write('[]\nnull\n{"fault": "kill@2"}\n{"fault": "ki')
    assert list(injected(tmp_path / FILE)) == [("kill@1", 0)]
    entry = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    assert entry["number"] == 1 and abs(entry["monotonic"] - time.monotonic()) < 600


# --- runs ----------------------------------------------------------------------------------------------------

RUN: dict[str, FlagValue | Path] = {**TINY_RUN, "mock_data": True, "vocab_size": 384, "train_iters": 6}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Trains with faults, in this process."""
    monkeypatch.setenv("MEGATRON_FAULTS", "1")

    def train(spec: str | None, **flags: FlagValue | Path) -> Outcome:
        name = (spec or "clean").replace(":", "_")
        places = {"run_dir": tmp_path / name, "metrics_jsonl": tmp_path / f"{name}.jsonl"}
        return call_training(words_of({**RUN, **places, "inject_fault": spec, **flags}))

    return train


def test_numbers_change_from_the_iteration_of_the_fault(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    """Weights in its loss; gradients, moments and the learning rate one iteration later."""
    run(None).succeeded()
    clean = losses(tmp_path / "clean.jsonl")
    cases = {"flip@3:weight:29": 3, "flip@3:gradient:23": 4, "flip@3:moment:29": 4, "spike@3+2:30": 4}
    for spec, first_changed in cases.items():
        run(spec).succeeded()
        found = losses(tmp_path / f"{spec.replace(':', '_')}.jsonl")
        changed = [number for number, (one, other) in enumerate(zip(found, clean, strict=True), 1) if one != other]
        assert changed[:1] == [first_changed], spec
    rates = [record["learning_rate"] for record in iterations(tmp_path / "spike@3+2_30.jsonl")]
    usual = [record["learning_rate"] for record in iterations(tmp_path / "clean.jsonl")]
    factors = [round(one / other, 6) for one, other in zip(rates[1:], usual[1:], strict=True)]  # the first is 0
    assert factors == [1, 30, 30, 1, 1]


def test_nan_in_a_gradient_is_seen_in_its_iteration(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    ended = run("nan@3")
    assert ended.exit_code == 1 and "Iteration 3 has loss" in ended.errors[0] and "gradient norm nan" in ended.errors[0]
    run("nan@3+2:times2", check_for_nan_in_loss_and_grad=False).succeeded()
    norms = [record["grad_norm"] for record in iterations(tmp_path / "nan@3+2_times2.jsonl")]
    assert [number for number, norm in enumerate(norms, 1) if norm is None] == [3, 4]


@pytest.mark.parametrize(("spec", "number"), [("delay@2+3:0.25", 3), ("slow@2+2:3", 2)])
def test_slow_iterations_sleep(tmp_path: Path, spec: str, number: int) -> None:
    """``delay`` for its seconds, ``slow`` for a multiple of the time that this rank has computed."""
    slept: list[float] = []
    injection = FaultInjection(FaultInjector(parse_faults(spec), 0, tmp_path), CheckpointConfig(), slept.append)
    topology = SimpleNamespace(world=None, device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        context=SimpleNamespace(topology=topology, heartbeat=Heartbeat()),
        module=SimpleNamespace(data_parallel=None, optimizer=None),
        state=SimpleNamespace(progress=SimpleNamespace(iteration=0), learning_rate_factor=1.0),
    )
    computed = []
    for trainer.state.progress.iteration in range(6):
        injection.on_iteration_start(trainer)
        began = time.thread_time()
        sum(range(100_000))
        computed.append(time.thread_time() - began)
        injection.after_backward(trainer)
    assert len(slept) == number
    if spec.startswith("delay"):
        assert set(slept) == {0.25}
    else:
        assert all(2 * least <= seconds < 2 * least + 1.0 for seconds, least in zip(slept, computed[1:]))


def test_a_save_fails_as_its_fault_says(
    tmp_path: Path, run: Callable[..., Outcome], caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, the save before is intact, the next one succeeds, and no directory of the failed one remains."""
    for spec, words in (("enospc@save2", "No space left on device"), ("eio@save1", "Input/output error")):
        save = tmp_path / f"save_{spec}"
        run(spec, save=save, save_interval=2).succeeded()
        assert words in caplog.text
        assert latest_iteration(save) == 6
        wanted = {"enospc@save2": [2, 6], "eio@save1": [4, 6]}[spec]
        assert sorted(int(path.name[5:]) for path in save.glob("iter_*")) == wanted
        assert not [path for path in save.iterdir() if path.name.startswith(".saving")]
    assert os.fsync.__name__ == "fsync"


def test_a_slow_save_and_a_fault_in_the_middle_of_a_save(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    run("slowsave@save1+2:1", save=tmp_path / "slow", save_interval=2).succeeded()
    (attempt,) = read_attempts(tmp_path / "slowsave@save1+2_1")
    assert 2.0 <= attempt.second("save") < 3.0
    with pytest.raises(RuntimeError, match="exception@save2"):
        run("exception@save2", save=tmp_path / "save", save_interval=2)
    assert latest_iteration(tmp_path / "save") == 2


@pytest.mark.parametrize("moment", ["start", "load", "4"])
def test_an_exception_strikes_once(run: Callable[..., Outcome], moment: str) -> None:
    with pytest.raises(InjectedError, match=f"exception@{moment}"):
        run(f"exception@{moment}")
    assert "INJECTED FAULT" not in run(f"exception@{moment}").succeeded().stderr
