"""Readers of Megatron-LM's log, as scripts around it have them: their expressions depend on order, spaces and bars."""

import re
from collections.abc import Callable, Mapping
from datetime import datetime

_NUMBER = r"([-+0-9.Ee]+)"

_EVERY_FIELD = (
    ("consumed samples", r"\s+(\d+)"),
    ("elapsed time per iteration (ms)", r"\s+(\d+\.\d)"),
    ("throughput per GPU (TFLOP/s/GPU)", r"\s+(\d+\.\d+)"),
    ("learning rate", rf"\s+{_NUMBER}"),
    ("global batch size", r"\s+(\d+)"),
    ("lm loss", rf"\s+{_NUMBER}"),
    ("loss scale", r"\s+(\d+\.\d)"),
    ("grad norm", r"\s+(\d+\.\d{3})"),
    ("num zeros", r"\s+(\d+)"),
    ("params norm", r"\s+(\d+\.\d{3})"),
    ("number of skipped iterations", r"\s+(\d+)"),
    ("number of nan iterations", r"\s+(\d+)"),
)
"""One expression over the whole line, as converters to CSV and to wandb have it: no other field may stand between."""

Series = Mapping[str, list[float]]


def whole_line(text: str) -> Series:
    fields = r"\s+\|".join(rf"\s+{re.escape(name)}:{value}" for name, value in _EVERY_FIELD)
    found = re.findall(rf"iteration\s+(\d+)/\s*(\d+)\s+\|{fields}\s+\|", text)
    names = ["iteration", "train iters", *(name for name, _ in _EVERY_FIELD)]
    return {name: [float(row[column]) for row in found] for column, name in enumerate(names)}


def key_and_number(text: str) -> Series:
    """One key at a time, a colon, spaces, a number without an exponent."""
    keys = ("elapsed time per iteration (ms)", "global batch size", "grad norm", "number of nan iterations")
    return {key: [float(value) for value in re.findall(re.escape(key) + r": +([\d\.]+)", text)] for key in keys}


def lazy_gaps(text: str) -> Series:
    """The iteration at the beginning of the line, and what else is wanted somewhere behind it."""
    first = r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)"
    found = re.findall(rf"{first}.*lm loss: {_NUMBER}.*grad norm: ([\d.]+)", text)
    names = ("iteration", "elapsed time per iteration (ms)", "lm loss", "grad norm")
    return {name: [float(row[column]) for row in found] for column, name in enumerate(names)}


def between_bars(text: str) -> Series:
    """Split at the bars, then at the colon."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if "] iteration" in line:
            for field in line.split("|")[1:-1]:
                name, value = field.rsplit(":", 1)
                found.setdefault(name.strip(), []).append(float(value.strip().rstrip("%")))
    return found


def shell_cut(text: str) -> Series:
    """``grep -Eo 'throughput per GPU [^|]*'`` and a substitution by sed."""
    cut = re.findall(r"throughput per GPU [^|]*", text)
    values = [re.sub(r".*throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+).*", r"\1", one) for one in cut]
    return {"throughput per GPU (TFLOP/s/GPU)": [float(value) for value in values]}


PARSERS: tuple[Callable[[str], Series], ...] = (whole_line, key_and_number, lazy_gaps, between_bars, shell_cut)
"""Of the lines of iterations."""


def time_stamps(text: str) -> list[datetime]:
    """Of every iteration."""
    stamps = re.findall(r"^ \[([^\]]+)\] iteration", text, re.MULTILINE)
    return [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f") for stamp in stamps]


def periodic_validation(text: str) -> list[tuple[int, float]]:
    """Iterations and losses of the evaluations during training."""
    found = re.findall(rf"validation loss at iteration (\d+) \| lm loss value: {_NUMBER}", text)
    return [(int(iteration), float(loss)) for iteration, loss in found]


def final_loss_and_perplexity(text: str, split: str = "validation") -> tuple[float, float]:
    """Of the evaluation after the last iteration."""
    pattern = rf"validation loss at iteration \d* on {split} set \| lm loss value: {_NUMBER} \| lm loss PPL: {_NUMBER}"
    match = re.search(pattern, text)
    assert match is not None, f"no evaluation on the {split} set in the log"
    return float(match[1]), float(match[2])
