#!/usr/bin/env python3
"""The best learning rate of models of several widths, without muP and with it, and how large activations get.

    python benchmarks/mup_transfer.py [--widths 64 128 256] [--json OUT] [--plot OUT.svg]

The first width is the base model of muP, which is the same model with and without it. All runs have the seed and the
data of the first, in one process on a CPU.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import megatron_llama as ml
from megatron.commands.tool import import_pyplot, run_tool
from megatron.errors import ConfigError
from megatron.flags import require_at_least, values_of
from megatron.urls import refuse_urls

HEAD_SIZE = 16
NAMES = {False: "without muP", True: "with muP"}


@dataclass(frozen=True)
class Transfer:
    """The models and the grid."""

    widths: tuple[int, ...] = (64, 128, 256)
    """Hidden sizes, multiples of 16; the first is the base model."""
    exponents: tuple[int, ...] = (-11, -10, -9, -8, -7, -6, -5, -4)
    """Learning rates, as powers of two."""
    steps: int = 60
    """Iterations of each run, with a cosine decay of the learning rate."""
    activation_steps: int = 4
    """Iterations after which activations are compared, at the largest learning rate but two."""
    num_layers: int = 2
    """Layers of each model."""
    batch_size: int = 16
    """Sequences of 32 tokens in a batch."""
    json: str | None = None
    """Write the numbers to this file."""
    plot: str | None = None
    """Draw the losses to this file (.svg or .png)."""

    def check(self) -> None:
        refuse_urls({"--json": self.json, "--plot": self.plot}, "name a local file")
        require_at_least(1, values_of(self, "steps", "activation_steps", "num_layers", "batch_size"))
        if any(width < HEAD_SIZE or width % HEAD_SIZE for width in self.widths):
            raise ConfigError(f"--widths must be multiples of {HEAD_SIZE}, the head size: change them.")
        if len(self.widths) < 2 or len(self.exponents) < 3:
            raise ConfigError("A comparison needs two --widths and three --exponents: add some.")
        if self.plot is not None:
            import_pyplot("--plot")


Sweep = Mapping[tuple[bool, int], Sequence[float]]
"""The final loss for each learning rate, by muP and width."""


def run_flags(config: Transfer, width: int, use_mup: bool, exponent: int) -> dict[str, Any]:
    """The flags of one run. All matrices grow with the width, and heads keep their size."""
    flags: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": width,
        "ffn_hidden_size": 2 * width,
        "num_attention_heads": width // HEAD_SIZE,
        "seq_length": 32,
        "micro_batch_size": config.batch_size,
        "global_batch_size": config.batch_size,
        "mock_data": True,
        "vocab_size": 64,
        "train_iters": config.steps,
        "lr": 2.0**exponent,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": max(1, config.steps // 10),
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "eval_iters": 0,
        "num_workers": 0,
        "device": "cpu",
        "log_interval": config.steps,
        "peak_tflops": 1.0,  # speed is not looked at, and measuring this takes a third of a second
    }
    if use_mup:
        flags |= {"use_mup": True, "mup_base_hidden_size": config.widths[0], "mup_base_head_dim": HEAD_SIZE}
    return flags


def final_loss(config: Transfer, width: int, use_mup: bool, exponent: int) -> float:
    """The mean loss of the last tenth of the iterations; infinite if it is not finite."""
    last = max(1, config.steps // 10)
    with redirect_stdout(StringIO()):
        try:
            with ml.Run(**run_flags(config, width, use_mup, exponent)) as run:
                losses = [step.loss for step in run.steps()]
        except ml.UserError:  # the loss is not finite
            return math.inf
    return sum(losses[-last:]) / last


def sweep(config: Transfer) -> Sweep:
    """All runs; the base model is the same with muP and without."""
    losses: dict[tuple[bool, int], Sequence[float]] = {}
    for use_mup in NAMES:
        for width in config.widths:
            shared = losses.get((False, width)) if width == config.widths[0] else None
            losses[use_mup, width] = shared or [
                final_loss(config, width, use_mup, exponent) for exponent in config.exponents
            ]
    return losses


def best_exponent(config: Transfer, losses: Sequence[float]) -> int:
    """The learning rate with the smallest loss, as a power of two."""
    return min(zip(losses, config.exponents))[1]


def activation_sizes(config: Transfer, width: int, use_mup: bool) -> dict[str, float]:
    """The root mean square of the output of each layer and of the logits after a few iterations."""
    exponent = sorted(config.exponents)[-3]
    flags = run_flags(config, width, use_mup, exponent) | {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    found: dict[str, float] = {}

    def record(name: str, values: Tensor) -> None:
        found[name] = float(values.square().mean().sqrt())

    with redirect_stdout(StringIO()), ml.Run(**flags | {"train_iters": config.activation_steps}) as run:
        for _ in run.steps():
            pass
        chunk: Any = run.chunks[0]
        for number, layer in enumerate(chunk.layers):
            layer.register_forward_hook(_recording_hook(record, f"layer {number}"))
        tokens = torch.arange(4 * 32).view(4, 32) * 5 % 64
        with torch.no_grad():
            record("logits", chunk(tokens)[..., :64])
    return found


def _recording_hook(record: Callable[[str, Tensor], None], name: str) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        record(name, output)

    return hook


def describe(config: Transfer, losses: Sweep, sizes: Mapping[tuple[bool, int], Mapping[str, float]]) -> str:
    """Two tables: losses, and activations."""
    rows = ["loss, by width and learning rate", "", *_heading([f"2^{exponent}" for exponent in config.exponents])]
    for (use_mup, width), row in losses.items():
        best = f"2^{best_exponent(config, row)}"
        rows.append(f"{NAMES[use_mup]:12}{width:7}" + "".join(f"{loss:9.3f}" for loss in row) + f"   best at {best}")
    rows += ["", f"root mean square after {config.activation_steps} iterations", ""]
    rows += _heading(list(next(iter(sizes.values()))))
    for (use_mup, width), found in sizes.items():
        rows.append(f"{NAMES[use_mup]:12}{width:7}" + "".join(f"{size:9.3f}" for size in found.values()))
    return "\n".join(rows)


def _heading(columns: Sequence[str]) -> list[str]:
    return [f"{'':12}{'width':>7}" + "".join(f"{column:>9}" for column in columns)]


def draw(config: Transfer, losses: Sweep, path: str) -> None:
    """The loss over the learning rate, a line for each width, without muP and with it side by side."""
    plt = import_pyplot("--plot")
    plt.rcParams["svg.hashsalt"] = "mup"  # the same file from the same numbers
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    colors = plt.get_cmap("viridis_r")
    for use_mup, axes in zip(NAMES, panels, strict=True):
        for place, width in enumerate(config.widths):
            row, color = losses[use_mup, width], colors(0.15 + 0.85 * place / (len(config.widths) - 1))
            axes.plot(config.exponents, row, "o-", color=color, markersize=3, label=f"width {width}")
            best = best_exponent(config, row)
            axes.plot([best], [row[config.exponents.index(best)]], "*", color=color, markersize=14)
        axes.set_title(NAMES[use_mup])
        axes.set_xlabel("learning rate (star: the best)")
        axes.set_xticks(config.exponents, [f"$2^{{{exponent}}}$" for exponent in config.exponents])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"training loss after {config.steps} iterations")
    panels[1].legend()
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def run(config: Transfer) -> None:
    """Run the sweep."""
    config.check()
    losses = sweep(config)
    keys = [(use_mup, width) for use_mup in NAMES for width in config.widths]
    sizes = {(use_mup, width): activation_sizes(config, width, use_mup) for use_mup, width in keys}
    print(describe(config, losses, sizes))
    if config.json is not None:
        rows = [
            {"mup": use_mup, "width": width, "losses": losses[use_mup, width], "sizes": sizes[use_mup, width]}
            for use_mup, width in keys
        ]
        Path(config.json).write_text(json.dumps({**asdict(config), "rows": rows}, indent=1) + "\n")
    if config.plot is not None:
        draw(config, losses, config.plot)


main = partial(run_tool, Transfer, run, __doc__)

if __name__ == "__main__":
    sys.exit(main())
