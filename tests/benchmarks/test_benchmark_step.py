"""benchmarks/benchmark_step.py: what it builds, how it sorts kernels, what it computes, and one run of it."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import benchmark_step
from benchmarks.benchmark_step import parse
from benchmarks.rank_slice import SilentCommunicator, SliceConfig
from benchmarks.step_bound import linear_shapes
from benchmarks.step_contenders import Samples, our_passes
from benchmarks.step_profile import kernel_group, profile_step
from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.parameter import info_of

pytestmark = pytest.mark.slow(reason="a benchmark")

CPU = torch.device("cpu")
TINY = ("--model", "tiny", "--num-layers", "2", "--seq-length", "16", "--vocab-size", "250", "--device", "cpu")


def slice_of(*flags: str) -> SliceConfig:
    """The tiny model's slice."""
    config = parse([*TINY, *flags]).slice
    config.check()
    return config


# What is built


@pytest.mark.parametrize("head", [(), ("--with-head",)])
def test_the_slices_of_all_ranks_are_the_model(head: tuple[str, ...]) -> None:
    config = slice_of("--tensor-model-parallel-size", "4", *head)
    covered: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for rank in range(4):
        for parameter in config.build(config.topology(CPU, rank)).parameters():
            info = info_of(parameter)
            if info.tensor_parallel_sharded or rank == 0:
                covered[info.name] = covered.get(info.name, 0) + sum(math.prod(box.shape) for box in info.boxes)
            sizes[info.name] = math.prod(info.global_shape)
    assert covered == sizes
    model = config.architecture
    whole = model.num_parameters()
    without = 2 * model.vocab_size * model.hidden_size + model.hidden_size
    assert sum(sizes.values()) == (whole if head else whole - without)


@pytest.mark.parametrize("layout", [(), ("--sequence-parallel",)])
def test_a_slice_runs_forward_and_backward_in_the_shapes_of_its_rank(layout: tuple[str, ...]) -> None:
    config = slice_of("--tensor-model-parallel-size", "2", *layout)
    topology = config.topology(CPU)
    model = config.build(topology)
    config.data_parallel(topology, model).start_grad_accumulation(1)
    length = 8 if layout else 16
    inputs = torch.randn(length, 1, 128, requires_grad=True)
    output = model.chunks[0](inputs)
    assert output.shape == inputs.shape
    output.backward(torch.randn_like(output))
    assert inputs.grad is not None
    assert inputs.grad.isfinite().all()


def test_with_the_head_a_step_begins_at_the_loss_of_random_weights() -> None:
    config = slice_of("--with-head")
    topology = config.topology(CPU)
    model = config.build(topology)
    config.data_parallel(topology, model)
    passes = our_passes(config, Samples.random(config, CPU), model)
    passes.forward()
    assert passes.output is not None
    assert passes.output.item() == pytest.approx(math.log(250), rel=0.05)


def test_silent_collectives_have_the_shapes_of_real_ones() -> None:
    silent = SilentCommunicator(range(4), rank=1)
    tensor = torch.arange(8.0).view(8, 1)
    assert silent.all_reduce(tensor) is tensor
    assert silent.all_gather(tensor).shape == (32, 1)
    assert silent.reduce_scatter(tensor).flatten().tolist() == [2.0, 3.0]
    output = torch.empty(2, 1)
    assert silent.reduce_scatter(tensor, output) is output
    assert output.flatten().tolist() == [2.0, 3.0]


# The figures


def test_flops_are_those_of_the_products_and_half_of_the_attention() -> None:
    config = parse([*TINY, "--with-head", "--tensor-model-parallel-size", "2", "--vocab-size", "256"])
    model = config.slice.architecture
    products = sum(6 * inputs * outputs for inputs, outputs in linear_shapes(model, 2))
    attention = 6 * model.num_layers * model.query_size // 2 * config.slice.seq_length
    assert config.flops_per_token == products + attention


def test_shapes_of_linear_layers_are_those_of_the_weights() -> None:
    config = slice_of("--tensor-model-parallel-size", "2", "--with-head")
    names = ("linear", "output_layer")
    weights = [
        p
        for p in config.build(config.topology(CPU)).parameters()
        if info_of(p).name.split(".")[-2][:6] in {name[:6] for name in names}
    ]
    assert sorted((p.shape[1], p.shape[0]) for p in weights) == sorted(linear_shapes(config.architecture, 2))


@pytest.mark.parametrize(
    "group, names",
    {
        "matrix products": (
            "aten::mm",
            "aten::bmm",
            "aten::addmm",
            "aten::addmv_",
            "mkldnn::_linear_pointwise",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
            "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
            "void splitKreduce_kernel<32, 16, int, float>",
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>",
        ),
        "attention": (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        ),
        "norm and elementwise": (
            "aten::mul_",
            "aten::add",
            "aten::silu_backward",
            "aten::logsumexp",
            "aten::linalg_vector_norm",
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>",
            "triton_poi_fused_mul_silu_0",
        ),
        "communication and copies": (
            "aten::copy_",
            "aten::_to_copy",
            "aten::cat",
            "aten::fill_",
            "Memcpy DtoD (Device -> Device)",
            "Memset (Device)",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>",
        ),
        "optimizer": (
            "aten::_fused_adamw_",
            "aten::_foreach_mul_",
            "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        ),
        "other": (
            "aten::view",
            "aten::expand",
            "_FusedAttentionBackward",
            "_RMSNorm",
            "autograd::engine::evaluate_function: MmBackward0",
            "aten::empty",
        ),
    }.items(),
)
def test_kernels_find_their_group(group: str, names: tuple[str, ...]) -> None:
    assert {name: kernel_group(name) for name in names} == dict.fromkeys(names, group)


def test_the_peak_of_a_step_is_what_it_had_allocated_at_once() -> None:
    def step() -> None:
        first = torch.ones(1000, 100)
        second = first + first
        del first
        _ = second * second

    # Two of the three live at once, at any time.
    assert profile_step(step, CPU).peak_bytes == pytest.approx(2 * 400_000, rel=0.01)


# The tool


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """The tool in this process."""
    monkeypatch.setattr("sys.argv", ["benchmark_step.py", *TINY, "--warmup", "1", "--repeats", "3", *flags])
    return benchmark_step.main()


def test_a_run_reports_every_contender(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    flags = ("--with-head", "--with-optimizer", "--compare", "transformers", "--bf16", "--json", str(path))
    assert run(monkeypatch, *flags, "--peak-tflops", "2") == 0
    figures = json.loads(path.read_text())
    assert list(figures["rows"]) == [
        "megatron-llama",
        "bound, our kernels",
        "bound, torch kernels",
        "transformers eager",
    ]
    ours, floor, _, theirs = figures["rows"].values()
    assert list(ours["ms"]) == ["forward", "backward", "optimizer", "step"]
    assert [len(times) for times in ours["seconds"].values()] == [3, 3, 3]
    assert ours["our_speed_relative_to_it"] == 1
    assert ours["mfu"] == pytest.approx(ours["tflops"] / 2)
    assert ours["tflops"] == pytest.approx(ours["tokens_per_s"] * figures["flops_per_token"] / 1e12)
    parameters = TransformerConfig(2, 128, 384, 8, 4, 16, 250, 256, 16).num_parameters() + 2 * 6 * 128
    # bf16 weights, fp32 gradients, master weights and two moments; theirs all in bf16, gradients in the step alone.
    assert ours["held_bytes"] == pytest.approx(18 * parameters, rel=0.01)
    assert theirs["held_bytes"] == pytest.approx(6 * parameters, rel=0.01)
    assert floor["held_bytes"] is None
    assert {"matrix products", "attention", "norm and elementwise", "optimizer"} <= set(ours["kernel_seconds"])
    assert set(floor["kernel_seconds"]).isdisjoint({"optimizer"})
    printed = capsys.readouterr().out
    assert "2 layers with embedding and head of tiny" in printed
    assert "1.000 x" in printed


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--compare", "megatron-core"), "--compare megatron-core cannot be measured"),
        (("--compile",), "--compile is about what --compare names"),
        (("--tensor-model-parallel-size", "3"), "--tensor-model-parallel-size 3"),
        (("--repeats", "0"), "--repeats 0"),
        (("--bf16", "--fp64"), "--bf16 and --fp64"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    flags: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *flags) == 1
    assert sentence in capsys.readouterr().err
