"""The optimizer over param_shards does what torch's does over a plain list of parameters."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.core.activations import HostCopies
from megatron.core.data_parallel.buffered import BufferedDataParallel
from megatron.core.gradient import main_grad_of
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.optimizer import (
    Optimizer,
    OptimizerKernels,
    StepResult,
    clip_coefficient,
    torch_adam,
    torch_squared_norm,
)
from megatron.core.parameter import ParameterInfo, empty_parameter, sharded_boxes
from megatron.core.precision import NumberFormats
from megatron.core.topology import single_process
from tests.late_transport import late_host_copies

SHAPES: list[tuple[int, ...]] = [(6, 4), (4,), (3, 5), (5,)]
"""Matrices decay, vectors (norms) do not."""
RATE = 0.01
ADAM = OptimizerConfig(weight_decay=0.1, clip_grad=0.5, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
UNCLIPPED = replace(ADAM, clip_grad=0.0)
SGD = replace(ADAM, optimizer="sgd", sgd_momentum=0.7)


def start_values(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


class Run:
    """Parameters in a buffer, one process, and their optimizer."""

    def __init__(
        self,
        config: OptimizerConfig,
        weight_dtype: torch.dtype = torch.float64,
        gradient_dtype: torch.dtype = torch.float64,
        values: list[Tensor] | None = None,
    ) -> None:
        self.parameters: list[nn.Parameter] = []
        for number, value in enumerate(start_values() if values is None else values):
            shapes = sharded_boxes([value.shape[0]], value.shape[1:], 0, 1)
            info = ParameterInfo(f"p{number}", *shapes, None, value.ndim > 1, tensor_parallel_sharded=value.ndim > 1)
            parameter = empty_parameter(info, weight_dtype, "cpu")
            with torch.no_grad():
                parameter.copy_(value)
            self.parameters.append(parameter)
        formats = NumberFormats(weight_dtype, gradient_dtype, master=gradient_dtype)
        self.data_parallel = BufferedDataParallel(self.parameters, formats, single_process(), ParallelConfig())
        self.optimizer = Optimizer(config, self.data_parallel, single_process())

    def deliver(self, values: list[Tensor]) -> None:
        """Gradients as backward would deliver them."""
        for parameter, value in zip(self.parameters, values):
            main_grad = main_grad_of(parameter)
            assert main_grad is not None
            main_grad.add(value)
        self.data_parallel.finish_grad_sync()

    def step(self, number: int, rate: float = RATE, factor: float = 1.0) -> StepResult:
        self.deliver(gradients(number))
        return self.optimizer.step(Hyperparameters(rate), factor)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def everything(self) -> list[Tensor]:
        """Weights, masters, moments, and the number of steps."""
        state = [state.tensor.clone() for state in self.optimizer.state()]
        return [*self.weights(), *state, torch.tensor(self.optimizer.num_steps)]


def torch_twin(
    config: OptimizerConfig, values: list[Tensor] | None = None
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """A plain list of parameters and torch's optimizer with three groups: the first parameter, matrices, vectors."""
    parameters = [nn.Parameter(value) for value in values or start_values()]
    first, *others = parameters
    groups: list[dict[str, Any]] = [
        {"params": [first], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    if config.optimizer == "sgd":
        return parameters, torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, foreach=False)
    betas = (config.adam_beta1, config.adam_beta2)
    return parameters, torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, foreach=False)


def assert_all_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "config",
    [ADAM, UNCLIPPED, SGD, replace(SGD, sgd_momentum=0.0, clip_grad=0.0)],
    ids=["adam", "adam unclipped", "sgd", "plain sgd"],
)
def test_steps_are_those_of_torch(config: OptimizerConfig) -> None:
    """Clipping, decay groups, a rate that changes, and a factor that turns sums into means."""
    run = Run(config)
    parameters, twin = torch_twin(config)
    for number in range(5):
        rate, factor = RATE * (number + 1), 0.3
        norm = clipped_norm(config, parameters, number, factor)
        for group in twin.param_groups:
            group["lr"] = rate
        twin.step()
        result = run.step(number, rate, factor)
        assert result.is_applied and result.metrics == {"grad_norm": result.grad_norm}
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
        assert_all_close(run.weights(), [parameter.detach() for parameter in parameters], 1e-12)
    assert config.clip_grad == 0.0 or result.grad_norm > config.clip_grad, "nothing was clipped"


def clipped_norm(config: OptimizerConfig, parameters: list[nn.Parameter], number: int, factor: float = 1.0) -> float:
    """Give torch's parameters the clipped gradients of a step; their norm before."""
    for parameter, gradient in zip(parameters, gradients(number)):
        parameter.grad = (gradient * factor).to(parameter.dtype)
    return float(nn.utils.clip_grad_norm_(parameters, config.clip_grad or math.inf, foreach=False))


def test_embedding_and_head_may_have_a_learning_rate_and_all_a_weight_decay_of_the_step() -> None:
    run = Run(ADAM)
    # The first parameter as an embedding; its facts are what the optimizer goes by.
    for shard in run.data_parallel.param_shards:
        object.__setattr__(shard.info, "is_vocabulary", shard.info.name == "p0")
    run.optimizer = Optimizer(ADAM, run.data_parallel, single_process())
    parameters, twin = torch_twin(replace(ADAM, weight_decay=0.7))
    for group, rate in zip(twin.param_groups, (5 * RATE, RATE, RATE), strict=True):
        group["lr"] = rate
    for number in range(3):
        run.deliver(gradients(number))
        run.optimizer.step(Hyperparameters(RATE, vocabulary_learning_rate=5 * RATE, weight_decay=0.7), 1.0)
        clipped_norm(ADAM, parameters, number)
        twin.step()
        assert_all_close(run.weights(), [parameter.detach() for parameter in parameters], 1e-12)


@pytest.mark.parametrize("number", [None, 1, 2])
def test_weights_are_cut_in_as_many_buckets_as_asked(number: int | None) -> None:
    parameters = Run(ADAM).parameters
    formats = NumberFormats.uniform(torch.float64)
    config = ParallelConfig(ddp_num_buckets=number)
    data_parallel = BufferedDataParallel(parameters, formats, single_process(), config)
    assert len(data_parallel._buckets) == (number or 1)


@pytest.mark.parametrize(
    ("norm", "limit", "expected"),
    [(2.0, 1.0, 1 / (2.0 + 1e-6)), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (1e6, 0.0, 1.0), (0.0, 1.0, 1.0)],
)
def test_clipping_brings_the_norm_down_to_the_limit_and_never_up(norm: float, limit: float, expected: float) -> None:
    assert clip_coefficient(norm, limit) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "size", [2**23 + 5, pytest.param(2**28, marks=pytest.mark.slow(reason="1 GiB of memory"))], ids=["8M", "268M"]
)
def test_the_norm_of_a_large_shard_is_exact_to_rounding_and_equals_that_of_its_parts(size: int) -> None:
    """A sum in fp32, one element after the other, is short by percents at the size of an embedding."""
    part = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    shard = part.repeat(-(-size // part.numel()))[:size]
    whole, rest = divmod(size, part.numel())
    expected = whole * float(part.double().square().sum()) + float(part[:rest].double().square().sum())
    assert float(torch_squared_norm([shard])) == pytest.approx(expected, rel=1e-7)
    assert float(torch_squared_norm(list(shard.chunk(8)))) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_squared_norm_counts_every_element_of_tensors_of_any_size(dtype: torch.dtype) -> None:
    """Sizes around that from which the host adds in rows."""
    tensors = [torch.ones(size, dtype=dtype) for size in (0, 1, 65535, 65536, 65537, 17 * 4096 - 1)]
    assert float(torch_squared_norm(tensors)) == pytest.approx(sum(tensor.numel() for tensor in tensors), rel=1e-7)


def test_the_weight_norm_is_that_of_all_weights() -> None:
    expected = math.sqrt(sum(float(value.square().sum()) for value in start_values()))
    assert Run(ADAM).optimizer.weight_norm() == pytest.approx(expected, rel=1e-12)


# bf16 with fp32 master weights


def masters_of(run: Run) -> list[Tensor]:
    masters = {state.info.name: state.tensor for state in run.optimizer.state() if state.kind == "master"}
    return [masters[f"p{number}"].view(shape) for number, shape in enumerate(SHAPES)]


def test_bf16_weights_are_the_rounded_masters_of_torchs_steps_in_fp32() -> None:
    """So updates too small for bf16 add up."""
    run = Run(ADAM, torch.bfloat16, torch.float32)
    assert run.optimizer.has_master_weights
    parameters, twin = torch_twin(ADAM, [weight.float() for weight in run.weights()])
    for group in twin.param_groups:
        group["lr"] = RATE
    for number in range(5):
        run.step(number)
        clipped_norm(ADAM, parameters, number)
        twin.step()
    masters = masters_of(run)
    assert all(master.dtype == torch.float32 for master in masters)
    assert_all_close(masters, [parameter.detach() for parameter in parameters], 1e-5)
    for weight, master in zip(run.weights(), masters):
        assert torch.equal(weight, master.to(torch.bfloat16))


def test_master_weights_are_taken_anew_from_loaded_weights() -> None:
    run = Run(ADAM, torch.bfloat16, torch.float32)
    run.step(0)
    with torch.no_grad():
        for parameter in run.parameters:
            parameter.fill_(0.5)
    run.optimizer.reload_master_weights()
    assert all((master == 0.5).all() for master in masters_of(run))
    run.optimizer.publish()
    assert all((weight == 0.5).all() for weight in run.weights())


# Gradients that are not finite


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [ADAM, UNCLIPPED, SGD], ids=["adam", "unclipped", "sgd"])
def test_a_norm_that_is_not_finite_changes_nothing(
    poison: float, weight_dtype: torch.dtype, config: OptimizerConfig
) -> None:
    run, undisturbed = (Run(config, weight_dtype, torch.float32) for _ in range(2))
    for either in (run, undisturbed):
        either.step(0)
    before = run.everything()
    poisoned = gradients(1)
    poisoned[2][1, 3] = poison
    run.deliver(poisoned)
    result = run.optimizer.step(Hyperparameters(RATE), 1.0)
    assert not result.is_applied
    assert not math.isfinite(result.grad_norm)
    assert_all_close(run.everything(), before, 0.0)
    # And the next step goes on as if nothing had happened.
    for either in (run, undisturbed):
        either.step(2)
    assert_all_close(run.everything(), undisturbed.everything(), 0.0)


# State


@pytest.mark.parametrize(
    ("config", "kinds"),
    [(ADAM, {"exp_avg", "exp_avg_sq"}), (SGD, {"momentum_buffer"}), (replace(SGD, sgd_momentum=0.0), set())],
)
def test_the_state_exists_before_the_first_step(config: OptimizerConfig, kinds: set[str]) -> None:
    """So that it can be loaded, and counted by a dry run. Master weights are only where the model is narrower."""
    for dtype, masters in ((torch.bfloat16, {"master"}), (torch.float32, set())):
        optimizer = Run(config, dtype, torch.float32).optimizer
        assert optimizer.has_master_weights == bool(masters)
        assert {state.kind for state in optimizer.state()} == kinds | masters


def load(run: Run, saved: Run) -> None:
    """Weights, state and step count, as from a checkpoint."""
    with torch.no_grad():
        for target, source in zip(run.parameters, saved.parameters):
            target.copy_(source)
    for state, source_state in zip(run.optimizer.state(), saved.optimizer.state(), strict=True):
        assert (state.kind, state.info.name) == (source_state.kind, source_state.info.name)
        state.tensor.copy_(source_state.tensor)
    run.optimizer.num_steps = saved.optimizer.num_steps
    if not run.optimizer.has_master_weights:
        run.optimizer.reload_master_weights()


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_and_step_count_carried_over_continue_bit_for_bit(
    config: OptimizerConfig, weight_dtype: torch.dtype
) -> None:
    old = Run(config, weight_dtype, torch.float32)
    for number in range(3):
        old.step(number)
    new = Run(config, weight_dtype, torch.float32, values=start_values(seed=1))
    load(new, old)
    for run in (old, new):
        run.step(3)
    assert_all_close(new.everything(), old.everything(), 0.0)


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adam", "sgd"])
def test_a_rank_that_owns_nothing_steps_too(config: OptimizerConfig) -> None:
    optimizer = Run(config, torch.bfloat16, torch.float32, values=[]).optimizer
    assert optimizer.count_zeros() == 0
    assert optimizer.step(Hyperparameters(RATE), 1.0) == StepResult(0.0, is_applied=True, metrics={"grad_norm": 0.0})
    assert list(optimizer.state()) == []
    assert optimizer.num_steps == 1, "the first rank saves the count, whatever it owns"
    assert optimizer.has_master_weights, "what all ranks know must not depend on what this one owns"


def test_the_optimizer_updates_and_measures_with_the_kernels_that_it_is_given() -> None:
    adam, squared_norm = Mock(wraps=torch_adam), Mock(side_effect=lambda tensors: 4 * torch_squared_norm(tensors))
    run, usual = Run(ADAM), Run(ADAM)
    kernels = OptimizerKernels(adam, squared_norm)
    run.optimizer = Optimizer(ADAM, run.data_parallel, single_process(), kernels)
    assert run.step(0).grad_norm == pytest.approx(2 * usual.step(0).grad_norm)
    adam.assert_called_once()


# The moving average of the weights


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_moving_average_follows_every_update(weight_dtype: torch.dtype) -> None:
    """By the definition, from the master weights after each update; a skipped update changes nothing."""
    dtype = torch.promote_types(weight_dtype, torch.float32)
    run = Run(replace(ADAM, ema_decay=0.7), weight_dtype, dtype)
    # The shards' master weights, which are the weights if these are as precise.
    masters = [shard.weight for shard in run.optimizer._shards]
    expected = [master.clone() for master in masters]
    for number in range(4):
        if number == 2:
            run.step(number, factor=math.nan)
        run.step(number, rate=0.1)
        expected = [0.7 * average + 0.3 * master for average, master in zip(expected, masters)]
    assert_all_close(list(run.optimizer.averages), expected, 1e-6 if dtype == torch.float32 else 1e-14)
    assert all(average.dtype == dtype for average in run.optimizer.averages)
    assert {state.kind for state in run.optimizer.state()} >= {"ema"}


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_model_has_the_average_for_an_evaluation_and_then_its_weights(weight_dtype: torch.dtype) -> None:
    run = Run(replace(ADAM, ema_decay=0.7), weight_dtype, torch.promote_types(weight_dtype, torch.float32))
    for number in range(3):
        run.step(number, rate=0.1)
    before, averages = run.everything(), [average.clone() for average in run.optimizer.averages]
    with run.optimizer.averaged():
        inside = run.weights()
    by_name = {shard.info.name: average for shard, average in zip(run.data_parallel.param_shards, averages)}
    for number, weight in enumerate(inside):
        assert torch.equal(weight.flatten(), by_name[f"p{number}"].to(weight_dtype))
    assert not any(torch.equal(one, other) for one, other in zip(inside, run.weights()))
    assert_all_close(run.everything(), before, 0.0)
    with pytest.raises(KeyError), run.optimizer.averaged():
        raise KeyError
    # Without the weights of the model.
    assert_all_close(run.everything()[4:], before[4:], 0.0)


# State in host memory

BF16_STATE = replace(ADAM, use_precision_aware_optimizer=True, exp_avg_dtype="bf16")


def with_offload(config: OptimizerConfig, fraction: float, overlaps: bool = True) -> OptimizerConfig:
    return replace(
        config,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
        overlap_cpu_optimizer_d2h_h2d=overlaps,
    )


@pytest.mark.parametrize(("fraction", "names"), [(0.5, ["p3", "p2", "p1"]), (1.0, ["p3", "p2", "p1", "p0"])], ids=str)
@pytest.mark.parametrize(
    ("config", "weight_dtype", "dtype"),
    [
        (ADAM, torch.float64, torch.float64),
        (SGD, torch.float32, torch.float32),
        (ADAM, torch.bfloat16, torch.float32),
        (BF16_STATE, torch.bfloat16, torch.float32),
    ],
    ids=["adam, fp64", "sgd, fp32", "adam, bf16", "bf16 moments"],
)
def test_updates_in_host_memory_give_the_same_bits(
    config: OptimizerConfig,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
    fraction: float,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies happen when they are waited for, as streams of their own may do. The state goes on with another share on
    the host, or none."""
    monkeypatch.setattr(HostCopies, "of", late_host_copies)
    config = replace(config, ema_decay=0.7)
    configs = [config, with_offload(config, fraction), with_offload(config, 1.5 - fraction, overlaps=False)]
    plain, offloaded = (Run(one, weight_dtype, dtype) for one in configs[:2])
    on_host = {state.info.name for state in offloaded.optimizer.state() if state.is_on_host}
    assert sorted(on_host, reverse=True) == names
    for number in range(3):
        norms = [run.step(number, rate=0.1).grad_norm for run in (plain, offloaded)]
        assert norms[0] == norms[1] and plain.optimizer.weight_norm() == offloaded.optimizer.weight_norm()
        assert_all_close(offloaded.everything(), plain.everything(), 0.0)
    with plain.optimizer.averaged(), offloaded.optimizer.averaged():
        assert_all_close(offloaded.weights(), plain.weights(), 0.0)
    loaded = [Run(one, weight_dtype, dtype, start_values(seed=1)) for one in configs]
    for run in loaded:
        load(run, offloaded)
    for run in (plain, *loaded):
        run.step(3, rate=0.1)
        assert_all_close(run.everything(), plain.everything(), 0.0)
