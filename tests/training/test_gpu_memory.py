"""What the log and files say of GPU memory: the history of allocations, and memory that torch's allocator does not
know."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron import torch_compat
from megatron.config.operation import LoggingConfig
from megatron.errors import ConfigError
from megatron.training.loop.listeners import MemoryReport
from megatron.training.loop.trainer import Trainer
from megatron.training.profiles import MemoryHistory, start_memory_history

GIB = 2**30
NO_RESULT = cast(Any, None)


def topology_of(rank: int, device: str = "cuda") -> Any:
    return SimpleNamespace(rank=rank, device=SimpleNamespace(type=device), grid=SimpleNamespace(world_size=4))


def config_of(path: Path) -> LoggingConfig:
    return LoggingConfig(record_memory_history=True, memory_snapshot_path=str(path), log_interval=2)


def trainer_at(iteration: int) -> Any:
    return SimpleNamespace(state=SimpleNamespace(progress=SimpleNamespace(iteration=iteration)))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Torch's allocator, of which these calls are recorded."""
    calls = mock.Mock()
    for name in ("record", "dump", "stop"):
        monkeypatch.setattr(torch_compat, f"{name}_memory_history", getattr(calls, name))
    return calls


def test_the_last_rank_records_and_writes_at_the_log_interval_and_at_the_end(
    tmp_path: Path, allocator: mock.Mock
) -> None:
    config = config_of(tmp_path / "new" / "snapshot.pickle")
    assert start_memory_history(config, topology_of(0)) is None
    assert start_memory_history(LoggingConfig(), topology_of(3)) is None
    allocator.record.assert_not_called()
    history = start_memory_history(config, topology_of(3))
    assert history is not None
    allocator.record.assert_called_once()
    for iteration, written in ((1, 0), (2, 1), (3, 1), (4, 2)):
        history.on_iteration(trainer_at(iteration), NO_RESULT)
        assert allocator.dump.call_count == written
    allocator.stop.assert_not_called()
    history.close()
    assert allocator.dump.call_args_list == 3 * [mock.call(str(tmp_path / "new" / "snapshot.pickle"))]
    allocator.stop.assert_called_once()


def test_a_full_disk_ends_no_run(tmp_path: Path, allocator: mock.Mock, caplog: pytest.LogCaptureFixture) -> None:
    allocator.dump.side_effect = OSError("no space")
    MemoryHistory(tmp_path / "snapshot.pickle", 1).on_iteration(trainer_at(1), NO_RESULT)
    assert "--record-memory-history could not write" in caplog.text


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"records the allocations of a GPU.*--use-pytorch-profiler"):
        start_memory_history(config_of(tmp_path / "a"), topology_of(3, "cpu"))


def test_memory_outside_of_the_allocator_is_said_once_for_the_worst_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 57 * GIB)
    control = mock.Mock(**{"all_gather_object.side_effect": lambda own: [2 * GIB, own, GIB]})
    lines: list[str] = []
    topology = SimpleNamespace(device=torch.device("cuda", 0))
    context = SimpleNamespace(control=control, topology=topology, log_rank0=lines.append)
    listener, trainer = MemoryReport(), cast(Trainer, SimpleNamespace(context=context))
    for _ in range(2):
        listener.on_iteration(trainer, NO_RESULT)
    assert lines == ["GPU memory outside of torch's allocator: 3.00 GiB on rank 1, the most of all"]
    assert control.all_gather_object.call_count == 1
