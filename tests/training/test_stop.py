"""A run ends for a reason that all ranks agree on, and a signal ends it gently, but not for ever."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.training import TrainingConfig
from megatron.core.communication import Communicator
from megatron.core.transport.torch_distributed import Reduction
from megatron.errors import DataError
from megatron.operation.signals import SignalWatch, watch_signals
from megatron.training.loop.step import NO_DATA, RankAlarm, StopConditions

WATCHED = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


class OtherRank(Communicator):
    """Two ranks, of which the other one reports these flags: signal received, time is up, no data, alarms."""

    def __init__(self, *flags: int) -> None:
        super().__init__((0, 1), 0)
        self.flags = torch.tensor(flags)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        assert reduction == "sum"
        return tensor + self.flags


@pytest.fixture
def usual() -> Iterator[list[int]]:
    """Stand-ins for what signals usually do; lists those that came through, and puts pytest's handlers back."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    previous = {number: signal.signal(number, note) for number in WATCHED}
    yield came
    for number, handler in previous.items():
        signal.signal(number, handler)


def stop(
    config: TrainingConfig | None = None,
    *,
    received: str | None = None,
    seconds_ago: float = 0.0,
    world: Communicator | None = None,
) -> StopConditions:
    watch = SignalWatch()
    watch.received = received
    return StopConditions(
        train_iters=100,
        config=config or TrainingConfig(),
        signals=watch,
        world=world or Communicator((0,), 0),
        device=torch.device("cpu"),
        started=time.monotonic() - seconds_ago,
    )


# Signals


def test_two_interrupts_are_noted_and_the_third_acts_as_usual(usual: list[int]) -> None:
    """Ctrl-C under torchrun comes twice."""
    with watch_signals(TrainingConfig()) as watch:
        assert watch.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.received == "SIGTERM"
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert watch.received == "SIGTERM", "the first signal is the reason"
        assert not usual
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert usual == [signal.SIGTERM, signal.SIGINT]


def test_a_batch_system_may_repeat_its_signal_and_the_third_ctrl_c_interrupts(usual: list[int]) -> None:
    """SLURM's daemon, srun and the launcher each send SIGTERM to a rank, and the save must still end."""
    with watch_signals(TrainingConfig()) as watch:
        for _ in range(4):
            signal.raise_signal(signal.SIGTERM)
        assert watch.received == "SIGTERM" and not usual
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with watch_signals(TrainingConfig()) as watch:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert watch.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_the_signal_asked_for_is_watched_beside_sigterm(usual: list[int], number: signal.Signals) -> None:
    with watch_signals(TrainingConfig(exit_signal="SIGUSR2")) as watch:
        signal.raise_signal(signal.SIGUSR1)
        assert usual == [signal.SIGUSR1]
        assert watch.received is None
        signal.raise_signal(number)
        assert watch.received == number.name


def test_without_the_handler_signals_act_as_usual(usual: list[int]) -> None:
    with watch_signals(TrainingConfig(exit_signal_handler=False)) as watch:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert usual == [signal.SIGTERM, signal.SIGINT]
    assert watch.received is None


@pytest.mark.parametrize("signals", [0, 1, 2, 3])
def test_afterwards_every_handler_is_back(usual: list[int], signals: int) -> None:
    before = [signal.getsignal(number) for number in WATCHED]
    with pytest.raises(ZeroDivisionError), watch_signals(TrainingConfig()):
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in WATCHED] == before


# Reasons


QUIET, MINUTES = OtherRank(0, 0, 0), "--exit-duration-in-mins"
REASONS: list[tuple[dict[str, Any], dict[str, Any], int, str | None]] = [
    *(({}, {}, iteration, None) for iteration in (0, 1, 99)),
    *(({}, {}, iteration, "the run is complete") for iteration in (100, 101)),
    ({}, {"seconds_ago": 1e9}, 5, None),
    ({"exit_duration_in_mins": 1.5}, {"seconds_ago": 80}, 5, None),
    ({"exit_duration_in_mins": 1.5}, {"seconds_ago": 100}, 5, f"{MINUTES} 1.5"),
    ({}, {"received": "SIGTERM"}, 5, "signal SIGTERM"),
    # What this rank knows counts when the other is quiet.
    ({}, {"received": "SIGINT", "world": QUIET}, 5, "signal SIGINT"),
    ({"exit_duration_in_mins": 1}, {"seconds_ago": 61, "world": QUIET}, 5, f"{MINUTES} 1"),
    # What another rank knows counts here, too.
    ({"exit_duration_in_mins": 60}, {"world": QUIET}, 5, None),
    ({"exit_duration_in_mins": 60}, {"world": OtherRank(1, 0, 0)}, 5, "signal on another rank"),
    ({"exit_duration_in_mins": 60}, {"world": OtherRank(0, 1, 0)}, 5, f"{MINUTES} 60"),
    ({"exit_duration_in_mins": 60}, {"world": OtherRank(1, 1, 1)}, 5, "signal on another rank"),
    ({"exit_duration_in_mins": 60}, {"world": OtherRank(0, 1, 1)}, 5, NO_DATA),
    # Of several reasons, one.
    *(
        ({"exit_interval": 10, "exit_duration_in_mins": 1.0}, {"received": "SIGTERM", "seconds_ago": 100}, *last)
        for last in ((100, "the run is complete"), (90, "--exit-interval 10"), (91, "signal SIGTERM"))
    ),
]
"""Flags, what happened, the iteration, and the reason for which the run ends."""


@pytest.mark.parametrize(("flags", "facts", "iteration", "reason"), REASONS)
def test_why_a_run_ends(flags: dict[str, Any], facts: dict[str, Any], iteration: int, reason: str | None) -> None:
    assert stop(TrainingConfig(**flags), **facts).agree(iteration) == reason


def test_a_run_pauses_at_every_multiple_of_the_exit_interval() -> None:
    paused = stop(TrainingConfig(exit_interval=30))
    reasons = [paused.agree(iteration) for iteration in range(101)]
    assert [number for number, reason in enumerate(reasons) if reason] == [30, 60, 90, 100]
    assert reasons[30] == "--exit-interval 30"


def test_a_run_resumed_at_a_pause_goes_on() -> None:
    """Else a recipe that is started again and again would never get past its first pause."""
    resumed = stop(TrainingConfig(exit_interval=30))
    resumed.first_iteration = 30
    assert [number for number in range(30, 100) if resumed.agree(number)] == [60, 90]


@dataclass
class Alarm(RankAlarm):
    message: str
    has_failed = False

    def raise_on_all_ranks(self) -> None:
        raise DataError(self.message)


@pytest.mark.parametrize(("failed", "message"), [((1, 0), "first"), ((0, 1), "second"), ((1, 1), "first")])
def test_an_alarm_on_another_rank_ends_this_one(failed: tuple[int, int], message: str) -> None:
    here = stop(world=OtherRank(1, 0, 0, *failed))
    here.alarms = (Alarm("first"), Alarm("second"))
    with pytest.raises(DataError, match=message):
        here.agree(5)


def test_a_rank_without_data_stops_with_the_others_unless_a_signal_came_meanwhile() -> None:
    here = stop()
    assert here.agree(5, lambda: False) == NO_DATA

    def signalled() -> bool:
        here.signals.received = "SIGTERM"
        return False

    assert here.agree(5, signalled) == "signal SIGTERM"
    # After a signal nobody waits for data.
    assert here.agree(5, lambda: pytest.fail("has waited")) == "signal SIGTERM"
    assert here.agree(100, lambda: pytest.fail("has waited")) == "the run is complete"


def test_a_reason_that_every_rank_knows_needs_no_flags() -> None:
    """The loader is not asked for data that no iteration will read."""
    paused = stop(TrainingConfig(exit_interval=30), received="SIGTERM")
    assert list(paused.local_flags(30, lambda: pytest.fail("has waited"))) == [False] * 3
    assert paused.reason(30, [0.0] * 3) == "--exit-interval 30"
