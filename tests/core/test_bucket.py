"""When buckets communicate, and how much they keep meanwhile; told by communicators that note it and send nothing."""

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.config.parallel import ShardingStrategy
from megatron.core.communication import Communicator, Work
from megatron.core.data_parallel.bucket import InFlight, ShardedGradientBucket
from megatron.core.data_parallel.buffer import GradientView
from megatron.core.data_parallel.buffered import BufferedDataParallel
from megatron.core.gradient import MainGrad, accumulate_main_grad
from megatron.core.parameter import attach_info, info_of
from megatron.core.topology import RankGrid
from tests.core.buckets import NUMBERS, Unit, build_buckets


class Noting(Communicator):
    """The first of two ranks, the other of which has nothing but zeros; notes when a collective starts and ends."""

    def __init__(self, events: list[str], of: str = "") -> None:
        super().__init__((0, 1), 0)
        self.events, self.of = events, of

    def _noted(self, kind: str, finish: Callable[[], Tensor]) -> Work[Tensor]:
        kind += self.of
        self.events.append(f"start {kind}")

        def end() -> Tensor:
            self.events.append(f"end {kind}")
            return finish()

        return Work((), end)

    def start_reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """Keep the first half."""
        part = tensor.chunk(2)[0]
        return self._noted("reduce", lambda: part.clone() if output is None else output.copy_(part))

    def start_all_gather(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
        """Leave the second half as it is."""
        assert output is not None
        return self._noted("gather", lambda: output)


def unit(name: str, events: list[str]) -> Unit:
    return Unit(name, lambda name: events.append(f"run {name}"))


def two_buckets(strategy: ShardingStrategy, overlap: bool) -> tuple[BufferedDataParallel, list[Unit], list[str]]:
    events: list[str] = []
    units = [unit("a", events), unit("b", events)]
    grid = RankGrid(dp=2, dp_replicas=1)
    return build_buckets(strategy, overlap, units, grid, dense=Noting(events)), units, events


def deliver(unit: Unit, events: list[str], value: float = 1.0) -> None:
    events.append(f"backward {unit.name}")
    accumulate_main_grad(unit.weight, torch.full((NUMBERS,), value))


@pytest.mark.parametrize("overlap", [False, True])
def test_whole_gradients_leave_once_with_the_last_microbatch(overlap: bool) -> None:
    data_parallel, (first, second), events = two_buckets("optim", overlap)
    data_parallel.start_grad_accumulation(2)
    for _ in range(2):
        deliver(second, events)
        deliver(first, events)
    backward = ["backward b", "backward a", "backward b"]
    if overlap:
        assert events == [*backward, "start reduce", "backward a", "start reduce"]
    else:
        assert events == [*backward, "backward a"]
    data_parallel.finish_grad_sync()
    assert events.count("start reduce") == events.count("end reduce") == 2
    assert all((shard.gradient == 2.0).all() for shard in data_parallel.param_shards)


def test_a_gradient_that_comes_after_its_bucket_has_left_is_noticed() -> None:
    data_parallel, (_, second), events = two_buckets("optim", overlap=True)
    data_parallel.start_grad_accumulation(1)
    deliver(second, events)
    with pytest.raises(AssertionError, match="arrived after its bucket was reduced"):
        deliver(second, events)


def test_sharded_gradients_leave_with_every_microbatch_behind_the_backward_pass() -> None:
    """Room for the next microbatch's is made by the end of the last one's; others stay under way, step after step."""
    data_parallel, (first, second), events = two_buckets("optim_grads", overlap=True)
    for _ in range(3):
        events.clear()
        data_parallel.start_grad_accumulation(2)
        for value in (1.0, 2.0):
            deliver(second, events, value)
            deliver(first, events, value)
        once = ["backward b", "start reduce", "backward a", "start reduce"]
        again = ["backward b", "end reduce", "start reduce", "backward a", "end reduce", "start reduce"]
        assert events == once + again
        data_parallel.finish_grad_sync()
        assert events == [*once, *again, "end reduce", "end reduce"]
        assert all((shard.gradient == 3.0).all() for shard in data_parallel.param_shards)


def test_sharded_gradients_without_overlap_are_reduced_at_once() -> None:
    data_parallel, (first, second), events = two_buckets("optim_grads", overlap=False)
    data_parallel.start_grad_accumulation(1)
    deliver(second, events)
    deliver(first, events)
    reduced = ["start reduce", "end reduce"]
    assert events == ["backward b", *reduced, "backward a", *reduced]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_each_module_waits_for_its_own_weights_and_for_no_others(strategy: ShardingStrategy) -> None:
    data_parallel, (first, second), events = two_buckets(strategy, overlap=True)
    data_parallel.start_param_all_gather()
    assert events == ["start gather"]
    first()
    # The all-gather of the next weights overlaps with the computation.
    assert events[1:] == ["start gather", "end gather", "run a"]
    second()
    assert events[4:] == ["end gather", "run b"]
    first()
    assert events[6:] == ["run a"]
    data_parallel.start_param_all_gather()
    data_parallel.finish_param_all_gather()
    assert events[7:] == ["start gather", "start gather", "end gather", "end gather"]


def test_a_module_that_runs_early_gathers_all_weights_before_its_own() -> None:
    """So all ranks gather in the same order."""
    data_parallel, (first, second), events = two_buckets("optim", overlap=True)
    data_parallel.start_param_all_gather()
    second()
    first()
    assert events == ["start gather", "start gather", "end gather", "run b", "end gather", "run a"]


def test_without_overlap_weights_are_there_before_anything_goes_on() -> None:
    data_parallel, (first, _), events = two_buckets("optim", overlap=False)
    data_parallel.start_param_all_gather()
    first()
    assert events == ["start gather", "start gather", "end gather", "end gather", "run a"]


def test_initial_weights_are_there_before_a_checkpoint_is_loaded_into_their_place() -> None:
    data_parallel, _, events = two_buckets("optim", overlap=True)
    data_parallel.initialize(seed=1)
    assert events == ["start gather", "start gather", "end gather", "end gather"]


class LayerWithExperts(nn.Module):
    """A layer with one dense weight, and one of experts in a module of its own."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self.dense, self.experts = unit(name, events), unit(f"{name}.experts", events)
        attach_info(self.experts.weight, replace(info_of(self.experts.weight), is_expert=True))

    def forward(self) -> None:
        """The dense part first."""
        self.dense()
        self.experts()


def layers_with_experts() -> tuple[BufferedDataParallel, list[LayerWithExperts], list[str]]:
    events: list[str] = []
    layers = [LayerWithExperts("a", events), LayerWithExperts("b", events)]
    groups = {"dense": Noting(events), "experts": Noting(events, " experts")}
    return build_buckets("optim", True, layers, RankGrid(dp=4, ep=2, dp_replicas=1), **groups), layers, events


def test_experts_wait_for_their_own_weights_which_are_gathered_while_their_layer_runs() -> None:
    data_parallel, (first, second), events = layers_with_experts()
    data_parallel.start_param_all_gather()
    assert events == ["start gather"]
    first()
    assert events[1:] == [
        *("start gather experts", "end gather", "run a"),
        *("start gather", "end gather experts", "run a.experts"),
    ]
    second()
    assert events[7:] == ["start gather experts", "end gather", "run b", "end gather experts", "run b.experts"]


def test_gradients_of_experts_leave_over_their_own_ranks_as_they_are_complete() -> None:
    data_parallel, (first, second), events = layers_with_experts()
    data_parallel.start_grad_accumulation(1)
    for layer in (second, first):
        deliver(layer.experts, events)
        deliver(layer.dense, events)
    assert events == [
        *("backward b.experts", "start reduce experts", "backward b", "start reduce"),
        *("backward a.experts", "start reduce experts", "backward a", "start reduce"),
    ]
    data_parallel.finish_grad_sync()
    assert sorted(events[8:]) == [*["end reduce"] * 2, *["end reduce experts"] * 2]


def test_whole_gradients_are_freed_before_the_sum_of_their_rows_is_allocated() -> None:
    """Both together raised the peak of a backward pass under FSDP2 by the largest shard of a unit."""
    infos = [info_of(unit(name, []).weight) for name in "ab"]
    main_grads = [MainGrad() for _ in infos]
    whole: list[weakref.ref[Tensor]] = []

    class Watching(Noting):
        def start_reduce_scatter(self, tensor: Tensor, output: Tensor | None = None) -> Work[Tensor]:
            assert whole.pop()() is None
            return super().start_reduce_scatter(tensor, output)

    members = [(info, main_grad, number * NUMBERS) for number, (info, main_grad) in enumerate(zip(infos, main_grads))]
    view = GradientView(2 * NUMBERS, None, torch.zeros(NUMBERS), members)
    alone = Communicator((0,), 0)
    bucket = ShardedGradientBucket(view, Watching([]), alone, InFlight(0), part_sizes=[NUMBERS // 2] * 2)
    bucket.expect(2)
    for _ in range(2):
        for main_grad in main_grads:
            main_grad.add(torch.ones(NUMBERS))
            if main_grad.storage is not None and main_grad.storage._base is not None and not whole:
                whole.append(weakref.ref(main_grad.storage._base))
    bucket.finish()
    assert not whole and view.shard.tolist() == [2.0] * NUMBERS
