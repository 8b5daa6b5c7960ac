#!/usr/bin/env python3
"""Speed of the experts of a layer, compared with a dense MLP of equal FLOPs, for every grouped GEMM.

Forward and backward pass of the experts alone, without router and dispatch; weight gradients are added to fp32 buffers.
Every turn draws new numbers of rows for the experts, for each contender others, as routing does. Contenders take turns:

    OMP_NUM_THREADS=1 python benchmarks/benchmark_experts.py
    python benchmarks/benchmark_experts.py --device cuda --dtypes bf16 --shapes mixtral-8x7b qwen3-30b-a3b
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from benchmarks.lib.step_timing import Clock
from megatron.architectures.transformer_config import TransformerConfig
from megatron.commands.tool import run_tool
from megatron.core.gradient import MainGrad, attach_main_grad
from megatron.core.kernels.selection import LayerKernels
from megatron.core.moe.layer import Experts, ExpertShard
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, PaddedGroupedGemm, RowCounts, TorchGroupedGemm
from megatron.core.ops.matmul import InPlaceWeightGradient, SeparateWeightGradient
from megatron.core.parameter import initialize_parameters
from megatron.core.tensor_parallel.collectives import TensorParallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear, SwiGLULinear
from megatron.core.topology import single_process


@dataclass(frozen=True)
class Shape:
    """The experts of a layer on one rank, and the tokens of a microbatch."""

    experts: int
    topk: int
    tokens: int
    hidden_size: int
    width: int
    """Hidden size of an expert."""


SHAPES = {
    "E8 k2": Shape(8, 2, 2048, 256, 352),
    "E64 k8": Shape(64, 8, 2048, 256, 128),
    "mixtral-8x7b": Shape(8, 2, 4096, 4096, 14336),
    "qwen3-30b-a3b": Shape(128, 8, 4096, 2048, 768),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    shapes: tuple[str, ...] = ("E8 k2", "E64 k8")
    """Names of SHAPES."""
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    device: str = "cpu"
    repeats: int = 40
    warmup: int = 10
    skew: float = 0.2
    """Deviation of the logarithms of the experts' loads, drawn anew in every turn."""
    cpu_time: bool = False
    """Measure processor time, which other processes on the machine change less."""


class DenseMLP(nn.Module):
    """A SwiGLU MLP with the FLOPs of the ``topk`` experts of a token."""

    def __init__(self, shape: Shape, context: LayerContext) -> None:
        super().__init__()
        width, hidden = shape.topk * shape.width, shape.hidden_size
        self.linear_fc1 = ColumnParallelLinear(
            context.column_weight("linear_fc1", hidden, (width, width), 0.02), context
        )
        linear_fc2 = RowParallelLinear(context.row_weight("linear_fc2", width, hidden, 0.02), context)
        self.swiglu_fc2 = SwiGLULinear(LayerKernels().swiglu, linear_fc2)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.swiglu_fc2(self.linear_fc1(tokens.unsqueeze(1)))
        return output


Step = Callable[[RowCounts], None]


def grouped_gemms(device: torch.device) -> dict[str, GroupedGemm]:
    if device.type == "cuda":
        in_place = InPlaceWeightGradient()
        return {
            "loop": LoopGroupedGemm(in_place),
            "grouped_mm": TorchGroupedGemm(in_place),
            "grouped_mm, weight_gradient=separate": TorchGroupedGemm(),
        }
    return {"padded": PaddedGroupedGemm(), "loop": LoopGroupedGemm(), "grouped_mm": TorchGroupedGemm()}


def build_steps(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Step]:
    """Forward and backward pass by contender."""
    parallel = TensorParallel(single_process(device).tensor_parallel)
    separate, in_place = SeparateWeightGradient(), InPlaceWeightGradient()
    context = LayerContext(parallel, dtype, device, weight_gradient=in_place if device.type == "cuda" else separate)
    config = _config(shape)

    def experts_with(gemm: GroupedGemm) -> Step:
        experts = Experts("experts", config, context, LayerKernels(grouped_gemm=gemm), ExpertShard())
        return _step(experts, shape.tokens * shape.topk, takes_counts=True)

    def _step(module: nn.Module, rows: int, takes_counts: bool) -> Step:
        initialize_parameters(module.parameters(), seed=1)
        for parameter in module.parameters():
            main_grad = MainGrad(torch.zeros(parameter.shape, device=device))
            main_grad.is_filled = True  # as in later microbatches
            attach_main_grad(parameter, main_grad)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(rows, shape.hidden_size, generator=generator).to(device, dtype).requires_grad_()

        def run(counts: RowCounts) -> None:
            output = module(inputs, counts) if takes_counts else module(inputs)
            output.backward(inputs.detach().view_as(output))
            inputs.grad = None

        return run

    steps = {"dense MLP": _step(DenseMLP(shape, context), shape.tokens, takes_counts=False)}
    return steps | {name: experts_with(gemm) for name, gemm in grouped_gemms(device).items()}


def _config(shape: Shape) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.width,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=8,
        vocab_size=8,
        padded_vocab_size=8,
        max_position_embeddings=8,
        num_experts=shape.experts,
        moe_ffn_hidden_size=shape.width,
    )


def draw_counts(shape: Shape, skew: float, device: torch.device, generator: torch.Generator) -> RowCounts:
    """Rows of each expert, for uneven loads."""
    load = torch.softmax(skew * torch.randn(shape.experts, generator=generator), 0)
    chosen = torch.multinomial(load, shape.tokens * shape.topk, replacement=True, generator=generator)
    counts = torch.zeros(shape.experts, dtype=torch.int64).scatter_add_(0, chosen, torch.ones_like(chosen))
    return RowCounts.of(counts.tolist(), device)


def measure(shape: Shape, dtype: torch.dtype, options: Options) -> dict[str, list[float]]:
    """Seconds of every turn by contender, and of the loop with the same counts in every turn."""
    device, generator = torch.device(options.device), torch.Generator().manual_seed(0)
    steps = build_steps(shape, dtype, device)
    same = draw_counts(shape, options.skew, device, generator)
    loop = steps["loop"]
    steps["loop, the same counts in every turn"] = lambda counts: loop(same)
    clock = Clock(device, options.cpu_time)
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(options.warmup + options.repeats):
        names.append(names.pop(0))  # another one is the first, which finds other memory
        for name in names:
            counts = draw_counts(shape, options.skew, device, generator)
            clock.mark()
            steps[name](counts)
            clock.mark()
            (seconds,) = clock.seconds()
            if turn >= options.warmup:
                times[name].append(seconds)
    return times


def table(shape: str, dtype: str, times: dict[str, list[float]]) -> list[str]:
    """Milliseconds, and the speed relative to the dense MLP, medians over turns."""
    dense = times["dense MLP"]
    rows = (
        (name, 1e3 * median(own), median(one / other for one, other in zip(dense, own, strict=True)))
        for name, own in times.items()
    )
    return [f"| {shape} | {dtype} | {name} | {ms:.1f} | {speed:.2f} |" for name, ms, speed in rows]


def measure_all(options: Options, shapes: Mapping[str, Shape] = SHAPES) -> None:
    print("| experts | dtype | contender | ms | speed |\n| --- | --- | --- | --- | --- |")
    for name in options.shapes:
        for dtype in options.dtypes:
            print("\n".join(table(name, dtype, measure(shapes[name], DTYPES[dtype], options))), flush=True)


main = partial(run_tool, Options, measure_all, __doc__)


if __name__ == "__main__":
    sys.exit(main())
