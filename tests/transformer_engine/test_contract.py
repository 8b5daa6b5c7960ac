"""Transformer Engine's interface means what our layers take it to mean: on the stand-in, and on the package itself
where it is installed and there is a GPU."""

import inspect
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.activations import Recomputed
from megatron.core.backends.transformer_engine import (
    TransformerEngine,
    TransformerEngineAttention,
    TransformerEngineFp8,
    TransformerEngineProvider,
    shared_buffers,
)
from megatron.core.device import Unavailable
from megatron.core.fp8 import ROLES
from megatron.core.gradient import MainGrad, attach_main_grad
from megatron.core.models.layer import BuildContext
from megatron.core.ops.attention import AttentionInputs, AttentionMask, AttentionShape, LocalAttention, fused_attention
from megatron.core.ops.attention_kernels import ReferenceAttention
from megatron.core.ops.documents import Documents
from megatron.core.ops.rope import apply_rotary, rotary_frequencies, rotary_table
from megatron.core.parameter import info_of
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.topology import single_process
from tests.stand_ins import transformer_engine

SIZE, OUTPUTS, LENGTH, BATCH = 64, (32, 16, 16), 16, 2
CONFIG = TransformerConfig(1, SIZE, SIZE, 2, 1, 16, 64, 64, LENGTH, init_method_std=1.0)
STALE = 1e6
"""What the last step left in a buffer."""
DELAYED = PrecisionConfig(
    bf16=True, fp8_format="hybrid", fp8_margin=1, fp8_amax_history_len=3, fp8_amax_compute_algo="max"
)
TENSORWISE = PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise")


class Bench:
    """One make of the package, and what it is tested with."""

    def __init__(self, name: str) -> None:
        self.is_real = name == "installed"
        self.device = torch.device("cuda" if self.is_real else "cpu")
        self.dtype = torch.bfloat16 if self.is_real else torch.float64
        self.tolerance = 2e-2 if self.is_real else 1e-12

    @cached_property
    def engine(self) -> TransformerEngine:
        return TransformerEngine.find(self.device) if self.is_real else transformer_engine()

    def context(self, precision: PrecisionConfig | None = None, is_fused: bool = True) -> BuildContext:
        topology = single_process(self.device)
        fp8 = None if precision is None else TransformerEngineFp8(self.engine, precision, topology.stage_ranks)
        return BuildContext(
            TensorParallel(topology.tensor_parallel),
            self.dtype,
            self.device,
            ReferenceAttention(),
            provider=TransformerEngineProvider(self.engine, fuses_weight_gradient=is_fused),
            fp8=fp8,
        )

    def column(self, context: BuildContext, config: TransformerConfig = CONFIG) -> nn.Module:
        return self._filled(context.provider.norm_linear("norm", "linear", OUTPUTS, config, context))

    def row(self, context: BuildContext) -> nn.Module:
        return self._filled(context.provider.row_linear("linear", SIZE, CONFIG, context))

    def _filled(self, layer: nn.Module) -> nn.Module:
        for parameter in layer.parameters():
            parameter.data.copy_(self.numbers(*parameter.shape, seed=7) / 8 + (parameter.dim() == 1))
        return layer

    def numbers(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device, self.dtype)

    def inputs(self, seed: int = 0) -> Tensor:
        return self.numbers(LENGTH, BATCH, SIZE, seed=seed).requires_grad_()

    def is_close(self, found: Tensor, wanted: Tensor) -> bool:
        error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        return bool(error < self.tolerance)


@pytest.fixture(params=["stand-in", "installed"])
def bench(request: pytest.FixtureRequest) -> Bench:
    bench = Bench(request.param)
    if bench.is_real:
        if not torch.cuda.is_available():
            pytest.skip("Transformer Engine needs a GPU")
        try:
            _ = bench.engine
        except Unavailable as error:
            pytest.skip(f"Transformer Engine {error}")
    return bench


def parameters_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {info_of(parameter).name: parameter for parameter in layer.parameters()}


def with_main_grads(layer: nn.Module, dtype: torch.dtype) -> dict[str, MainGrad]:
    """A stale buffer for each parameter, by its name."""
    main_grads = {}
    for name, parameter in parameters_of(layer).items():
        main_grads[name] = MainGrad(torch.full_like(parameter, STALE, dtype=dtype))
        attach_main_grad(parameter, main_grads[name])
    return main_grads


def gradients_by_autograd(
    bench: Bench, layer: nn.Module, is_column: bool, seed: int, is_zero_centered: bool = False
) -> tuple[Tensor, ...]:
    """Output, and gradients of input, weight and gain, by the definition."""
    inputs = bench.inputs(seed).detach().double().requires_grad_()
    weights = {name: p.detach().double().requires_grad_() for name, p in parameters_of(layer).items()}
    gain = weights["norm.weight"] + float(is_zero_centered) if is_column else None
    normed = F.rms_norm(inputs, (SIZE,), gain, 1e-5) if is_column else inputs
    output = normed @ weights["linear.weight"].t()
    output.backward(bench.numbers(*output.shape, seed=seed + 100).double())
    gradients = [weights[name].grad for name in ("linear.weight", "norm.weight") if name in weights]
    assert inputs.grad is not None
    return output.detach(), inputs.grad, *[gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", ["column", "row", "column, apply_layernorm_1p"])
def test_a_layer_adds_its_gradients_to_their_buffers(bench: Bench, kind: str, is_fused: bool) -> None:
    """The first microbatch overwrites what is stale, the second adds, and each is one delivery."""
    kind, _, one_plus = kind.partition(", ")
    config = replace(CONFIG, apply_layernorm_1p=bool(one_plus))
    context = bench.context(is_fused=is_fused)
    layer = bench.row(context) if kind == "row" else bench.column(context, config)
    main_grads = with_main_grads(layer, torch.promote_types(bench.dtype, torch.float32))
    deliveries: list[str] = []
    for name, main_grad in main_grads.items():
        main_grad.on_accumulated = lambda name=name: deliveries.append(name)
    wanted = [gradients_by_autograd(bench, layer, kind == "column", seed, bool(one_plus)) for seed in (0, 1)]
    for seed in (0, 1):
        inputs = bench.inputs(seed)
        output = layer(inputs)
        output.backward(bench.numbers(*output.shape, seed=seed + 100))
        assert bench.is_close(output, wanted[seed][0])
        assert inputs.grad is not None and bench.is_close(inputs.grad, wanted[seed][1])
        assert sorted(deliveries) == sorted([*main_grads] * (seed + 1))
    assert sorted(main_grads) == (["linear.weight", "norm.weight"] if kind == "column" else ["linear.weight"])
    for name, place in (("linear.weight", 2), ("norm.weight", 3)):
        if name in main_grads:
            assert bench.is_close(main_grads[name].buffer, wanted[0][place] + wanted[1][place]), name
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_buffer_is_lent_for_the_backward_pass_alone(bench: Bench, is_fused: bool) -> None:
    layer = bench.row(bench.context(is_fused=is_fused))
    weight = parameters_of(layer)["linear.weight"]
    main_grad = MainGrad()
    allocated: list[Tensor] = []

    def allocate() -> None:
        main_grad.storage = torch.full_like(weight, STALE, dtype=torch.promote_types(bench.dtype, torch.float32))
        allocated.append(main_grad.storage)

    def release() -> None:
        main_grad.storage = None

    main_grad.allocate, main_grad.on_accumulated = allocate, release
    attach_main_grad(weight, main_grad)
    output = layer(bench.inputs())
    assert not allocated
    output.backward(bench.numbers(*output.shape, seed=100))
    assert len(allocated) == 1 and not hasattr(weight, "main_grad")
    assert bench.is_close(allocated[0], gradients_by_autograd(bench, layer, False, 0)[2])


@pytest.mark.parametrize("is_fused", [True, False])
def test_without_a_buffer_the_gradient_goes_to_autograd(bench: Bench, is_fused: bool) -> None:
    layer = bench.column(bench.context(is_fused=is_fused))
    output = layer(bench.inputs())
    output.backward(bench.numbers(*output.shape, seed=100))
    for name, wanted in zip(("linear.weight", "norm.weight"), gradients_by_autograd(bench, layer, True, 0)[2:]):
        gradient = parameters_of(layer)[name].grad
        assert gradient is not None and bench.is_close(gradient, wanted)


def test_without_gradients_there_is_no_graph(bench: Bench) -> None:
    with torch.no_grad():
        assert not bench.column(bench.context())(bench.inputs()).requires_grad


@pytest.mark.parametrize("in_documents", [False, True])
def test_attention_is_the_definition(bench: Bench, in_documents: bool) -> None:
    shape, length = AttentionShape(4, 2, 32), 32
    starts = torch.zeros(BATCH, length, dtype=torch.bool)
    starts[0, 11] = starts[1, 19] = True
    spans = Documents(starts, True, False, bench.device).attention if in_documents else None
    table = rotary_table(rotary_frequencies(32, 10000.0), torch.arange(length), bench.dtype).to(bench.device)
    results = []
    for kernel in (TransformerEngineAttention(bench.engine), ReferenceAttention()):
        leaf = bench.numbers(length, BATCH, 8 * 32, seed=3).requires_grad_()
        output = fused_attention(
            apply_rotary(leaf * 1.0, table, shape.rotated_size), shape, LocalAttention(kernel), spans
        )
        output.backward(bench.numbers(*output.shape, seed=4))
        assert leaf.grad is not None
        results.append((output, leaf.grad))
    for found, wanted in zip(*results):
        assert bench.is_close(found, wanted)


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_beside_fp8_layers_is_not_in_fp8(bench: Bench, is_causal: bool) -> None:
    fp8 = bench.context(DELAYED).fp8
    assert fp8 is not None
    kernel = TransformerEngineAttention(bench.engine)
    query = bench.numbers(BATCH, 4, LENGTH, 32, seed=1)
    with torch.no_grad():
        inputs = AttentionInputs(query, query, query, mask=AttentionMask(is_causal))
        wanted = ReferenceAttention().forward(inputs).output
        with fp8.forward_pass():
            assert bench.is_close(kernel.forward(inputs).output, wanted)


def step_in_fp8(
    bench: Bench, layer: nn.Module, context: BuildContext, scale: float, recomputed: bool = False
) -> Tensor:
    """One microbatch, in which all is ``scale`` times as large; the gradient of the input."""
    assert context.fp8 is not None
    inputs = (bench.inputs().detach() * scale).requires_grad_()
    with context.fp8.forward_pass():
        output = Recomputed(layer)(inputs) if recomputed else layer(inputs)
    output.backward(bench.numbers(*output.shape, seed=5) * scale)
    assert inputs.grad is not None
    return inputs.grad


def after_three_steps(bench: Bench) -> tuple[nn.Module, TransformerEngineFp8]:
    """A layer with delayed scales, after magnitudes of 1, 4 and 2."""
    context = bench.context(DELAYED)
    layer = bench.row(context)
    with_main_grads(layer, torch.promote_types(bench.dtype, torch.float32))
    for scale in (1.0, 4.0, 2.0):
        step_in_fp8(bench, layer, context, scale)
    assert isinstance(context.fp8, TransformerEngineFp8)
    return layer, context.fp8


def test_delayed_scales_follow_the_magnitudes(bench: Bench) -> None:
    """State has our form, whoever computes: columns by role, the newest magnitude first."""
    layer, fp8 = after_three_steps(bench)
    state = fp8.state()
    amax = torch.stack(
        [
            bench.inputs().detach().abs().amax(),
            parameters_of(layer)["linear.weight"].detach().abs().amax(),
            bench.numbers(LENGTH, BATCH, sum(OUTPUTS), seed=5).abs().amax(),
        ]
    ).float()
    largest = torch.tensor([448.0, 448.0, 57344.0], device=bench.device)
    grown = torch.tensor([4.0, 1.0, 4.0], device=bench.device)
    torch.testing.assert_close(state["linear/scale"], largest / (amax * grown) / 2, rtol=1e-2, atol=0.0)
    history = state["linear/amax_history"]
    assert history.shape == (len(ROLES), 3)
    for place, factor in ((0, 2.0), (1, 4.0)):
        torch.testing.assert_close(history[[0, 2], place], amax[[0, 2]] * factor, rtol=1e-2, atol=0.0)


def test_delayed_state_comes_back(bench: Bench) -> None:
    """Into as long a history, and into shorter ones the newest."""
    saved = {name: tensor.clone() for name, tensor in after_three_steps(bench)[1].state().items()}
    for length in (1, 2, 3, 5):
        other = bench.context(replace(DELAYED, fp8_amax_history_len=length))
        bench.row(other)
        assert other.fp8 is not None
        other.fp8.load(saved)
        state = other.fp8.state()
        assert torch.equal(state["linear/scale"], saved["linear/scale"])
        known = min(length - 1, 2)
        assert torch.equal(state["linear/amax_history"][:, :known], saved["linear/amax_history"][:, :known])
        assert not state["linear/amax_history"][:, known:].any()


def test_weights_are_quantised_anew_when_a_step_has_changed_them(bench: Bench) -> None:
    context = bench.context(TENSORWISE)
    layer = bench.row(context)
    with_main_grads(layer, torch.promote_types(bench.dtype, torch.float32))
    assert context.fp8 is not None
    context.fp8.start_step()
    before = step_in_fp8(bench, layer, context, 1.0)
    assert torch.equal(step_in_fp8(bench, layer, context, 1.0), before)
    context.fp8.finish_step()
    parameters_of(layer)["linear.weight"].data.neg_()
    assert torch.equal(step_in_fp8(bench, layer, context, 1.0), -before)


def test_what_runs_again_is_in_fp8_again(bench: Bench) -> None:
    found = []
    for recomputed in (False, True):
        context = bench.context(TENSORWISE)
        layer = bench.column(context)
        main_grads = with_main_grads(layer, torch.promote_types(bench.dtype, torch.float32))
        found.append((step_in_fp8(bench, layer, context, 1.0, recomputed), main_grads["linear.weight"].buffer))
    for kept, again in zip(*found):
        assert torch.equal(kept, again)
    exact = bench.column(bench.context())
    main_grads = with_main_grads(exact, torch.promote_types(bench.dtype, torch.float32))
    output = exact(bench.inputs())
    output.backward(bench.numbers(*output.shape, seed=5))
    assert not torch.equal(main_grads["linear.weight"].buffer, found[0][1])


def test_a_layer_in_bf16_among_others_in_fp8_stays_so(bench: Bench) -> None:
    context = bench.context(DELAYED)
    assert context.fp8 is not None
    layer = bench.row(replace(context, fp8=None))
    with torch.no_grad():
        wanted = layer(bench.inputs())
        with context.fp8.forward_pass():
            assert torch.equal(layer(bench.inputs()), wanted)
    assert context.fp8.state() == {}


@pytest.mark.parametrize(
    ("precision", "modes"),
    [
        (PrecisionConfig(bf16=True), ["NONE"]),
        (DELAYED, ["FP8"]),
        (replace(TENSORWISE, first_last_layers_bf16=True), ["FP8", "NONE"]),
    ],
)
def test_buffers_are_for_the_formats_of_the_layers(bench: Bench, precision: PrecisionConfig, modes: list[str]) -> None:
    """Until the run ends, however it does."""
    ranks = mock.Mock(size=2)
    with (
        mock.patch("torch.distributed.get_backend", return_value="nccl"),
        mock.patch.object(bench.engine.pytorch, "initialize_ub", autospec=True) as initialize,
        mock.patch.object(bench.engine.pytorch, "destroy_ub", autospec=True) as destroy,
        pytest.raises(ZeroDivisionError),
        shared_buffers(bench.engine, precision, ranks, 32, SIZE),
    ):
        (shape, tensor_parallel_size), others = initialize.call_args
        assert (shape, tensor_parallel_size) == ([32, SIZE], 2)
        assert [mode.name for mode in others["quantization_modes"]] == modes
        assert (others["dtype"], others["bootstrap_backend"]) == (torch.bfloat16, "nccl")
        destroy.assert_not_called()
        _ = 1 / 0
    destroy.assert_called_once_with()


SIGNATURES = Path(__file__).with_name("signatures.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("signature", SIGNATURES)
def test_signatures_are_those_that_were_read(bench: Bench, signature: str) -> None:
    """The stand-in, which refuses every other keyword, knows none that the package does not; nor does the package lack
    one today."""
    name, *known = signature.replace(":", "").split()
    parameters: Any = inspect.signature(attrgetter(name)(bench.engine)).parameters
    less, more = (known, parameters) if bench.is_real else (parameters, known)
    assert set(less) <= set(more)
    if name.startswith("pytorch."):
        # What is given by position.
        assert [*parameters][:2] == known[:2]
