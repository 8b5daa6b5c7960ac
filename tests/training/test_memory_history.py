"""The history of GPU memory: who records it, when it is written, and that it ends with the run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron.config.logging import LoggingConfig
from megatron.errors import ConfigError
from megatron.training.profiling.memory_history import MemoryHistory, start_memory_history

CALLS = "megatron.torch_compat"


def topology_of(rank: int, device: str = "cuda") -> Any:
    return SimpleNamespace(rank=rank, device=SimpleNamespace(type=device), grid=SimpleNamespace(world_size=4))


def config_of(path: Path) -> LoggingConfig:
    return LoggingConfig(record_memory_history=True, memory_snapshot_path=str(path), log_interval=2)


def test_the_last_rank_records_and_writes_at_the_log_interval_and_at_the_end(tmp_path: Path) -> None:
    config = config_of(tmp_path / "new" / "snapshot.pickle")
    with (
        mock.patch(f"{CALLS}.record_memory_history") as record,
        mock.patch(f"{CALLS}.dump_memory_history") as dump,
        mock.patch(f"{CALLS}.stop_memory_history") as stop,
    ):
        assert start_memory_history(config, topology_of(0)) is None
        assert start_memory_history(LoggingConfig(), topology_of(3)) is None
        record.assert_not_called()
        history = start_memory_history(config, topology_of(3))
        assert isinstance(history, MemoryHistory)
        record.assert_called_once()
        for iteration, written in ((1, 0), (2, 1), (3, 1), (4, 2)):
            history.on_iteration(_trainer_at(iteration), None)  # type: ignore[arg-type]
            assert dump.call_count == written
        stop.assert_not_called()
        history.close()
        assert dump.call_count == 3
        stop.assert_called_once()
    dump.assert_called_with(str(tmp_path / "new" / "snapshot.pickle"))


def _trainer_at(iteration: int) -> Any:
    return SimpleNamespace(state=SimpleNamespace(progress=SimpleNamespace(iteration=iteration)))


def test_a_full_disk_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = MemoryHistory(tmp_path / "snapshot.pickle", 1)
    with mock.patch(f"{CALLS}.dump_memory_history", side_effect=OSError("no space")):
        history.on_iteration(_trainer_at(1), None)  # type: ignore[arg-type]
    assert "--record-memory-history could not write" in caplog.text


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"records the allocations of a GPU.*--use-pytorch-profiler"):
        start_memory_history(config_of(tmp_path / "a"), topology_of(3, "cpu"))
