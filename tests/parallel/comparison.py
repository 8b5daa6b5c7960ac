"""Compares the ranks of a layout with one process, step by step."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.parallel.layout_run import Layout, Task, Trace, assemble, train
from tests.rank_pool import RankPool

TOLERANCE = 1e-9


@cache
def one_process(task: Task) -> Trace:
    return train(task, Layout())


def compare_with_one_process(
    ranks: RankPool, task: Task, layout: Layout, train_on_rank: Callable[[Task, Layout], Trace] = train
) -> list[Trace]:
    """Compare all steps; returns the traces of the ranks."""
    traces: list[Trace] = ranks.run(train_on_rank, task, layout, world_size=layout.world_size)
    compare_traces(traces, one_process(task))
    return traces


def compare_traces(traces: list[Trace], expected: Trace) -> None:
    """Compare the traces of all ranks with that of one process."""
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert len(trace.auxiliary) == len(expected.auxiliary)
        for metrics, of_one_process in zip(trace.auxiliary, expected.auxiliary):
            assert metrics == pytest.approx(of_one_process, rel=TOLERANCE)
        assert trace.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
        assert trace.weight_norms == pytest.approx(expected.weight_norms, rel=TOLERANCE)
        assert trace.zeros == expected.zeros
    for step in range(len(expected.losses)):
        for kind in ("gradients", "weights", "averages"):
            found = assemble([part for trace in traces for part in getattr(trace, kind)[step]])
            wanted = assemble(getattr(expected, kind)[step])
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                error = (found[name] - tensor).abs().max() / tensor.abs().max()
                assert error < TOLERANCE, f"{kind} of {name} after step {step + 1}: off by {error:.1e}"


def compare_balance(traces: list[Trace], expected: Trace) -> None:
    """The balance of the experts, the choices of all tokens and the biases of all layers."""
    assert not expected.is_near_tie, "a choice of the reference is near a tie: use another seed"
    for step, metrics in enumerate(expected.balance):
        for trace in traces:
            assert trace.balance[step] == pytest.approx(metrics, rel=TOLERANCE)
        # Tensor-parallel ranks of a pipeline stage have other tokens, so each token is recorded once.
        assert sorted(choice for trace in traces for choice in trace.choices[step]) == sorted(expected.choices[step])
        for trace in traces:
            for name, bias in trace.biases[step].items():
                assert torch.equal(bias, expected.biases[step][name]), name
        assert {name for trace in traces for name in trace.biases[step]} == expected.biases[step].keys()
