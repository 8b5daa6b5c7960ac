"""The start of a process: its device, ranks that share one by mistake, and the grid of ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.core.control import ControlGroup
from megatron.errors import ConfigError, RankError
from megatron.training.initialize import Process, check_gpus_differ, choose_device, rank_grid

GPU = torch.device("cuda", 0)


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def process(local_rank: int, size: int = 8) -> Process:
    return Process(local_rank, local_rank, size, size)


def test_a_process_takes_its_own_gpu_or_the_only_one_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 8)
    assert [choose_device("auto", process(rank)).index for rank in range(8)] == list(range(8))
    see_gpus(monkeypatch, 1)  # as under srun --gpus-per-task 1
    assert [choose_device("auto", process(rank)) for rank in range(8)] == [GPU] * 8
    see_gpus(monkeypatch, 0)
    assert choose_device("auto", process(0)).type == "cpu"


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2)
    with pytest.raises(RankError, match=r"^3 processes run on this node, but it has 2 GPUs: start one process per GPU"):
        choose_device("auto", process(2))
    see_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"^--device cuda needs a GPU"):
        choose_device("cuda", process(0))


def ranks_with(gpus: list[tuple[str, str]]) -> Any:
    return mock.Mock(ControlGroup, **{"all_gather_object.return_value": gpus})


def test_ranks_with_the_same_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="own"))
    control = ranks_with([("a", "0"), ("a", "1"), ("b", "2"), ("a", "1")])
    with pytest.raises(
        ConfigError, match=r"^Ranks 1 and 3 use the same GPU of a \(GPU-1\): start one process per GPU "
    ):
        check_gpus_differ(control, GPU)
    (((host, uuid),), _) = control.all_gather_object.call_args
    assert host and uuid == "own"
    check_gpus_differ(ranks_with([("a", "0"), ("a", "1"), ("b", "0")]), GPU)


def test_the_grid_has_the_sizes_of_the_flags() -> None:
    """Expert tensor parallelism is tensor parallelism unless its flag says otherwise."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=4)
    grid = rank_grid(parallel, 16)
    assert (grid.tp, grid.dp, grid.etp, grid.ep, grid.edp) == (2, 8, 2, 4, 2)
    grid = rank_grid(replace(parallel, expert_tensor_parallel_size=1, pipeline_model_parallel_size=2), 16)
    assert (grid.tp, grid.dp, grid.pp, grid.etp, grid.ep, grid.edp) == (2, 4, 2, 1, 4, 2)
