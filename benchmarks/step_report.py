"""Tables of benchmark_step.py."""

from collections.abc import Sequence
from typing import Any

from benchmarks.lib.rank_slice import SliceConfig
from megatron.core.kernels.choice import Choice
from megatron.core.kernels.choice import table as kernel_choices


def report(slice_: SliceConfig, cpu_time: bool, figures: dict[str, Any]) -> str:
    """All that is printed of a measurement."""
    rows = figures["rows"]
    parts = [describe(slice_, cpu_time, figures), rates(figures), choices_table(figures["kernels"])]
    return "\n\n".join([*parts, speed_table(rows), kernel_table(rows)])


def describe(slice_: SliceConfig, cpu_time: bool, figures: dict[str, Any]) -> str:
    """What was measured, where."""
    model = slice_.architecture
    share = f", one rank of {slice_.tensor_model_parallel_size}" if slice_.tensor_model_parallel_size > 1 else ""
    counted = f"{slice_.microbatches} microbatches of " if slice_.microbatches > 1 else ""
    documents = "" if slice_.documents is None else f" in documents of {slice_.documents} on average"
    return (
        f"{model.num_layers} layers{' with embedding and head' if slice_.with_head else ''} of "
        f"{slice_.model.model or 'a Llama'} (hidden {model.hidden_size}){share}; {counted}{slice_.micro_batch_size} x "
        f"{slice_.seq_length} tokens{documents}, {figures['precision']}, on {figures['device']} "
        f"({figures['threads']} CPU threads{', processor time' if cpu_time else ''}), torch {figures['torch']}\n"
        f"{figures['peak']}"
    )


def rates(figures: dict[str, Any]) -> str:
    """The rates of single operations, and the share of the stand-ins for collectives."""
    products = [
        f"{name} {rate if isinstance(rate, str) else format(rate, ',.3g')}"
        for name, rate in figures["product_tflops"].items()
    ]
    lines = [
        f"square GEMMs, TFLOP/s: {'; '.join(products)}",
        f"copies on the device: {figures['copy_bytes_per_s'] / 1e9:,.0f} GB/s read and written",
    ]
    ours = next(iter(figures["rows"].values()))
    if ours["stand_in_ms"]:
        share = ours["stand_in_ms"] / ours["ms"]["step"]
        lines.append(
            f"copies in place of collectives: about {ours['stand_in_ms']:.2f} ms of our step ({share:.1%}), included"
        )
    return "\n".join(lines)


def choices_table(choices: Sequence[dict[str, Any]]) -> str:
    """The kernel of each of our operations."""
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
    """The time of one step by group of kernels, under the profiler."""
    groups = list(dict.fromkeys(group for row in rows.values() for group in row["kernel_seconds"]))
    body = [
        [group, *(_number(row["kernel_seconds"].get(group), factor=1e3) for row in rows.values())] for group in groups
    ]
    return table(["ms of one step, profiled", *rows], body)
