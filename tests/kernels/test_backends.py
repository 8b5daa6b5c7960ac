"""apex, Transformer Engine and FlashAttention 3 as we call them: against stand-ins with their signatures on a CPU, and
against themselves where they are installed and there is a GPU; runs whose kernels are not there, or differ by rank."""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.config.training import OptimizerConfig
from megatron.core.backends import apex, transformer_engine
from megatron.core.device import Unavailable, load
from megatron.core.kernels.choice import Choice
from megatron.core.kernels.selection import check_kernels_agree
from megatron.core.kernels.trials import TrialSizes, random, try_attention, try_weight_gradient
from megatron.core.ops.attention import AttentionShape
from megatron.core.ops.attention_kernels import FlashAttention3
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.optimizer import AdamBuilder, SquaredNorm, torch_adam, torch_squared_norm
from megatron.errors import ConfigError
from megatron.training.pretrain import deterministic_algorithms
from tests.end_to_end.run_process import call_training, losses
from tests.update_rules.bound import bind, run, states

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=["stand-in", "real"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the packages compute: on the CPU they are stood in for."""
    if request.param == "stand-in":
        request.getfixturevalue("stand_ins")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("the packages themselves need a GPU")
    return torch.device("cuda")


def made(make: Callable[[], object], device: torch.device) -> object:
    """What ``make`` makes, if the package is there; a stand-in is."""
    try:
        return make()
    except Unavailable as error:
        assert device.type == "cuda", error
        pytest.skip(str(error))


@pytest.mark.parametrize("kernel", [apex.RMSNorm, transformer_engine.RMSNorm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_rms_norm(
    kernel: type[apex.RMSNorm | transformer_engine.RMSNorm], dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    theirs = made(kernel, device)
    assert isinstance(theirs, kernel)
    for shape in ((3, 2, 64), (7, 1, 256)):
        # Transposed: not contiguous.
        inputs = random(shape[1], shape[0], shape[2], dtype=dtype, device=device).transpose(0, 1)
        gradient = random(*shape, dtype=dtype, device=device, seed=1)
        weight = random(shape[-1], dtype=dtype, device=device, seed=2)
        found, statistics = theirs.forward(inputs, weight, 1e-3)
        expected, inverse_rms = EagerRMSNorm().forward(inputs, weight, 1e-3)
        grads = theirs.backward(gradient, inputs, statistics, weight)
        expected_grads = EagerRMSNorm().backward(gradient, inputs, inverse_rms, weight)
        for one, other in zip((found, *grads), (expected, *expected_grads)):
            assert one.shape == other.shape
            assert (one.float() - other.float()).abs().max() < tolerance * other.abs().max()


def test_weight_gradient(device: torch.device) -> None:
    kernel = made(apex.WeightGradient, device)
    assert isinstance(kernel, apex.WeightGradient)
    try_weight_gradient(kernel, device, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("make", [apex.squared_norm, transformer_engine.squared_norm])
def test_squared_norm(make: Callable[[], SquaredNorm], device: torch.device) -> None:
    squared_norm = made(make, device)
    assert callable(squared_norm)
    tensors = [random(size, dtype=torch.float32, device=device, seed=size) for size in (1, 1000, 70_000)]
    found = squared_norm(tensors)
    assert found.dtype == torch.float64 and found.shape == ()
    assert float(found) == pytest.approx(float(torch_squared_norm(tensors)), rel=1e-6)


def train(adam: AdamBuilder, device: torch.device, steps: range, before: list[Tensor]) -> list[Tensor]:
    """Weights and moments after ``steps``, which go on from those of ``before`` if there are any."""
    weights = [random(size, dtype=torch.float32, device=device, seed=size) for size in (30, 7)]
    gradients = [torch.zeros_like(weight) for weight in weights]
    groups, update = bind(OptimizerConfig(adam_beta2=0.95), weights, gradients, (0.1, 0.0), adam)
    kept = [*weights, *(tensor for state in states(groups) for tensor in state.values())]
    for tensor, old in zip(kept, before):
        tensor.copy_(old)
    seeds = iter(steps)

    def next_gradient() -> None:
        seed = next(seeds)
        for gradient in gradients:
            gradient.copy_(random(*gradient.shape, dtype=torch.float32, device=device, seed=seed))

    run(groups, update, steps, next_gradient)
    return [tensor.cpu() for tensor in kept]


@pytest.mark.parametrize("make", [apex.adam, transformer_engine.adam])
def test_adam_is_torchs_and_goes_on_from_its_state(make: Callable[[], AdamBuilder], device: torch.device) -> None:
    """Part of the way the state moves to an optimizer of the other kind, as by a checkpoint, step count included."""
    theirs = made(make, device)
    assert callable(theirs)
    expected = train(torch_adam, device, range(8), [])
    for first, second in ((theirs, theirs), (torch_adam, theirs), (theirs, torch_adam)):
        found = train(second, device, range(3, 8), train(first, device, range(3), []))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def sizes_with(shape: AttentionShape, rows: int = 1) -> TrialSizes:
    return TrialSizes(rows, shape, 32, 48, 64, (64,))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", [AttentionShape(8, 8, 64), AttentionShape(8, 2, 128), AttentionShape(4, 1, 128)])
def test_flash_attention_3(shape: AttentionShape, rows: int, device: torch.device) -> None:
    kernel = made(FlashAttention3, device)
    assert isinstance(kernel, FlashAttention3)
    try_attention(kernel, sizes_with(shape, rows), device, torch.bfloat16, in_documents=True)


def test_flash_attention_3_is_deterministic_where_torch_must_be(device: torch.device) -> None:
    """Its stand-in compares what it is told with what torch is told."""
    kernel = made(FlashAttention3, device)
    assert isinstance(kernel, FlashAttention3)
    with deterministic_algorithms(True):
        try_attention(kernel, sizes_with(AttentionShape(4, 2, 64)), device, torch.bfloat16, in_documents=True)


def test_what_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"apex is not installed \(no module a_module_that_is_nowhere\)"):
        load("a_module_that_is_nowhere", "apex")
    (tmp_path / "a_broken_module.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(Unavailable, match=r"cannot be imported \(undefined symbol"):
        load("a_broken_module", "apex")


WITHOUT_BACKENDS = """
import subprocess
import sys
sys.modules["megatron.core.backends"] = None  # every import of it fails
from megatron.commands.pretrain_llama import main
sys.exit(main(sys.argv[1:]))
"""


TINY_RUN = "--model tiny --mock-data --vocab-size 100 --seq-length 32 --micro-batch-size 1 --train-iters 2 --lr 1e-3"


@pytest.mark.processes
def test_a_run_that_asks_for_no_package_does_not_need_the_room() -> None:
    command = [sys.executable, "-c", WITHOUT_BACKENDS, *TINY_RUN.split()]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    asked = subprocess.run([*command, "--kernel", "adam=apex"], cwd=REPOSITORY, capture_output=True, text=True)
    assert asked.returncode == 2 and "--kernel adam=apex is not available" in asked.stderr


def test_ranks_that_chose_differently_are_refused() -> None:
    first = [Choice("rope", "compiled", "torch.compile fuses it"), Choice("adam", "torch", "torch's fused AdamW")]
    second = [Choice("rope", "eager", "one operation after the other"), first[1]]
    check_kernels_agree(first, mock.Mock(rank=0, **{"all_gather_object.return_value": [first, first]}))
    with pytest.raises(ConfigError) as error:
        check_kernels_agree(first, mock.Mock(rank=0, **{"all_gather_object.return_value": [first, second]}))
    assert "on rank 0 compiled (torch.compile fuses it), on rank 1 eager (one" in str(error.value)
    assert str(error.value).endswith("or choose one with --kernel rope=compiled.")


@pytest.mark.processes
def test_a_kernel_that_is_not_there_is_refused_before_training() -> None:
    outcome = call_training([*TINY_RUN.split(), "--device", "cpu", "--kernel", "rms_norm=te"])
    assert outcome.exit_code == 2
    assert "--kernel rms_norm=te is not available: it needs a GPU; available:" in outcome.stderr


@pytest.mark.slow(reason="compiles kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_run_with_compiled_kernels_has_the_losses_of_the_eager_ones(tmp_path: Path) -> None:
    flags = "--model tiny --mock-data --vocab-size 61 --seq-length 16 --micro-batch-size 2 --train-iters 3 --lr 1e-2"
    found = []
    for name in ("eager", "compiled"):
        kernels = [f"{operation}={name}" for operation in ("rms_norm", "swiglu", "rope", "cross_entropy")]
        words = [*flags.split(), "--fp64", "--log-interval", "1", "--metrics-jsonl", str(tmp_path / name)]
        call_training([*words, "--device", "cpu", "--kernel", *kernels]).succeeded()
        found.append(losses(tmp_path / name))
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-12)
