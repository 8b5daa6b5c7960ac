"""On the late transport a missing wait is seen in the losses of a run; without it gloo mostly hides one."""

from math import isnan
from unittest import mock

import pytest

from megatron.config.optimizer import OptimizerConfig
from megatron.core.data_parallel.bucket import WeightBucket
from megatron.core.offload import OffloadedTensors
from tests.parallel.layout_run import Layout, Task, train
from tests.parallel.tasks import full
from tests.rank_pool import RankPool

TASK = Task(OptimizerConfig(optimizer="sgd"), steps=2)
GATHERED = Layout(1, 2, strategy="optim", overlap_param_gather=True, late=True)
OFFLOADED = Layout(activations=full("uniform", 1, cpu_offloading_num_layers=2), late=True)


def train_without_waiting_for_weights() -> list[float]:
    with mock.patch.object(WeightBucket, "finish_gather", lambda bucket: None):
        return train(TASK, GATHERED).losses


def test_weights_that_are_not_waited_for_are_nan(four_ranks: RankPool) -> None:
    for losses in four_ranks.run(train_without_waiting_for_weights, world_size=2):
        assert isnan(losses[-1])


def test_copies_from_the_host_that_are_not_waited_for_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = OffloadedTensors.fetch

    def fetch_and_forget(saved: OffloadedTensors) -> None:
        fetch(saved)
        saved._on_device = None

    assert not isnan(train(TASK, OFFLOADED).grad_norms[0])
    monkeypatch.setattr(OffloadedTensors, "fetch", fetch_and_forget)
    assert isnan(train(TASK, OFFLOADED).grad_norms[0])
