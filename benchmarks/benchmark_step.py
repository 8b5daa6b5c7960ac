#!/usr/bin/env python3
"""Speed and memory of one rank's share of a recipe, on one device.

Layers as one of the recipe's tensor-parallel ranks has them, without communication, forward and backward; beside them
the bounds (their matrix products and attention alone, by our operators and by torch's own) and, if asked for, Hugging
Face's Llama of the same shape:

    python benchmarks/benchmark_step.py --model llama3.1-405b --num-layers 2 --tensor-model-parallel-size 8
    --sequence-parallel --bf16 --seq-length 8192 --compare transformers

They take turns within one run, so that ratios hold on a noisy machine; medians count.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import tyro

from benchmarks.rank_slice import SliceConfig
from benchmarks.step_contenders import Contender, Samples, bound, our_slice, transformers_slice
from benchmarks.step_profile import StepProfile, profile_step
from megatron.config.command_line import preset_of
from megatron.config.model import ModelConfig
from megatron.core.device import device_name
from megatron.core.kernels.choice import Choice
from megatron.core.kernels.choice import table as kernel_choices
from megatron.errors import ConfigError, UserError
from megatron.ranges import require_at_least
from megatron.training.flops import achieved_tflops, mfu, resolve_peak
from megatron.training.initialize import Process, choose_device, prepare_cpu
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is measured, beside what, and for how long."""

    slice: SliceConfig = field(default_factory=SliceConfig)
    """The slice."""
    with_optimizer: bool = False
    """Add clipping and AdamW to the step."""
    compare: Literal["transformers", "megatron-core"] | None = None
    """Measure another implementation of the same slice, too."""
    compile: bool = False
    """Measure what --compare names under torch.compile, too (which may take minutes to compile)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU where there is one. On a CPU, OMP_NUM_THREADS threads compute."""
    cpu_time: bool = False
    """Measure the processor time of one thread rather than the time that passes, so that other processes on the
    machine, which cannot be kept away, disturb less. Needs a CPU and OMP_NUM_THREADS=1."""
    warmup: int = 3
    """Steps of each before those that count."""
    repeats: int = 10
    """Turns of each, a step long."""
    peak_tflops: float | None = None
    """Peak for MFU (default: the GPU's dense peak; on a CPU a measured one)."""
    json: str | None = None
    """File for the figures."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on what cannot be measured."""
        require_at_least(1, {"--repeats": self.repeats})
        require_at_least(0, {"--warmup": self.warmup})
        refuse_urls({"--json": self.json}, "name a local file")
        if self.compare == "megatron-core":
            raise ConfigError(
                "--compare megatron-core cannot be measured: that package calls itself megatron.core, as a part of "
                "this codebase does, and a process can import one of them: use --compare transformers."
            )
        if self.compile and self.compare is None:
            raise ConfigError("--compile is about what --compare names: add --compare transformers, or remove it.")
        self.slice.check()

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of this rank, forward and backward."""
        model = self.slice.architecture
        vocab_size = self.slice.vocab_size if self.slice.with_head else 0
        whole = replace(model, vocab_size=vocab_size).flops_per_token(self.slice.seq_length)
        return whole / self.slice.tensor_model_parallel_size


class Clock:
    """Marks moments in the work of a device, for which the host does not wait."""

    def __init__(self, device: torch.device, cpu_time: bool = False) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._now = time.process_time if cpu_time else time.perf_counter
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Now, or on a GPU when it gets there."""
        if not self._on_gpu:
            self._marks.append(self._now())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Between the marks, of which it then begins anew."""
        marks, self._marks = self._marks, []
        if not self._on_gpu:
            return [end - start for start, end in pairwise(marks)]
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


Times = dict[str, list[float]]
"""Seconds of every turn, by phase."""


def take_turns(contenders: Sequence[Contender], config: BenchmarkConfig, device: torch.device) -> dict[str, Times]:
    """Times of every contender by name, one step of each in every turn."""
    clock = Clock(device, config.cpu_time)
    times: dict[str, Times] = {one.name: {phase: [] for phase in one.phases} for one in contenders}
    for turn in range(config.warmup + config.repeats):
        for contender in contenders:
            clock.mark()
            for phase in contender.phases.values():
                phase()
                clock.mark()
            spans = clock.seconds()
            if turn >= config.warmup:
                for seconds, span in zip(times[contender.name].values(), spans, strict=True):
                    seconds.append(span)
        print(f"\rturn {turn + 1} of {config.warmup + config.repeats}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times


def build_contenders(config: BenchmarkConfig, device: torch.device) -> list[Contender]:
    """Ours first, then the bounds."""
    samples = Samples.random(config.slice, device)
    contenders = [our_slice(config.slice, samples, device, config.with_optimizer)]
    contenders += [bound(config.slice, device, is_ours) for is_ours in (True, False)]
    if config.compare == "transformers":
        for is_compiled in (False, True) if config.compile else (False,):
            contenders.append(transformers_slice(config.slice, samples, device, config.with_optimizer, is_compiled))
    return contenders


def spread(values: Sequence[float]) -> float:
    """Half the distance of the quartiles, relative to the median."""
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4)
    return (third - first) / 2 / median(values)


def measured_row(
    config: BenchmarkConfig, times: Times, our_steps: Sequence[float], peak_tflops: float | None
) -> dict[str, Any]:
    """The figures of a contender; ``our_steps`` are the seconds of our steps in the same turns."""
    steps = [sum(spans) for spans in zip(*times.values())]
    speed = config.slice.tokens / median(steps)
    layers = 1 if config.slice.with_head else config.slice.architecture.num_layers
    return {
        "ms": {phase: median(seconds) * 1e3 for phase, seconds in times.items()} | {"step": median(steps) * 1e3},
        "ms_per_layer": None if config.slice.with_head else median(steps) * 1e3 / layers,
        "spread": spread(steps),
        "tokens_per_s": speed,
        "tflops": achieved_tflops(speed, config.flops_per_token),
        "mfu": mfu(speed, config.flops_per_token, peak_tflops),
        "our_speed_relative_to_it": median(its / ours for its, ours in zip(steps, our_steps, strict=True)),
        "seconds": times,
    }


def memory_row(contender: Contender, profile: StepProfile) -> dict[str, Any]:
    """Bytes that a contender holds between steps, and that a step takes on top."""
    held = None if contender.held_bytes is None else contender.held_bytes()
    return {"held_bytes": held, "step_bytes": profile.peak_bytes, "kernel_seconds": profile.seconds}


def find_peak(config: BenchmarkConfig, device: torch.device, precision: str) -> tuple[float | None, str]:
    """The peak for MFU, and a sentence on where it comes from."""
    if config.cpu_time and config.peak_tflops is None:
        # Measured by the clock on the wall.
        return None, "MFU is not reported: with --cpu-time the peak must be given by --peak-tflops."
    return resolve_peak(device_name(device), precision, config.peak_tflops)


def measure(config: BenchmarkConfig) -> dict[str, Any]:
    """All figures."""
    process = Process.from_environment(os.environ)
    prepare_cpu(process)
    device = choose_device(config.device, process)
    if config.cpu_time and (device.type != "cpu" or torch.get_num_threads() > 1):
        raise ConfigError("--cpu-time is that of one thread: set OMP_NUM_THREADS=1 and --device cpu, or remove it.")
    torch.manual_seed(1234)
    precision = config.slice.run_config().precision.name
    peak, source = find_peak(config, device, precision)
    contenders = build_contenders(config, device)
    times = take_turns(contenders, config, device)
    our_steps = [sum(spans) for spans in zip(*times[contenders[0].name].values())]
    return {
        "device": device_name(device) or f"{platform.processor() or platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": precision,
        "peak": source,
        "kernels": [asdict(choice) for choice in config.slice.choose_kernels(config.slice.topology(device)).choices],
        "flags": asdict(config),
        "flops_per_token": config.flops_per_token,
        "rows": {
            one.name: measured_row(config, times[one.name], our_steps, peak)
            | memory_row(one, profile_step(one.step, device))
            for one in contenders
        },
    }


def describe(config: BenchmarkConfig, figures: dict[str, Any]) -> str:
    """What was measured, where."""
    slice_, model = config.slice, config.slice.architecture
    share = f", one rank of {slice_.tensor_model_parallel_size}" if slice_.tensor_model_parallel_size > 1 else ""
    return (
        f"{model.num_layers} layers{' with embedding and head' if slice_.with_head else ''} of "
        f"{slice_.model.model or 'a Llama'} (hidden {model.hidden_size}){share}; {slice_.micro_batch_size} x "
        f"{slice_.seq_length} tokens, {figures['precision']}, on {figures['device']} ({figures['threads']} CPU "
        f"threads{', processor time' if config.cpu_time else ''}), torch {figures['torch']}\n{figures['peak']}"
    )


def choices_table(choices: Sequence[dict[str, str]]) -> str:
    """What computed each operation of ours."""
    return "\n".join(["our kernels:", *kernel_choices([Choice(**choice) for choice in choices])])


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest entry; the first to the left."""
    lines = [list(map(str, row)) for row in (header, *rows)]
    name_width, *widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([name.ljust(name_width), *(text.rjust(width) for text, width in zip(texts, widths))])
        for name, *texts in lines
    )


def _number(value: float | None, digits: int = 1, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"


def speed_table(rows: dict[str, dict[str, Any]]) -> str:
    """Times, rates and memory of every contender."""
    phases = [phase for phase in next(iter(rows.values()))["ms"] if phase != "step"]
    header = [
        "ms",
        *phases,
        "step",
        "±",
        "per layer",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "our speed",
        "held MiB",
        "step MiB",
    ]
    return table(
        header,
        [
            [
                name,
                *(_number(row["ms"].get(phase)) for phase in phases),
                _number(row["ms"]["step"]),
                f"{row['spread']:.1%}",
                _number(row["ms_per_layer"]),
                _number(row["tokens_per_s"], 0),
                _number(row["tflops"], 2),
                "" if row["mfu"] is None else f"{row['mfu']:.1%}",
                f"{row['our_speed_relative_to_it']:.3f} x",
                _number(row["held_bytes"], factor=2**-20),
                _number(row["step_bytes"], factor=2**-20),
            ]
            for name, row in rows.items()
        ],
    )


def kernel_table(rows: dict[str, dict[str, Any]]) -> str:
    """Where the time of one step went, under the profiler."""
    groups = list(dict.fromkeys(group for row in rows.values() for group in row["kernel_seconds"]))
    body = [
        [group, *(_number(row["kernel_seconds"].get(group), factor=1e3) for row in rows.values())] for group in groups
    ]
    return table(["ms of one step, profiled", *rows], body)


def parse(arguments: Sequence[str]) -> BenchmarkConfig:
    """The flags; a preset sets the defaults of its group."""
    default = BenchmarkConfig(slice=SliceConfig(model=preset_of(arguments) or ModelConfig()))
    return tyro.cli(
        BenchmarkConfig,
        args=list(arguments),
        default=default,
        description=__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def main() -> int:
    """Measure, and report; the exit code."""
    try:
        config = parse(sys.argv[1:])
        config.check()
        figures = measure(config)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    rows = figures["rows"]
    print(
        describe(config, figures), choices_table(figures["kernels"]), speed_table(rows), kernel_table(rows), sep="\n\n"
    )
    if config.json is not None:
        Path(config.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
