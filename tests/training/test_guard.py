"""When the checks of numbers run, where they cannot, and what their messages say."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.config.training import TrainingConfig
from megatron.core.control import ControlGroup
from megatron.core.topology import RankGrid, single_process
from megatron.errors import NotFiniteError, SilentCorruptionError
from megatron.features.known_product.listener import KnownAnswer, KnownProduct
from megatron.features.replay.listener import why_not_replayed
from megatron.features.replicas.listener import RankReport, StateCheck, raise_findings
from megatron.features.replicas.state import HOLDERS, HolderGroups, TensorKey
from megatron.flags import IntervalSchedule
from megatron.operation.signals import SignalWatch
from megatron.training.context import RunContext
from megatron.training.loop.stop import StopConditions
from megatron.training.loop.trainer import Trainer
from megatron.training.train_module import TrainModule

CPU = torch.device("cpu")


def test_replays_need_kernels_that_repeat_their_bits_and_scales_that_they_do_not_change() -> None:
    delayed, current = SimpleNamespace(is_delayed=True), SimpleNamespace(is_delayed=False)
    for allowed in (why("cpu", False), why("cuda", True), why("cuda", True, "transformer_engine", current)):
        assert allowed is None
    assert why("cuda", True, "local", delayed) is None, "our own FP8 keeps the scales of a step"
    assert "--deterministic-mode" in str(why("cuda", False))
    assert "--fp8-recipe" in str(why("cuda", True, "transformer_engine", delayed))


def why(
    device: str, is_deterministic: bool, implementation: str = "local", fp8: SimpleNamespace | None = None
) -> str | None:
    training = TrainingConfig(deterministic_mode=is_deterministic)
    config = SimpleNamespace(training=training, model=SimpleNamespace(transformer_impl=implementation))
    context = SimpleNamespace(topology=SimpleNamespace(device=torch.device(device)), config=config)
    return why_not_replayed(cast(RunContext, context), cast(TrainModule, SimpleNamespace(fp8=fp8)))


class Product(KnownProduct):
    """A product whose numbers of wrong elements are given."""

    def __init__(self, *errors: int) -> None:
        super().__init__(CPU, torch.float32)
        self.errors = list(errors)

    def count_errors(self) -> int:
        return self.errors.pop(0)


def test_the_known_product_is_tested_at_its_interval_and_ends_the_run_with_the_flags_of_a_step() -> None:
    product, now, trainer = Product(0, 0, 0, 3), 0.0, cast(Trainer, None)
    known = KnownAnswer(ControlGroup((0,), 0), [product], 100.0, clock=lambda: now)
    assert len(product.errors) == 3, "tested at the start"
    for later, left in ((99.0, 3), (100.0, 2), (150.0, 2), (201.0, 1)):
        now = later
        known.on_iteration_start(trainer)
        assert len(product.errors) == left and not known.has_failed
    now = 400.0
    known.on_iteration_start(trainer)
    stop = StopConditions(10, TrainingConfig(), SignalWatch(), single_process().world, CPU, started=0.0, alarm=known)
    flags = stop.local_flags(5)
    assert flags[-1]
    with pytest.raises(SilentCorruptionError, match="3 elements of a known product in float32 are wrong on rank 0"):
        stop.reason(5, [float(flag) for flag in flags])


def test_a_wrong_product_at_the_start_ends_the_run_and_none_is_computed_without_an_interval() -> None:
    product = Product(1)
    KnownAnswer(ControlGroup((0,), 0), [product], 0.0).on_iteration_start(cast(Trainer, None))
    with pytest.raises(SilentCorruptionError, match="1 elements of a known product in float32 are wrong on rank 0"):
        KnownAnswer(ControlGroup((0,), 0), [product], 100.0)


@pytest.mark.parametrize(
    "interval, saves, is_saving, due",
    [
        (3, None, False, [3, 6, 9]),
        (3, 4, True, [3, 4, 6, 8, 9]),
        (0, 4, True, []),
        (5, None, True, [5, 10]),
    ],
)
def test_the_state_is_checked_at_the_interval_and_at_saves(
    interval: int, saves: int | None, is_saving: bool, due: Sequence[int]
) -> None:
    schedule = None if saves is None else IntervalSchedule(((saves, 0),))
    known = KnownAnswer(ControlGroup((0,), 0), [], 0.0)
    check = StateCheck(single_process(), interval, schedule, is_saving, known)
    assert [iteration for iteration in range(1, 11) if check.is_due(iteration)] == due


def test_replicas_of_experts_are_compared_without_sharding() -> None:
    """Two data-parallel ranks of each expert, four of the dense parameters: no class has four replicas of experts."""
    groups = HolderGroups(RankGrid(dp=4, ep=2, dp_replicas=4))
    folds = torch.zeros((4, len(HOLDERS), 2), dtype=torch.int64)
    assert groups.disagreeing(folds) == []
    folds[2, HOLDERS.index(("edp",))] += 1
    assert groups.disagreeing(folds) == [(("edp",), (0, 2))]


WEIGHT, MOMENT = TensorKey("weight", "layers.0.w", 0), TensorKey("exp_avg", "layers.0.w", 0)
AXES = HOLDERS[0]


def report(host: str, **changes: Any) -> RankReport:
    return RankReport(**{"host": host, "digests": {}, "changed": (), "not_finite": (), "failure": None, **changes})


def differing(*values: int, **changes: Any) -> list[RankReport]:
    """Replicas of a weight on hosts n0, n1, …; ``changed`` names the rank that has noticed a change."""
    changed = changes.get("changed")
    return [
        report(f"n{rank}", digests={AXES: {WEIGHT: (value, 0)}}, changed=(WEIGHT,) if rank == changed else ())
        for rank, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("reports", "words", "ranks"),
    [
        (
            differing(5, 5, 6),
            r"found now: the weight of layers.0.w on rank 2 \(host n2\) differs from ranks 0 and 1\. ",
            (2,),
        ),
        # Without a majority both are named.
        (
            differing(0, 1),
            r"layers.0.w differs between ranks 0 and 1 \(hosts n0, n1\), any of which may be wrong",
            (0, 1),
        ),
        # One of them knows that it had other bits after the update, and is named alone.
        (differing(0, 1, changed=1), r"found now: [^;]* changed since the last update on rank 1 \(host n1\)\. ", (1,)),
    ],
)
def test_a_message_names_tensor_rank_and_host(reports: list[RankReport], words: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(SilentCorruptionError, match=words) as raised:
        raise_findings("now", reports, [(AXES, tuple(range(len(reports))))])
    assert raised.value.ranks == ranks and raised.value.culprit == (ranks[0] if len(ranks) == 1 else None)


def test_of_several_tensors_the_one_that_differs_is_named() -> None:
    reports = [report("a", digests={AXES: {WEIGHT: (1, 1), MOMENT: (2, rank)}}) for rank in (5, 5, 6)]
    with pytest.raises(SilentCorruptionError, match=r"found now: the exp_avg of layers.0.w on rank 2"):
        raise_findings("now", reports, [(AXES, (0, 1, 2))])


def test_a_change_between_updates_and_a_number_that_is_not_finite() -> None:
    with pytest.raises(
        SilentCorruptionError, match=r"the weight of layers.0.w changed since the last update on rank 1"
    ):
        raise_findings("now", [report("a"), report("b", changed=(WEIGHT,))], [])
    with pytest.raises(
        NotFiniteError, match=r"not finite now, which is not written: the weight of w on rank 1 \(host b"
    ):
        raise_findings("now", [report("a"), report("b", not_finite=("the weight of w",))], [])
