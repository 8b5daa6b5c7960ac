"""--moe-shared-expert-overlap decides when the shared experts run, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.moe.dispatch import Dispatched, PendingDispatch
from megatron.core.moe.layer import MoELayer
from megatron.core.moe.routing import Routing
from megatron.core.ops.grouped import RowCounts


class Logged(nn.Module):
    """A factor that notes its name when it runs."""

    def __init__(self, name: str, factor: float, events: list[str]) -> None:
        super().__init__()
        self.name, self.factor, self.events = name, factor, events

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        self.events.append(self.name)
        return x * self.factor


class LoggedRouter(nn.Module):
    def forward(self, tokens: Tensor, num_sequences: int) -> Routing:
        return Routing(torch.zeros(tokens.shape[0], 1, dtype=torch.int64), torch.ones(tokens.shape[0], 1))


class LoggedDispatcher:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def start(self, tokens: Tensor, routing: Routing) -> PendingDispatch:
        self.events.append("start")

        def finish() -> Dispatched:
            self.events.append("wait")
            return Dispatched(tokens, RowCounts.of([tokens.shape[0]]), lambda outputs: outputs)

        return PendingDispatch(finish)


@pytest.mark.parametrize(
    ("overlaps", "wanted"),
    [(True, ["start", "shared", "wait", "experts"]), (False, ["start", "wait", "experts", "shared"])],
)
def test_shared_experts_run_during_the_dispatch_only_on_request(overlaps: bool, wanted: list[str]) -> None:
    events: list[str] = []
    experts: Any = Logged("experts", 2.0, events)
    router: Any = LoggedRouter()
    layer = MoELayer(nn.Identity(), router, LoggedDispatcher(events), experts, Logged("shared", 10.0, events), overlaps)
    assert layer(torch.ones(3, 2, 4)).unique().tolist() == [12.0]
    assert events == wanted
