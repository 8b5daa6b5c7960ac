"""Which kernels are chosen where, what is said about it, and what is refused."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.command_line import parse_command_line
from megatron.config.precision import IMPLEMENTATIONS, KernelConfig, Wanted
from megatron.core.device import Machine, Unavailable, device_is_broken, missing_for_inductor, missing_for_triton
from megatron.core.kernels.choice import Candidate, Choice, ExpertSizes, KernelRequest, choose, table
from megatron.core.kernels.selection import Kernels, choose_kernels, uses_recipe
from megatron.core.kernels.trials import Trials, TrialSizes, try_compiler
from megatron.core.ops.attention import CAUSAL, AttentionShape
from megatron.core.ops.attention_kernels import CudaFlashAttention, CudnnAttention
from megatron.core.ops.documents import Documents, chunked_attention
from megatron.core.ops.fp8 import SeparateFp8WeightGradient
from megatron.core.ops.norm import EagerRMSNorm
from megatron.core.ops.rope import rotate_
from megatron.core.ops.swiglu import EagerSwiGLU
from megatron.errors import ConfigError
from tests.stand_ins import transformer_engine

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = TrialSizes(2, AttentionShape(8, 2, 128), 32, 48, 64, (64, 57))


EXPERTS = ExpertSizes(4, 32, 48, 2**21)
HOPPER = Machine(GPU, capability=(9, 0))


def request(machine: Machine | torch.device = CPU, weight: torch.dtype = torch.bfloat16, **more: Any) -> KernelRequest:
    machine = machine if isinstance(machine, Machine) else Machine(machine)
    gradient = weight if weight == torch.float64 else torch.float32
    return KernelRequest(machine, weight, more.pop("gradient", gradient), SIZES, **more)


def kernels_of(where: KernelRequest, *entries: str) -> Kernels:
    """Of a run with these entries of ``--kernel``."""
    return choose_kernels(KernelConfig(kernel=entries), where)


def names(kernels: Kernels) -> dict[str, str]:
    return {choice.operation: choice.implementation for choice in kernels.choices}


def chosen(operation: str, where: KernelRequest, *entries: str) -> tuple[str, str]:
    """What is chosen for ``operation``, and why."""
    choices = kernels_of(where, *entries).choices
    return next((one.implementation, one.reason) for one in choices if one.operation == operation)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As under --deterministic-mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


ON_A_CPU = {
    "linear": "local",
    "attention": "cpu",
    "weight_gradient": "separate",
    "rms_norm": "eager",
    "swiglu": "eager",
    "rope": "eager",
    "cross_entropy": "eager",
    "adam": "torch",
    "l2_norm": "torch",
}
ON_A_GPU = {
    "linear": "local",
    **dict.fromkeys(("rms_norm", "swiglu", "cross_entropy"), "compiled"),
    "rope": "triton",
    "attention": "sdpa",
    "weight_gradient": "in_place",
    "adam": "torch",
    "l2_norm": "torch",
}


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> object:
    """As if Triton were there; its kernels of FP8 linear layers are this object."""
    made = object()
    modules: dict[str, dict[str, object]] = {
        "elementwise": {"rotate": rotate_, "TritonSwiGLU": EagerSwiGLU, "TritonRMSNorm": EagerRMSNorm},
        "fp8": {"TritonQuantization": lambda: made, "TritonFp8WeightGradient": lambda: made},
    }
    for module, kernels in modules.items():
        monkeypatch.setitem(sys.modules, f"megatron.core.backends.triton_{module}", SimpleNamespace(**kernels))
    return made


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (request(weight=torch.float32), ON_A_CPU),
        (request(), ON_A_CPU),
        (request(weight=torch.float64), ON_A_CPU | {"weight_gradient": "in_place"}),
        (request(GPU), ON_A_GPU),
        (request(GPU, needs_log_sum_exp=True), ON_A_GPU | {"attention": "flash"}),
        # Where scales are known before, norms and SwiGLU quantise.
        (request(GPU, has_delayed_scales=True), ON_A_GPU | {"rms_norm": "triton", "swiglu": "triton"}),
        (request(has_delayed_scales=True), ON_A_CPU),
    ],
)
def test_cpus_get_eager_kernels_and_gpus_compiled_ones(
    where: KernelRequest, expected: dict[str, str], triton: object
) -> None:
    assert names(kernels_of(where)) == expected


@pytest.mark.parametrize(
    ("flags", "has_them"),
    [
        ("--bf16", False),
        ("--bf16 --fp8-format hybrid", True),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", False),
        ("--bf16 --fp8-format hybrid --transformer-impl transformer_engine", False),
    ],
)
def test_our_layers_know_scales_before_under_delayed_scaling(flags: str, has_them: bool) -> None:
    required = "--model tiny --mock-data --vocab-size 61 --micro-batch-size 2 --train-iters 3 --lr 1e-2"
    assert uses_recipe(parse_command_line([*required.split(), *flags.split()]), "delayed") is has_them


def test_without_a_compiler_a_gpu_gets_eager_kernels_and_says_why() -> None:
    where = request(Machine(GPU, missing_for_triton="a compiler", missing_for_inductor="a compiler"))
    assert chosen("swiglu", where)[0] == "eager"
    obstacles = "(not triton: it needs a compiler; not compiled: torch.compile needs a compiler)"
    assert chosen("rope", where) == ("eager", f"{EAGER} {obstacles}")


@pytest.mark.parametrize(
    ("programs", "modules", "for_triton", "for_inductor", "for_inductor_on_cpu"),
    [
        ({"gcc", "g++"}, {"triton"}, None, None, None),
        ({"gcc", "g++"}, set(), "Triton, which is not installed", "Triton, which is not installed", None),
        (set(), {"triton"}, "a compiler (gcc", "a compiler (gcc", "a compiler (g++"),
    ],
)
def test_torch_compile_needs_a_compiler_and_on_gpus_triton(
    programs: set[str],
    modules: set[str],
    for_triton: str | None,
    for_inductor: str | None,
    for_inductor_on_cpu: str | None,
) -> None:
    def find_in(names: set[str]) -> Callable[[str], object]:
        return lambda name: name if name in names else None

    places = find_in(programs), find_in(modules)
    found = missing_for_triton(*places), missing_for_inductor(True, *places), missing_for_inductor(False, *places)
    for one, wanted in zip(found, (for_triton, for_inductor, for_inductor_on_cpu), strict=True):
        assert one == wanted or (one is not None and wanted is not None and one.startswith(wanted))


def test_a_compiler_that_fails_or_is_wrong_is_told() -> None:
    def failing(function: Callable[..., Tensor], fullgraph: bool) -> Callable[..., Tensor]:
        raise AssertionError("Python.h: No such file\nand more")

    def wrong(function: Callable[..., Tensor], fullgraph: bool) -> Callable[..., Tensor]:
        return lambda numbers: function(numbers) + 1.0

    assert try_compiler(CPU, failing) == "torch.compile does not work: a trial failed (Python.h: No such file)"
    assert "a trial had a relative error of" in str(try_compiler(CPU, wrong))
    assert try_compiler(CPU, lambda function, fullgraph: function) is None


def test_the_compiler_is_tried_once_where_there_is_a_gpu() -> None:
    tried: list[torch.device] = []

    def failing(device: torch.device) -> str:
        tried.append(device)
        return "it fails"

    assert request(GPU, trials=Trials(compiler=failing)).compiler_obstacle is None and not tried
    where = request(Machine(GPU, can_try=True), trials=Trials(compiler=failing))
    assert where.compiler_obstacle == where.compiler_obstacle == "it fails"
    assert tried == [GPU]


ADA = Machine(GPU, can_try=True, capability=(8, 9))


def passing(*arguments: Any) -> None:
    """A trial."""


PASSING: dict[str, Any] = dict.fromkeys((one.name for one in fields(Trials)), passing)


def test_on_a_gpu_every_kernel_is_tried_in_the_sizes_of_the_run(triton: object) -> None:
    tried: dict[str, tuple[Any, ...]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *given: tried.update({name: given[1:]})

    trials = Trials(**{one.name: note(one.name) for one in fields(Trials)})
    kernels_of(request(ADA, masks_attention=True, resets_positions=True, fp8=True, trials=trials))
    of_run = (SIZES, GPU, torch.bfloat16)
    assert tried == {
        "compiler": (),
        "attention": (*of_run, True, CAUSAL),
        "weight_gradient": (GPU, torch.bfloat16, torch.float32),
        "rms_norm": of_run,
        "swiglu": of_run,
        "rotation": (*of_run, True),
        "cross_entropy": of_run,
        "scaled_gemm": (GPU, torch.bfloat16),
        "fp8_quantization": (GPU, torch.bfloat16),
        "forget": (),
    }
    # Otherwise the first step would compile for any size.
    assert list(tried)[-1] == "forget"


def test_fp8_gemms_that_fail_are_an_error_with_the_flag(triton: object) -> None:
    def failing(*arguments: Any) -> None:
        raise Unavailable("a trial had a relative error of 50%")

    trials = Trials(**PASSING | {"scaled_gemm": failing})
    kernels_of(request(ADA, trials=trials))
    with pytest.raises(ConfigError, match=r"--fp8-format needs FP8 GEMMs.*error of 50%; remove it, or use"):
        kernels_of(request(ADA, fp8=True, trials=trials))


EAGER = "one operation after the other"


def test_the_rows_are_in_the_table_of_a_run_in_fp8_alone() -> None:
    assert chosen("fp8_quantization", request(fp8=True)) == ("eager", EAGER)
    assert chosen("fp8_weight_gradient", request(fp8=True)) == ("separate", "a GEMM, then an addition")
    assert not any(operation.startswith("fp8_") for operation in names(kernels_of(request())))


def test_gpus_quantise_in_triton_where_it_is_installed(triton: object) -> None:
    found = kernels_of(request(GPU, fp8=True))
    assert found.fp8.quantization is triton
    assert isinstance(found.fp8.weight_gradient, SeparateFp8WeightGradient), "the Triton GEMM must be asked for"
    asked = kernels_of(request(GPU, fp8=True), "fp8_weight_gradient=triton")
    assert asked.fp8.weight_gradient is triton
    assert chosen("fp8_quantization", request(GPU, fp8=True), "fp8_quantization=eager")[0] == "eager"
    reason = "it needs Triton, which is not installed"
    without = request(Machine(GPU, missing_for_triton="Triton, which is not installed"), fp8=True)
    assert chosen("fp8_quantization", without) == ("eager", f"{EAGER} (not triton: {reason})")


def test_blocks_are_quantised_by_a_compiled_kernel_and_multiplied_by_a_gemm_that_was_tried(triton: object) -> None:
    def failing(*arguments: Any) -> None:
        raise NotImplementedError("only supported in CUDA for SM90")

    blocks: dict[str, Any] = {"fp8": True, "has_block_scales": True}
    assert chosen("fp8_quantization", request(**blocks)) == ("eager", EAGER)
    for machine in (GPU, SIMULATED, HOPPER):
        assert chosen("fp8_quantization", request(machine, **blocks))[0] == "compiled"
    for operation in ("fp8_quantization", "fp8_weight_gradient"):
        with pytest.raises(ConfigError, match="triton is not available: it is not for --fp8-recipe blockwise"):
            kernels_of(request(GPU, **blocks), f"{operation}=triton")
    with pytest.raises(ConfigError, match="compiled is not available: it is for --fp8-recipe blockwise"):
        kernels_of(request(GPU, fp8=True), "fp8_quantization=compiled")
    where = request(ADA, trials=Trials(**PASSING | {"block_scaled_gemm": failing}), **blocks)
    with pytest.raises(ConfigError, match=r"^--fp8-recipe blockwise needs .*for SM90\); use another recipe, or"):
        kernels_of(where)
    kernels_of(replace(where, has_block_scales=False))


def test_a_kernel_that_fails_its_trial_is_not_chosen(triton: object) -> None:
    def failing(*arguments: Any) -> None:
        raise RuntimeError("no kernel image\nfor this device")

    passes = Trials(**PASSING)
    where = request(ADA, fp8=True, trials=passes)
    assert chosen("fp8_quantization", where)[0] == "triton"
    where = replace(where, trials=replace(passes, fp8_quantization=failing, fp8_weight_gradient=failing))
    reason = "a trial failed (no kernel image)"
    assert chosen("fp8_quantization", where) == ("eager", f"{EAGER} (not triton: {reason})")
    with pytest.raises(ConfigError) as error:
        chosen("fp8_weight_gradient", where, "fp8_weight_gradient=triton")
    assert str(error.value) == (
        f"--kernel fp8_weight_gradient=triton is not available: {reason}; available: separate: use one of these, or "
        "remove it."
    )


def test_on_hopper_attention_is_cudnn_without_flash_attention_3(triton: object) -> None:
    assert type(kernels_of(request(HOPPER)).attention) is CudnnAttention
    _, reason = chosen("attention", request(HOPPER))
    assert reason.endswith("(not flash3: FlashAttention 3 is not installed (no module flash_attn_interface))")


def attention_in_documents(*entries: str, machine: Machine = HOPPER, **more: Any) -> tuple[str, str]:
    return chosen("attention", request(machine, masks_attention=True, **more), *entries)


@pytest.mark.parametrize(("backend", "expected"), [("auto", "flash3"), ("flash", "flash3"), ("fused", "cudnn")])
def test_on_hopper_attention_is_flash_attention_3(stand_ins: None, triton: object, backend: str, expected: str) -> None:
    assert chosen("attention", request(HOPPER, attention_backend=backend))[0] == expected
    assert attention_in_documents(attention_backend=backend)[0] == expected


def test_with_documents_kernels_with_a_varlen_call_come_first(monkeypatch: pytest.MonkeyPatch, triton: object) -> None:
    assert chosen("attention", request(HOPPER, attention_backend="flash"))[0] == "flash"
    assert attention_in_documents(machine=Machine(GPU))[0] == "flash"
    for more in ({}, {"needs_log_sum_exp": True}, {"engine": transformer_engine()}):
        name, reason = attention_in_documents(**more)
        assert name == "flash" and "plan" not in reason
    for name, reason in (attention_in_documents(attention_backend="fused"), attention_in_documents("attention=cudnn")):
        assert name == "cudnn" and reason.endswith(
            "; one call per document, and cuDNN builds a plan for every new length while the step waits"
        )
    # cuDNN comes last, when no other kernel is there.
    monkeypatch.setattr(CudaFlashAttention, "supports", lambda *arguments: False)
    name, reason = attention_in_documents()
    assert name == "sdpa" and "; if it picks cuDNN: one call per document" in reason
    assert attention_in_documents(engine=transformer_engine())[0] == "te"
    assert attention_in_documents(needs_log_sum_exp=True)[0] == "cudnn"


def test_where_a_run_is_to_be_deterministic_cudnn_is_passed_over(triton: object, deterministic: None) -> None:
    assert chosen("attention", request(HOPPER))[0] == "sdpa"
    with pytest.raises(ConfigError, match="its backward pass is not deterministic"):
        kernels_of(request(GPU), "attention=cudnn")


def test_with_layers_of_transformer_engine_attention_is_theirs_where_it_can_be(triton: object) -> None:
    theirs = ON_A_GPU | {"linear": "transformer_engine", "attention": "te"}
    engine = transformer_engine()
    assert names(kernels_of(request(GPU, engine=engine))) == theirs
    merged = request(GPU, engine=engine, needs_log_sum_exp=True)
    assert names(kernels_of(merged)) == theirs | {"attention": "flash"}
    assert chosen("attention", request(GPU, engine=engine, attention_backend="fused"))[0] == "cudnn"


@pytest.mark.parametrize(
    ("flags", "operation", "implementation"),
    [
        ({"kernel": ("attention=reference",)}, "attention", "reference"),
        ({"kernel": ("weight_gradient=separate",)}, "weight_gradient", "separate"),
        ({"gradient_accumulation_fusion": False}, "weight_gradient", "separate"),
        ({"rope_fusion": False}, "rope", "eager"),
        ({"bias_swiglu_fusion": False}, "swiglu", "eager"),
        ({"kernel": ("cross_entropy=eager",)}, "cross_entropy", "eager"),
    ],
)
def test_a_flag_forces_one_kernel_and_no_other(
    flags: dict[str, Any], operation: str, implementation: str, triton: object
) -> None:
    config = KernelConfig(**flags)
    config.check()
    kernels = choose_kernels(config, request(GPU))
    assert names(kernels) == ON_A_GPU | {operation: implementation}
    assert next(choice for choice in kernels.choices if choice.operation == operation).reason.startswith("asked for by")


@pytest.mark.parametrize(
    ("entry", "where", "message"),
    [
        ("rms_norm=apex", request(), "it needs a GPU; available: compiled, eager: use one of these"),
        ("rms_norm=apex", request(GPU), "apex is not installed (no module fused_layer_norm_cuda); available:"),
        ("adam=te", request(GPU), "Transformer Engine is not installed"),
        ("adam=apex", request(GPU), "apex is not installed (no module amp_C); available: torch"),
        (
            "weight_gradient=in_place",
            request(),
            "torch has no in-place kernel for bfloat16 products and float32 gradients on cpu",
        ),
        ("swiglu=triton", request(has_delayed_scales=True), "it needs a GPU; available: compiled, eager: use one"),
        ("rms_norm=triton", request(has_delayed_scales=True), "it needs a GPU; available: compiled, eager: use one"),
        ("rms_norm=triton", request(GPU), "it quantises for FP8 with delayed scaling, which this run does not use"),
        ("rope=triton", request(), "it needs a GPU; available: compiled, eager: use one of these"),
        ("weight_gradient=apex", request(), "apex only accumulates half-precision products in fp32 on GPUs"),
        *((f"fp8_{name}=triton", request(fp8=True), "it needs a GPU") for name in ("quantization", "weight_gradient")),
        ("attention=flash3", request(GPU), "FlashAttention 3 is not installed"),
        ("attention=te", request(GPU), "it needs --transformer-impl transformer_engine; available:"),
        ("attention=cudnn", request(), "it does not support bfloat16 on cpu; available:"),
        ("attention=sdpa", request(needs_log_sum_exp=True), "it does not return the log-sum-exp"),
        ("grouped_gemm=grouped_mm", request(CPU, torch.float32, experts=EXPERTS), "multiplies bf16, not float32"),
        (
            "grouped_gemm=grouped_mm",
            request(GPU, experts=replace(EXPERTS, width=44)),
            "32 or 44, the width of an expert's",
        ),
        ("grouped_gemm=padded", request(CPU, torch.float64, experts=EXPERTS), "oneDNN does not multiply fp64"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_is_there(
    entry: str, where: KernelRequest, message: str, triton: object
) -> None:
    with pytest.raises(ConfigError) as error:
        kernels_of(where, entry)
    assert str(error.value).startswith(f"--kernel {entry} is not available: ")
    assert message in str(error.value)
    assert str(error.value).endswith("use one of these, or remove it.")


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler of a simulated machine."""
    return function


SIMULATED = Machine(GPU, simulated_compiler=one_kernel)


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(module: str, package: str) -> Any:
        raise AssertionError(f"a simulation loads {module}")

    for module in ("kernels.candidates", "ops.attention_kernels"):
        monkeypatch.setattr(f"megatron.core.{module}.load", load)


def test_the_simulation_chooses_as_a_gpu_does(no_packages: None) -> None:
    assert names(kernels_of(request(SIMULATED))) == ON_A_GPU
    merged = kernels_of(request(SIMULATED, needs_log_sum_exp=True))
    assert names(merged) == ON_A_GPU | {"attention": "flash"}
    delayed = request(SIMULATED, has_delayed_scales=True)
    assert names(kernels_of(delayed)) == ON_A_GPU | {"rms_norm": "triton", "swiglu": "triton"}


FOR_CPUS = [("attention", "cpu"), ("grouped_gemm", "padded")]
"""What a run on GPUs refuses."""


@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
def test_every_implementation_is_simulated_without_its_package(operation: str, no_packages: None) -> None:
    where = request(SIMULATED, fp8=True, has_delayed_scales=True, experts=EXPERTS)
    for implementation in IMPLEMENTATIONS[operation]:
        if (operation, implementation) not in (*FOR_CPUS, ("fp8_quantization", "compiled")):
            assert chosen(operation, where, f"{operation}={implementation}")[0] == implementation


@pytest.mark.parametrize(
    ("entry", "more", "message"),
    [
        ("attention=cpu", {}, "it does not support bfloat16 on cuda; available: sdpa, flash"),
        ("attention=flash3", {"weight": torch.float32}, "it does not support float32 on cuda; available: sdpa, ref"),
        ("grouped_gemm=padded", {"experts": EXPERTS}, "it is for CPUs with oneDNN"),
        ("adam=apex", {"weight": torch.float64}, "it does not support fp64; available: torch"),
        ("weight_gradient=apex", {"gradient": torch.bfloat16}, "apex only accumulates half-precision products in fp32"),
        ("swiglu=triton", {}, "it quantises for FP8 with delayed scaling"),
    ],
)
def test_a_plan_refuses_what_the_run_refuses_on_every_machine(
    entry: str, more: dict[str, Any], message: str, triton: object
) -> None:
    for machine in (SIMULATED, GPU):
        with pytest.raises(ConfigError) as error:
            kernels_of(request(machine, **more), entry)
        assert str(error.value).startswith(f"--kernel {entry} is not available: {message.partition(';')[0]}")
        if machine is SIMULATED:
            assert message in str(error.value)


def test_a_search_goes_on_with_layouts_that_cannot_use_the_wanted_kernel(no_packages: None) -> None:
    assert chosen("attention", request(SIMULATED, needs_log_sum_exp=True), "attention=sdpa")[0] == "flash"


def test_the_first_that_goes_is_chosen() -> None:
    def missing() -> int:
        raise Unavailable("it is not here")

    candidates = [
        Candidate("first", missing, "best"),
        Candidate("shy", lambda: 2, "good", is_automatic=False),
        Candidate("third", lambda: 3, "plain"),
    ]
    assert choose("work", candidates, None) == (
        3,
        Choice("work", "third", "plain (not first: it is not here)", is_stand_in=True),
    )


def test_the_error_for_a_kernel_that_is_not_available_tries_no_other() -> None:
    tried: list[str] = []

    def missing() -> str:
        raise Unavailable("it is not here")

    candidates = [
        Candidate("wanted", missing, "best", trial=tried.append),
        Candidate("other", lambda: "other", "plain", trial=tried.append),
    ]
    wanted = Wanted("wanted", "--kernel work=wanted")
    with pytest.raises(ConfigError, match="it is not here; available: other"):
        choose("work", candidates, wanted)
    assert tried == []


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_trial_that_breaks_the_device_names_its_kernel_and_the_first_error(is_wanted: bool) -> None:
    """Every kernel after it would fail as well, and be reported as not available."""

    def breaking(kernel: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    def candidates(is_broken: bool) -> list[Candidate[int]]:
        first = Candidate("first", lambda: 1, "best", trial=breaking, is_broken=lambda: is_broken)
        return [first, Candidate("second", lambda: 2, "good", trial=lambda kernel: None)]

    wanted = Wanted("first", "--kernel work=first") if is_wanted else None
    if not is_wanted:
        # The device can still be used: the next kernel is chosen.
        assert choose("work", candidates(is_broken=False), wanted)[0] == 2
    with pytest.raises(ConfigError) as error:
        choose("work", candidates(is_broken=True), wanted)
    assert str(error.value) == (
        "The trial of --kernel work=first ended with an error after which this process cannot use its GPU (CUDA error: "
        "an illegal memory access was encountered): start again with another implementation (--kernel work=...)."
    )


def test_the_table_has_columns() -> None:
    lines = table([Choice("a", "long name", "why"), Choice("operation", "b", "because")])
    assert lines == ["  a          long name  why", "  operation  b          because"]


@pytest.mark.parametrize(
    ("flags", "masks"),
    [
        ("", False),
        ("--reset-position-ids", False),
        ("--reset-attention-mask", True),
        ("--attention-chunk-size 64", False),  # one chunk is the whole sequence
        ("--attention-chunk-size 63", True),
        ("--attention-chunk-size 64 --reset-position-ids", True),
    ],
)
def test_attention_is_masked_where_a_sequence_can_have_several_spans(flags: str, masks: bool) -> None:
    """Kernels for packed spans are slower on whole sequences, so they must not be preferred without need."""
    config = parse_command_line(f"--model tiny --mock-data --seq-length 64 {flags}".split())
    assert config.masks_attention == masks
    starts = torch.zeros(1, 64, dtype=torch.bool)
    starts[0, 0] = starts[0, 20] = True
    data = config.data
    documents = Documents(starts, data.masks_documents, data.reset_position_ids, torch.device("cpu"))
    chunk = config.model.attention_chunk_size
    chunks = None if chunk is None else chunked_attention(documents, chunk, 1, 64, documents.device)
    assert (documents.attention is not None or chunks is not None) == masks


def test_what_runs_on_a_device_are_the_calls_of_torch() -> None:
    assert Trials().forget is torch.compiler.reset and Trials().compiler is try_compiler
    assert Candidate("a", lambda: 1, "").is_broken is device_is_broken
