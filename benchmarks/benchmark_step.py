#!/usr/bin/env python3
"""Speed and memory of one rank's share of a recipe, on one device.

Layers as one of the recipe's tensor-parallel ranks has them, without communication, forward and backward; beside them
the bounds (their GEMMs and attention alone, by our operators and by torch's own) and, if asked for, Hugging Face's
Llama of the same shape:

    python benchmarks/benchmark_step.py --model llama3.1-405b --num-layers 2 --tensor-model-parallel-size 8
    --sequence-parallel --bf16 --seq-length 8192 --compare transformers

They take turns within one run, so that ratios hold on a noisy machine; medians count. --sweep measures the rows of
benchmarks/lib/step_sweep.py, one after the other.
"""

import gc
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.lib.rank_slice import SliceConfig
from benchmarks.lib.results import error_line
from benchmarks.lib.step_contenders import Contender, Samples, bound, our_slice, transformers_slice
from benchmarks.lib.step_profile import StepProfile, profile_step
from benchmarks.lib.step_report import report
from benchmarks.lib.step_sweep import Row, SweepName, rows
from benchmarks.lib.step_timing import Clock, Times, copy_rate, product_rates, spread, take_turns
from megatron.architectures.catalog import PRESETS
from megatron.command_line import parser
from megatron.command_line.words import split_words
from megatron.config.model import ModelConfig, preset
from megatron.core.device import device_name
from megatron.core.kernels.selection import Kernels
from megatron.errors import ConfigError, UserError
from megatron.flags import require_at_least
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
    """File to which the figures are appended, one line of JSON per measurement."""
    sweep: SweepName | None = None
    """Measure all rows of this name (benchmarks/lib/step_sweep.py) in one process; a row that fails does not end it."""
    tiny: bool = False
    """Rehearse the rows of --sweep with tiny shapes that a CPU computes in seconds."""

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
        if self.tiny and self.sweep is None:
            raise ConfigError("--tiny shrinks the rows of --sweep: add --sweep bf16 or --sweep fp8, or remove it.")
        if self.sweep is not None and (self.slice != SliceConfig() or self.with_optimizer or self.compare is not None):
            raise ConfigError(
                "--sweep has slices of its own (benchmarks/lib/step_sweep.py): remove the flags of the slice, "
                "--with-optimizer and --compare, or remove --sweep."
            )
        if self.compare is not None and self.slice.documents is not None:
            raise ConfigError("--compare transformers has no documents: remove it, or remove --documents.")
        if self.sweep is None:
            self.slice.check()

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of this rank, forward and backward; attention of whole sequences, also with documents."""
        model = self.slice.architecture
        vocab_size = self.slice.vocab_size if self.slice.with_head else 0
        whole = replace(model, vocab_size=vocab_size).flops_per_token(self.slice.seq_length)
        return whole / self.slice.tensor_model_parallel_size


def build_contenders(config: BenchmarkConfig, device: torch.device) -> tuple[list[Contender], Kernels]:
    """Ours first, with documents also ours without them, then the bounds; and the kernels of ours.

    Kernels are chosen once, because their trials take a third of a row on a GPU.
    """
    slice_, samples = config.slice, Samples.random(config.slice, device)
    kernels = kernels_of_whole = slice_.choose_kernels(slice_.topology(device))
    if slice_.documents is not None:
        whole = replace(slice_, documents=None)
        kernels_of_whole = whole.choose_kernels(whole.topology(device))
    contenders = [our_slice(slice_, samples, device, config.with_optimizer, kernels)]
    if slice_.documents is not None:
        without = our_slice(whole, samples, device, config.with_optimizer, kernels_of_whole, "without documents")
        contenders.append(without)
    contenders += [bound(slice_, device, kind, kernels_of_whole) for kind in ("our", "torch")]
    if slice_.precision.fp8_format is not None:
        contenders.append(bound(slice_, device, "FP8", kernels_of_whole))
    if config.compare == "transformers":
        for is_compiled in (False, True) if config.compile else (False,):
            contenders.append(transformers_slice(slice_, samples, device, config.with_optimizer, is_compiled))
    return contenders, kernels


def measured_row(
    config: BenchmarkConfig, times: Times, our_steps: Sequence[float], peak_tflops: float | None
) -> dict[str, Any]:
    """The figures of a contender; ``our_steps`` are the seconds of our steps in the same turns."""
    steps = [sum(spans) for spans in zip(*times.values())]
    speed = config.slice.microbatches * config.slice.tokens / median(steps)
    layers = config.slice.microbatches * config.slice.architecture.num_layers
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


def profiled_row(contender: Contender, device: torch.device, bytes_per_s: float) -> dict[str, Any]:
    """Bytes that stay between steps, bytes that a step allocates on top, and the time of its kernels.

    ``stand_in_ms`` is the time of the copies that stand for collectives, which the times include, at the rate
    ``bytes_per_s`` of large copies.
    """
    held = None if contender.held_bytes is None else contender.held_bytes()
    contender.moved_by_stand_ins()
    contender.step()
    moved = contender.moved_by_stand_ins()
    profile: StepProfile = profile_step(contender.step, device)
    return {
        "held_bytes": held,
        "step_bytes": profile.peak_bytes,
        "stand_in_ms": moved / bytes_per_s * 1e3,
        "kernel_seconds": profile.seconds,
        "longest_kernels": profile.longest,
    }


def find_peak(config: BenchmarkConfig, device: torch.device, precision: str) -> tuple[float | None, str]:
    """The peak for MFU, and a sentence on where it comes from."""
    if config.cpu_time and config.peak_tflops is None:
        # Measured by the clock on the wall.
        return None, "MFU is not reported: with --cpu-time the peak must be given by --peak-tflops."
    return resolve_peak(device_name(device), precision, config.peak_tflops)


def measure(config: BenchmarkConfig, deadline: float = float("inf")) -> dict[str, Any]:
    """All figures, of fewer turns if the moment ``deadline`` of :func:`time.monotonic` comes first."""
    process = Process.from_environment(os.environ)
    prepare_cpu(process)
    device = choose_device(config.device, process)
    if config.cpu_time and (device.type != "cpu" or torch.get_num_threads() > 1):
        raise ConfigError("--cpu-time is that of one thread: set OMP_NUM_THREADS=1 and --device cpu, or remove it.")
    torch.manual_seed(1234)
    precision = config.slice.run_config().precision.name
    peak, source = find_peak(config, device, precision)
    contenders, kernels = build_contenders(config, device)
    clock = Clock(device, config.cpu_time)
    times = take_turns(contenders, config.warmup, config.repeats, clock, deadline=deadline)
    our_steps = [sum(spans) for spans in zip(*times[contenders[0].name].values())]
    bytes_per_s = copy_rate(device)
    return {
        "device": device_name(device) or f"{platform.processor() or platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": precision,
        "peak": source,
        "product_tflops": product_rates(device),
        "copy_bytes_per_s": bytes_per_s,
        "kernels": [asdict(choice) for choice in kernels.choices],
        "flags": asdict(config),
        "flops_per_token": config.flops_per_token,
        "rows": {
            one.name: measured_row(config, times[one.name], our_steps, peak) | profiled_row(one, device, bytes_per_s)
            for one in contenders
        },
    }


def measure_and_report(config: BenchmarkConfig, name: str | None = None) -> None:
    """Print the figures, and append them to ``--json`` as the row ``name`` of a sweep."""
    figures = measure(config)
    print(report(config.slice, config.cpu_time, figures))
    append_line(config, {"row": name} | figures)


def append_line(config: BenchmarkConfig, figures: dict[str, Any]) -> None:
    if config.json is not None:
        with Path(config.json).open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")


def run_sweep(config: BenchmarkConfig, sweep: Iterable[Row], arguments: Sequence[str]) -> int:
    """Measure every row of a sweep; the number of rows that failed."""
    failures = 0
    for row in sweep:
        print(f"\n== {row.name}: {' '.join(row.flags)}", flush=True)
        try:
            one = replace(parse([*arguments, *row.flags]), sweep=None, tiny=False)
            one.check()
            measure_and_report(one, row.name)
        except Exception as error:
            # Not a reason to lose the rows after it: another kernel, another shape.
            failures += 1
            print(f"ERROR: {error_line(error)}", file=sys.stderr)
            append_line(config, {"row": row.name, "error": error_line(error)})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return failures


def parse(arguments: Sequence[str]) -> BenchmarkConfig:
    """The flags; a preset sets the defaults of its group."""
    names = [one.values[0] for one in split_words(arguments) if one.flag == "--model" and one.values]
    model = preset(names[-1]) if names and names[-1] in PRESETS else ModelConfig()
    return parser.parse(BenchmarkConfig, __doc__, arguments, BenchmarkConfig(slice=SliceConfig(model=model)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and report; the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        config = parse(words)
        config.check()
        if config.sweep is not None:
            return 1 if run_sweep(config, rows(config.sweep, config.tiny), words) else 0
        measure_and_report(config)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
