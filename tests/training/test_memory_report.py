"""The line about GPU memory that torch's allocator does not know."""

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron.training.loop.listeners import MemoryReport
from megatron.training.loop.trainer import Trainer

GIB = 2**30


def test_it_names_the_rank_with_the_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 57 * GIB)
    control = mock.Mock(**{"all_gather_object.side_effect": lambda own: [2 * GIB, own, GIB]})
    lines: list[str] = []
    topology = SimpleNamespace(device=torch.device("cuda", 0))
    context = SimpleNamespace(control=control, topology=topology, log_rank0=lines.append)
    listener, trainer, result = MemoryReport(), cast(Trainer, SimpleNamespace(context=context)), cast(Any, None)
    listener.on_iteration(trainer, result)
    listener.on_iteration(trainer, result)
    assert lines == ["GPU memory outside of torch's allocator: 3.00 GiB on rank 1, the most of all"]
    assert control.all_gather_object.call_count == 1
