"""Muon against torch's, and the Newton-Schulz iteration against a singular value decomposition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.core.parameter import ParameterInfo, sharded_boxes
from megatron.core.topology import single_process
from megatron.errors import ConfigError
from megatron.update_rules.muon import COEFFICIENTS, Muon, newton_schulz, newton_schulz_coefficients, scale_factor
from tests.update_rules.bound import bind, run

SHAPES = [(48, 32), (32, 48), (40, 40)]
AS_TORCH = OptimizerConfig(optimizer="muon", muon_momentum=0.95, muon_coefficient_type="simple")

EXACT = replace(AS_TORCH, muon_num_ns_steps=12, muon_coefficient_type="polar_express")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(config: OptimizerConfig, steps: int) -> list[Tensor]:
    weights = [random(*shape, seed=number) for number, shape in enumerate(SHAPES)]
    gradients = [torch.zeros_like(weight) for weight in weights]
    groups, update = bind(config, weights, gradients, [0.1] * len(weights))
    seeds = iter(range(100, 1000))

    def next_gradient() -> None:
        for gradient in gradients:
            gradient.copy_(random(*gradient.shape, seed=next(seeds)))

    run(groups, update, range(steps), next_gradient)
    return weights


def trained_by_torch(nesterov: bool, adjust: str, steps: int) -> list[Tensor]:
    weights = [random(*shape, seed=number) for number, shape in enumerate(SHAPES)]
    optimizer = torch.optim.Muon(
        weights, lr=1e-2, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust
    )
    seeds = iter(range(100, 1000))
    for _ in range(steps):
        for weight in weights:
            weight.grad = random(*weight.shape, seed=next(seeds))
        optimizer.step()
    return weights


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize(
    ("adjust", "scale"),
    [
        ("original", replace(AS_TORCH, muon_scale_mode="shape_scaling")),
        ("match_rms_adamw", replace(AS_TORCH, muon_extra_scale_factor=0.2)),
    ],
    ids=["original", "match_rms_adamw"],
)
def test_steps_are_torchs(nesterov: bool, adjust: str, scale: OptimizerConfig) -> None:
    """Both iterate in bf16, of a matrix that torch rounds before it divides it by its norm, and we afterwards; three
    updates differ by that rounding alone. With the iteration in fp32 they differ from torch's in the same way."""
    config = replace(scale, muon_nesterov=nesterov)
    start, steps = trained(config, 0), 3
    for ours in (config, replace(config, muon_fp32_matmul_prec="high")):
        found = trained(ours, steps)
        for one, other, before in zip(found, trained_by_torch(nesterov, adjust, steps), start):
            moved = (other - before).norm()
            assert 0 < (one - other).norm() < 0.02 * moved


def exact_direction(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_a_converging_iteration_finds_the_orthogonal_factor(shape: tuple[int, int]) -> None:
    """Polar Express converges, so that twenty steps are an exact answer, up to the four digits of its coefficients."""
    matrix = random(*shape, seed=3, dtype=torch.float64)
    coefficients = newton_schulz_coefficients("polar_express", 20)
    assert len(coefficients) == 20
    torch.testing.assert_close(newton_schulz(matrix, coefficients, True), exact_direction(matrix), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_singular_values_come_close_to_one_and_vectors_stay(kind: str) -> None:
    matrix = random(16, 24, seed=4, dtype=torch.float64)
    coefficients = newton_schulz_coefficients(kind, 5)
    update = newton_schulz(matrix, coefficients, False)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    assert ((values > 0.5) & (values < 1.5)).all(), "the iteration was not applied to singular values at all"
    torch.testing.assert_close(update, left @ values.diag() @ right)


def test_a_matrix_of_zeros_gives_zeros() -> None:
    for in_bf16 in (False, True):
        assert not newton_schulz(torch.zeros(4, 6), newton_schulz_coefficients("quintic", 5), in_bf16).any()


@pytest.mark.parametrize(
    ("mode", "tall", "wide"), [("spectral", 4.0, 4.0), ("unit_rms_norm", 2.0, 0.5), ("shape_scaling", 2.0, 1.0)]
)
def test_scale_factors(mode: str, tall: float, wide: float) -> None:
    assert scale_factor(16, 4, mode) == tall
    assert scale_factor(4, 16, mode) == wide


def sections_of(config: OptimizerConfig, name: str, sections: list[int], matrix: Tensor) -> Tensor:
    info = ParameterInfo(f"layers.0.{name}.weight", *sharded_boxes(sections, (8,), 0, 1), None, True, True)
    update: Tensor = Muon.of(config).orthogonalize(info, matrix, single_process().tensor_parallel)
    return update


@pytest.mark.parametrize(
    ("name", "sections", "config", "is_split"),
    [
        ("self_attention.linear_qkv", [16, 4, 4], EXACT, True),
        ("self_attention.linear_qkv", [16, 4, 4], replace(EXACT, muon_no_split_qkv=True), False),
        ("mlp.linear_fc1", [12, 12], EXACT, False),
        ("mlp.linear_fc1", [12, 12], replace(EXACT, muon_split_fc1=True), True),
        ("mlp.linear_fc2", [24], replace(EXACT, muon_split_fc1=True), False),
    ],
)
def test_fused_weights_are_split_as_the_flags_say(
    name: str, sections: list[int], config: OptimizerConfig, is_split: bool
) -> None:
    matrix = random(24, 8, seed=5, dtype=torch.float64)
    parts = matrix.split(sections) if is_split else [matrix]
    expected = torch.cat([max(part.shape) ** 0.5 * exact_direction(part) for part in parts])
    torch.testing.assert_close(sections_of(config, name, sections, matrix), expected, rtol=0, atol=1e-2)


def test_refusals_name_the_flag_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match="--muon-nesterov needs --optimizer muon: add it, or remove"):
        OptimizerConfig(muon_nesterov=True).check()
    AS_TORCH.check()
