"""benchmarks/benchmark_step.py: what it builds, how it sorts kernels, what it computes, and one run of it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks import benchmark_step
from benchmarks.benchmark_step import measure, parse
from benchmarks.lib.rank_slice import SilentCommunicator, SliceConfig
from benchmarks.lib.step_bound import linear_shapes
from benchmarks.lib.step_contenders import Contender, Samples, bound, our_slice
from benchmarks.lib.step_profile import kernel_group, profile_step
from benchmarks.lib.step_sweep import SWEEPS, Row, SweepName, rows
from benchmarks.lib.step_timing import Clock, copy_rate, product_rates, take_turns
from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.kernels import selection
from megatron.core.parameter import info_of
from megatron.core.precision import QuantizedTensor

pytestmark = pytest.mark.slow(reason="a benchmark")

CPU = torch.device("cpu")
TINY = ("--model", "tiny", "--num-layers", "2", "--seq-length", "16", "--vocab-size", "250", "--device", "cpu")


def slice_of(*flags: str) -> SliceConfig:
    """The tiny model's slice."""
    config = parse([*TINY, *flags]).slice
    config.check()
    return config


def cpu_slice(config: SliceConfig, with_optimizer: bool = False) -> Contender:
    kernels = config.choose_kernels(config.topology(CPU))
    return our_slice(config, Samples.random(config, CPU), CPU, with_optimizer, kernels)


def recorded(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """The arguments and the result of every call of a method from now on."""
    calls: list[tuple[tuple[Any, ...], Any]] = []
    method = getattr(owner, name)

    def record(*arguments: Any) -> Any:
        calls.append((arguments, method(*arguments)))
        return calls[-1][1]

    monkeypatch.setattr(owner, name, record)
    return calls


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


def test_silent_collectives_have_the_shapes_of_real_ones() -> None:
    silent = SilentCommunicator(range(4), rank=1)
    tensor = torch.arange(8.0).view(8, 1)
    assert silent.all_reduce(tensor) is tensor
    assert silent.all_gather(tensor).shape == (32, 1)
    assert silent.reduce_scatter(tensor).flatten().tolist() == [2.0, 3.0]
    output = torch.empty(2, 1)
    assert silent.reduce_scatter(tensor, output) is output
    assert output.flatten().tolist() == [2.0, 3.0]


def test_documents_have_the_mean_length_and_differ_between_microbatches() -> None:
    config = slice_of("--documents", "50", "--seq-length", "4096", "--micro-batch-size", "2")
    batches = config.random_documents(torch.device("cpu"))
    drawn = [next(batches) for _ in range(5)]
    spans = [documents.spans for documents in drawn if documents is not None]
    assert len({str(found) for found in spans}) == 5
    assert sum(map(len, spans)) == pytest.approx(5 * 2 * 4096 / 50, rel=0.2)
    for found in spans:
        assert sum(span.stop - span.start for span in found) == 2 * 4096
    assert next(slice_of().random_documents(torch.device("cpu"))) is None


def test_stand_ins_for_collectives_are_counted() -> None:
    config = slice_of("--tensor-model-parallel-size", "2", "--sequence-parallel")
    contender = cpu_slice(config)
    contender.step()
    # At least: before each of two column-parallel layers 16 tokens of 128 numbers are gathered from 8, and after each
    # of two row-parallel layers a part is copied; the same for gradients.
    gathered, reduced = (16 + 8) * 128 * 4, 2 * 8 * 128 * 4
    moved = contender.moved_by_stand_ins()
    assert moved % (2 * 128 * 4) == 0
    assert moved >= 2 * 2 * (gathered + reduced)
    assert contender.moved_by_stand_ins() == 0
    alone = cpu_slice(slice_of())
    alone.step()
    assert alone.moved_by_stand_ins() == 0


def test_times_of_actions_add_up_to_their_phase() -> None:
    class Counter(Clock):
        """The n-th mark is at n seconds."""

        def __init__(self) -> None:
            super().__init__(CPU)
            self._seconds = 0

        def mark(self) -> None:
            self._seconds += 1
            self._marks.append(self._seconds)

    config = slice_of("--microbatches", "2")
    contender = cpu_slice(config, with_optimizer=True)
    times = take_turns([contender], warmup=1, repeats=3, clock=Counter(), shows_turns=False)
    # Start and two forward passes, two backward passes and end, update.
    assert times == {"megatron-llama": {"forward": [3.0] * 3, "backward": [3.0] * 3, "optimizer": [1.0] * 3}}


@pytest.mark.parametrize(("flags", "choices"), [((), 1), (("--documents", "4"), 2)])
def test_kernels_are_chosen_once_and_once_more_without_documents(
    flags: tuple[str, ...], choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the trials of a choice take a third of a row."""
    chosen = recorded(monkeypatch, SliceConfig, "choose_kernels")
    measure(parse([*TINY, *flags, "--warmup", "0", "--repeats", "1", "--peak-tflops", "1"]))
    assert len(chosen) == choices


def test_a_product_that_does_not_run_leaves_its_reason() -> None:
    rates = product_rates(CPU, 16)
    assert {"bf16", "e4m3", "e4m3, fast accumulation"} <= rates.keys()
    assert isinstance(rates["bf16"], float) and rates["bf16"] > 0
    # Only GPUs have half-precision products that add to fp32.
    assert isinstance(rates["bf16, added to fp32 gradients"], str)
    assert copy_rate(CPU, 2**20) > 0


def test_the_fp8_bound_has_the_products_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []

    def recorded(
        a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
    ) -> Tensor:
        calls.append((tuple(a.data.shape), tuple(b.data.shape), dtype))
        return a.data

    monkeypatch.setattr(selection, "gemm_for", lambda *arguments: recorded)
    flags = ("--bf16", "--fp8-format", "hybrid", "--with-head", "--microbatches", "2")
    config = slice_of(*flags)
    bound(config, CPU, "FP8", config.choose_kernels(config.topology(CPU))).step()
    assert len(calls) == 2 * 3 * 8
    widths = linear_shapes(slice_of().architecture, with_head=False)
    assert {(a, b) for a, b, dtype in calls if dtype == torch.float32} == {((n, 16), (k, 16)) for k, n in widths}
    assert all(a[1] == b[1] for a, b, _ in calls)


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
    parameters = config.build(config.topology(CPU)).parameters()
    weights = [one for one in parameters if info_of(one).name.split(".")[-2].startswith(names)]
    assert sorted((one.shape[1], one.shape[0]) for one in weights) == sorted(linear_shapes(config.architecture, 2))


def test_kernels_find_their_group() -> None:
    lines = Path(__file__).with_name("kernel_names.txt").read_text().splitlines()
    groups = {name: group for group, _, name in (line.partition(": ") for line in lines)}
    assert len(set(groups.values())) == 6
    assert {name: kernel_group(name) for name in groups} == groups


def test_the_peak_of_a_step_is_what_it_had_allocated_at_once() -> None:
    def step() -> None:
        first = torch.ones(1000, 100)
        second = first + first
        del first
        _ = second * second

    # Two of the three live at once, at any time.
    assert profile_step(step, CPU).peak_bytes == pytest.approx(2 * 400_000, rel=0.01)


# The tool


def run(*flags: str) -> int:
    """The tool in this process."""
    return benchmark_step.main([*TINY, "--warmup", "1", "--repeats", "3", *flags])


def test_a_run_reports_every_contender(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    flags = ("--with-head", "--with-optimizer", "--compare", "transformers", "--bf16", "--json", str(path))
    assert run(*flags, "--peak-tflops", "2") == 0
    figures = json.loads(path.read_text())
    bounds = ["bound, our kernels", "bound, torch kernels"]
    assert list(figures["rows"]) == ["megatron-llama", *bounds, "transformers eager"]
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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_figures_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    for flags in (("--documents", "6"), ("--bf16", "--fp8-format", "hybrid", "--microbatches", "2")):
        assert run(*flags, "--peak-tflops", "1", "--json", str(path)) == 0
    documents, fp8 = lines(path)
    assert list(documents["rows"])[:2] == ["megatron-llama", "without documents"]
    assert list(fp8["rows"])[-1] == "bound, FP8 kernels"
    ours = fp8["rows"]["megatron-llama"]
    assert ours["tokens_per_s"] == pytest.approx(2 * 16 / ours["ms"]["step"] * 1e3)
    assert ours["ms_per_layer"] == pytest.approx(ours["ms"]["step"] / 4)
    assert len(ours["longest_kernels"]) == 30
    assert sum(ours["kernel_seconds"].values()) >= sum(kernel[1] for kernel in ours["longest_kernels"])


def test_a_sweep_goes_on_after_a_row_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    small = Row("first", ("--model", "tiny", "--num-layers", "1", "--seq-length", "16"))
    sweep = [small, Row("bad", ("--fp64", "--bf16")), replace(small, name="last")]
    flags = f"--sweep bf16 --device cpu --warmup 0 --repeats 1 --json {path} --peak-tflops 1".split()
    with mock.patch.object(benchmark_step, "rows", lambda name, is_tiny: sweep):
        assert benchmark_step.main(flags) == 1
    first, bad, last = lines(path)
    assert (first["row"], bad["row"], last["row"]) == ("first", "bad", "last")
    assert "rows" in first and "rows" in last
    assert bad["error"].startswith("--bf16 and --fp64")
    assert f"ERROR: {bad['error']}" in capsys.readouterr().err


@pytest.mark.parametrize("sweep", SWEEPS)
def test_rows_of_sweeps_can_be_built(sweep: SweepName) -> None:
    found = rows(sweep)
    assert len(found) > 10
    for row, tiny in zip(found, rows(sweep, is_tiny=True), strict=True):
        whole = parse(row.flags)
        whole.check()
        assert whole.slice.seq_length == 8192
        small = parse(tiny.flags)
        small.check()
        assert small.slice.architecture.hidden_size == 128
        assert small.slice.precision == whole.slice.precision
        assert small.slice.grid == whole.slice.grid


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--tiny",), "--tiny shrinks the rows of --sweep"),
        (("--sweep", "fp8"), "--sweep has slices of its own"),
        (("--documents", "0"), "--documents 0"),
        (("--microbatches", "0"), "--microbatches 0"),
        (("--compare", "transformers", "--documents", "8"), "--compare transformers has no documents"),
        (("--compare", "megatron-core"), "--compare megatron-core cannot be measured"),
        (("--compile",), "--compile is about what --compare names"),
        (("--tensor-model-parallel-size", "3"), "--tensor-model-parallel-size 3"),
        (("--repeats", "0"), "--repeats 0"),
        (("--bf16", "--fp64"), "--bf16 and --fp64"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*flags) == 2
    assert sentence in capsys.readouterr().err
