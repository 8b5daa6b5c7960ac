"""Every layout computes the same training run as one process, to 1e-9, step after step, in fp64.

Compared: the loss, the gradient norm, every parameter's gradient and the weights after each step, on batches
whose ranks and microbatches have very different numbers of unmasked tokens.
"""

from collections.abc import Iterator
from functools import cache

import pytest

from megatron.config.optimizer import OptimizerConfig
from tests.parallel.layout_run import MODEL, STEPS, TIED_MODEL, Layout, Task, Trace, assemble, train
from tests.rank_pool import RankPool

TOLERANCE = 1e-9

ADAM = Task(OptimizerConfig(weight_decay=0.1))
ADAM_UNCLIPPED = Task(OptimizerConfig(weight_decay=0.1, clip_grad=0.0))
ADAM_CLIPPED_HARD = Task(OptimizerConfig(weight_decay=0.1, clip_grad=0.05))
SGD = Task(OptimizerConfig(optimizer="sgd", clip_grad=0.05))
SGD_UNCLIPPED = Task(OptimizerConfig(optimizer="sgd", clip_grad=0.0))
TIED = Task(OptimizerConfig(weight_decay=0.1), model=TIED_MODEL)


def matrix() -> Iterator[tuple[Task, Layout]]:
    """Every layout once with each of two tasks, and other tasks on the layouts that cross everything."""
    for tp in (1, 2, 4):
        for dp in (1, 2):
            for sequence_parallel in (False, True) if tp > 1 else (False,):
                for shard_optimizer in (False, True):
                    for microbatches in (1, 4):
                        layout = Layout(tp, dp, sequence_parallel, shard_optimizer, microbatches=microbatches)
                        yield ADAM_CLIPPED_HARD, layout
                        yield SGD_UNCLIPPED, layout
    for task in (ADAM, ADAM_UNCLIPPED, SGD, TIED):
        for sequence_parallel in (False, True):
            yield task, Layout(2, 2, sequence_parallel, shard_optimizer=True, microbatches=2)
    yield SGD, Layout(1, 4, shard_optimizer=True, instances=2)
    yield SGD, Layout(1, 4, shard_optimizer=True, microbatches=2)
    yield ADAM, Layout(2, 2, True, shard_optimizer=True, order="dp-tp-cp-ep-pp")


@cache
def one_process(task: Task) -> Trace:
    return train(task, Layout())


def _identifier(value: object) -> str:
    if isinstance(value, Layout):
        flags = ("-sp" if value.sequence_parallel else "") + ("-zero1" if value.shard_optimizer else "")
        return f"tp{value.tp}-dp{value.dp}{flags}-micro{value.microbatches}"
    assert isinstance(value, Task)
    tied = "" if value.model is MODEL else "-tied"
    return f"{value.optimizer.optimizer}-clip{value.optimizer.clip_grad}{tied}"


@pytest.mark.parametrize(("task", "layout"), list(matrix()), ids=_identifier)
def test_layout_equals_one_process(eight_ranks: RankPool, task: Task, layout: Layout) -> None:
    expected = one_process(task)
    traces: list[Trace] = eight_ranks.run(train, task, layout, world_size=layout.world_size)
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert trace.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
    for step in range(STEPS):
        for kind in ("gradients", "weights"):
            found = assemble([part for trace in traces for part in getattr(trace, kind)[step]])
            wanted = assemble(getattr(expected, kind)[step])
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                error = (found[name] - tensor).abs().max() / tensor.abs().max()
                assert error < TOLERANCE, f"{kind} of {name} after step {step + 1}: off by {error:.1e}"


def test_the_run_trains_and_clips() -> None:
    """The comparison means nothing if the loss stands still or no gradient is ever clipped."""
    trace = one_process(ADAM_CLIPPED_HARD)
    assert trace.losses[-1] < trace.losses[0] - 0.05
    assert min(trace.grad_norms) > ADAM_CLIPPED_HARD.optimizer.clip_grad
