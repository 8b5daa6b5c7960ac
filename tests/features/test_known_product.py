"""The known product is exact, is tested at its interval, and ends the run of all ranks if it is wrong."""

from typing import cast

import pytest
import torch

from megatron.config.training import TrainingConfig
from megatron.core.control import ControlGroup
from megatron.core.topology import single_process
from megatron.errors import SilentCorruptionError
from megatron.features.known_product.listener import KnownAnswer, KnownProduct, expected_product, operands
from megatron.operation.signals import SignalWatch
from megatron.training.loop.step import StopConditions
from megatron.training.loop.trainer import Trainer

CPU, NO_TRAINER = torch.device("cpu"), cast(Trainer, None)
ALONE = ControlGroup((0,), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [64, 256])
def test_the_product_is_exact_in_every_format_and_order_of_addition(dtype: torch.dtype, size: int) -> None:
    left, right = operands(size, dtype, CPU)
    expected = expected_product(size, dtype, CPU)
    assert torch.equal(expected.long(), left.long() @ right.long())
    assert torch.equal(left @ right, expected)
    in_parts = torch.zeros_like(expected)
    for start in range(0, size, 48):
        in_parts += left[:, start : start + 48] @ right[start : start + 48]
        assert in_parts.abs().max() < 256
    assert torch.equal(in_parts, expected)
    assert expected.unique().numel() > 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_wrong_bit_is_counted(dtype: torch.dtype) -> None:
    product = KnownProduct(CPU, dtype)
    assert product.count_errors() == 0
    product.expected.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])[5, 6] ^= 1
    assert product.count_errors() == 1


class Product(KnownProduct):
    """A product whose numbers of wrong elements are given."""

    def __init__(self, *errors: int) -> None:
        super().__init__(CPU, torch.float32)
        self.errors = list(errors)

    def count_errors(self) -> int:
        return self.errors.pop(0)


def test_it_is_tested_at_its_interval_and_ends_the_run_with_the_flags_of_a_step() -> None:
    product, now = Product(0, 0, 0, 3), 0.0
    known = KnownAnswer(ALONE, [product], 100.0, clock=lambda: now)
    assert len(product.errors) == 3, "tested at the start"
    for later, left in ((99.0, 3), (100.0, 2), (150.0, 2), (201.0, 1)):
        now = later
        known.on_iteration_start(NO_TRAINER)
        assert len(product.errors) == left and not known.has_failed
    now = 400.0
    known.on_iteration_start(NO_TRAINER)
    world, alarms = single_process().world, (known,)
    stop = StopConditions(10, TrainingConfig(), SignalWatch(), world, CPU, started=0.0, alarms=alarms)
    flags = stop.local_flags(5)
    assert flags[-1]
    with pytest.raises(SilentCorruptionError, match="3 elements of a known product in float32 are wrong on rank 0"):
        stop.reason(5, [float(flag) for flag in flags])


def test_a_wrong_product_at_the_start_ends_the_run_and_none_is_computed_without_an_interval() -> None:
    product = Product(1)
    KnownAnswer(ALONE, [product], 0.0).on_iteration_start(NO_TRAINER)
    with pytest.raises(SilentCorruptionError, match="1 elements of a known product in float32 are wrong on rank 0"):
        KnownAnswer(ALONE, [product], 100.0)
