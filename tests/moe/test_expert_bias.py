"""The bias of experts: exact updates by the counts of the global batch, and none in skipped steps."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.core.moe.balance import BalanceRule, ExpertBalance, RouterBalance
from megatron.core.moe.routing import RoutingRule
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.optimizer import StepResult
from megatron.core.topology import single_process
from megatron.metrics.timers import Timers
from megatron.training.loop.step import train_step
from megatron.training.train_module import TrainModule
from tests.moe.routers import ALONE, CPU, SEQUENCE, balance_of, finish, logits_of, observe


def biased_router(counts: Sequence[int]) -> tuple[ExpertBalance, RouterBalance]:
    """A router that has counted ``counts``."""
    rule = RoutingRule(len(counts), 1, score_function="sigmoid")
    balance = ExpertBalance(rule, BalanceRule(bias_update_rate=1e-3), (0,), ALONE, ALONE, CPU)
    router = balance.add_router(0)
    router.counts += torch.tensor(counts)
    return balance, router


@pytest.mark.parametrize(
    ("counts", "signs"),
    (
        ((4, 4, 4, 4), (0, 0, 0, 0)),
        ((3, 5, 4, 4), (1, -1, 0, 0)),
        ((3, 3, 4), (1, 1, -1)),  # a mean that no number has: 10/3
        ((0, 0, 0, 7), (1, 1, 1, -1)),
        # Differences that neither fp32 nor bf16 counts have.
        ((2**30, 2**30 + 1, 2**30 - 1), (0, -1, 1)),
        ((257, 256, 258), (0, 1, -1)),
    ),
)
def test_the_bias_moves_by_the_sign_of_exact_counts(counts: Sequence[int], signs: Sequence[int]) -> None:
    balance, router = biased_router(counts)
    assert router.expert_bias is not None
    expected = torch.zeros(len(counts))
    for _ in range(3):
        finish(balance)
        expected += 1e-3 * torch.tensor(signs, dtype=torch.float32)
    assert router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, expected)


class StepParts:
    """Executor, data parallelism and optimizer of a step whose tokens all choose the last of three experts."""

    def __init__(self, router: RouterBalance, loss: float, is_applied: bool) -> None:
        self.router, self.loss, self.is_applied = router, loss, is_applied

    def train(self, microbatches: object, num_microbatches: int, scale: float) -> Tensor:
        self.router.observe(torch.zeros(9, 3), torch.full((9, 1), 2), num_sequences=1)
        return torch.tensor([self.loss, 9.0])

    def step(self, hyperparameters: object, gradient_factor: float, accepts: object) -> StepResult:
        return StepResult(grad_norm=1.0, is_applied=self.is_applied, metrics={"num_zeros": 2.0})

    def nothing(self, *arguments: object) -> None:
        pass

    start_grad_accumulation = finish_grad_sync = finish_skipped_step = nothing


@pytest.mark.parametrize(("loss", "is_applied"), ((1.0, True), (1.0, False), (math.nan, True)))
def test_a_skipped_step_changes_no_bias(loss: float, is_applied: bool) -> None:
    balance, router = biased_router((9, 9, 0))  # counts of the step before
    parts: Any = StepParts(router, loss, is_applied)
    scaler = build_loss_scaler(PrecisionConfig())
    module = TrainModule(parts, parts, parts, scaler, single_process(), experts=balance)
    hyperparameters: Any = None
    outcome = train_step(module, iter(()), hyperparameters, num_microbatches=1, expected_tokens=9, timers=Timers(0))
    assert router.expert_bias is not None
    is_updated = is_applied and loss == 1.0
    assert outcome.is_skipped is not is_updated
    expected = torch.tensor([1.0, 1.0, -1.0]) * 1e-3 if is_updated else torch.zeros(3)
    assert torch.equal(router.expert_bias, expected)
    assert outcome.metrics == ({} if math.isnan(loss) else {"num_zeros": 2.0, "expert_load_max": 3.0})


def test_the_bias_is_fp32_when_the_model_is_bf16() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        balance, router = biased_router((300, 301, 299))  # equal counts in bf16
        for _ in range(1000):
            finish(balance)
    finally:
        torch.set_default_dtype(before)
    assert router.expert_bias is not None and router.expert_bias.dtype == torch.float32
    assert router.expert_bias.tolist() == pytest.approx([0.0, -1.0, 1.0], abs=1e-4)


def test_the_state_is_the_biases_of_the_routers() -> None:
    balance, router = biased_router((0, 5, 1))
    finish(balance)
    assert list(balance.state()) == ["layers.0.mlp.router.expert_bias"]
    # Checkpoints load in place.
    assert balance.state()["layers.0.mlp.router.expert_bias"] is router.expert_bias
    assert balance_of(BalanceRule((SEQUENCE,))).state() == {}


def test_the_bias_alone_balances_fixed_logits() -> None:
    rule = RoutingRule(8, 2, score_function="sigmoid")
    balance = ExpertBalance(rule, BalanceRule(bias_update_rate=1e-2), (0,), ALONE, ALONE, CPU)
    router = balance.add_router(0)
    logits = logits_of(rule, length=256, sequences=1)
    loads = []
    for _ in range(200):
        balance.start_step(1.0)
        observe(router, logits, rule)
        loads.append(finish(balance)["expert_load_max"])
    assert loads[0] > 1.5 and loads[-1] < 1.2
