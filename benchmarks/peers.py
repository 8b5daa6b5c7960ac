#!/usr/bin/env python3
"""Training speed beside other systems, in interleaved turns of one run.

    python benchmarks/peers.py [--only "one rank"] [--repeats 20] [--json OUT]

All contenders train the same Llama with the same start weights, batches and hyperparameters. Every rank of a contender
is a process of its own, in the virtual environment of its peer, which this command makes under ``--cache-dir``. The
losses of the first steps must equal ours on one rank: they prove equal work. A contender that raises an error is
reported with its error. The layouts are measured one after another, each beside ours and transformers on one rank. With
GPUs the contenders run on them, one rank on each.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.lib.peers.job import Job
from benchmarks.lib.peers.processes import PACKAGES, ContenderError, RankProcesses, make_environment
from benchmarks.lib.results import error_line
from megatron.commands.tool import run_tool
from megatron.errors import ConfigError
from megatron.flags import require_at_least
from megatron.schedules.catalog import SCHEDULES
from megatron.urls import refuse_urls

CHECKED_STEPS = 3
"""First steps, whose losses are compared with ours."""
BATCHES = 1
"""One, again and again: its loss falls in the first steps, so that the comparison shows a wrong learning rate, too."""
_FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def _fields(layers: int, hidden: int, mlp: int, heads: int, groups: int, vocab: int, length: int) -> dict[str, Any]:
    """The fields of Hugging Face's ``config.json``."""
    return {
        **_FIELDS,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": length,
    }


@dataclass(frozen=True)
class Workload:
    """A model and its batches."""

    name: str
    model: dict[str, Any]
    batch: int
    dtype: str
    threads: int
    """OpenMP threads of a rank."""
    tolerance: float
    """Largest relative difference of a loss from ours."""
    layouts: tuple[str, ...] = ("one", "dp", "fsdp", "tp", "pp", "cp")


SMALL = Workload("6 M, fp32", _fields(6, 256, 768, 16, 16, 2048, 256), 16, "fp32", 1, 1e-4)
MEDIUM = Workload("20 M, bf16", _fields(4, 512, 1536, 8, 2, 8192, 512), 4, "bf16", 2, 1e-3, ("one",))
"""With fp32 main weights beside bf16 ones. No learning makes a difference of 5e-2, and bf16 weights alone of 6e-2."""
AUTOCAST_PEERS, AUTOCAST_TOLERANCE = ("transformers", "torchtitan", "olmo_core"), 1e-2
"""Peers that compute in bf16 under autocast, where activations between layers are in fp32: the second loss of
transformers differs by 8e-3."""
TINY = Workload("tiny, fp32", _fields(4, 32, 64, 4, 4, 64, 16), 8, "fp32", 1, 1e-4)
"""For tests."""


@dataclass(frozen=True)
class Contender:
    """A row of the table."""

    peer: str
    layout: str
    workload: Workload
    micro_batch_size: int
    is_compiled: bool = False
    variant: str = ""
    """What differs from the peer's other row in the layout."""

    @property
    def ranks(self) -> int:
        return 1 if self.layout == "one" else 2

    @property
    def tolerance(self) -> float:
        """Largest relative difference of a loss from ours."""
        is_autocast = self.workload.dtype == "bf16" and self.peer in AUTOCAST_PEERS and not self.variant
        return AUTOCAST_TOLERANCE if is_autocast else self.workload.tolerance

    @property
    def name(self) -> str:
        """The row's name."""
        peer = self.peer.replace("_", "-") + (" compiled" if self.is_compiled else "")
        layout = "one rank" if self.layout == "one" else f"{self.layout.upper()}2"
        variant = f", {self.variant}" if self.variant else ""
        return f"{self.workload.name}, {layout}, {peer}{variant}"

    def job(self, rank: int, device: str, weights: str, store: str) -> Job:
        """What ``rank`` trains."""
        return Job(
            peer=self.peer,
            layout=self.layout,
            ranks=self.ranks,
            rank=rank,
            store=store,
            device=device,
            dtype=self.workload.dtype,
            micro_batch_size=self.micro_batch_size,
            model=self.workload.model,
            weights=weights,
            is_compiled=self.is_compiled,
            variant=self.variant,
        )


MICRO_BATCH_SIZES = {"one": 4, "dp": 4, "fsdp": 8, "tp": 16, "pp": 4, "cp": 16}
"""Our fastest (benchmark_cpu.py), for every contender alike; pipelines have four microbatches."""
VARIANTS = {
    "dp": ("overlap", "optim", "optim, overlap", "optim_grads", "optim_grads, overlap"),
    "fsdp": ("overlap",),
    "pp": tuple(sorted({*SCHEDULES} - {"1f1b"})),
}
"""More rows of ours: ZeRO stages (FSDP is the third) with and without --overlap-grad-reduce, and schedules."""


def contenders_of(peers: Sequence[str], workload: Workload = SMALL) -> list[Contender]:
    """All rows: every layout of ours and of each peer, next to each other."""
    return [row for layout in workload.layouts for peer in ("ours", *peers) for row in _rows(peer, layout, workload)]


def _rows(peer: str, layout: str, workload: Workload) -> list[Contender]:
    """The rows of a peer in a layout."""
    row = Contender(peer, layout, workload, min(MICRO_BATCH_SIZES[layout], workload.batch))
    if peer == "transformers" and layout in ("pp", "cp"):
        return []
    if peer == "transformers" and layout == "one":
        kinds = ("", "main weights") if workload.dtype == "bf16" else ("",)
        return [replace(row, is_compiled=compiled, variant=kind) for kind in kinds for compiled in (False, True)]
    if peer == "ours":
        compiled = [replace(row, is_compiled=True)] if layout == "one" else []
        return [row, *compiled, *(_variant(row, variant) for variant in VARIANTS.get(layout, ()))]
    return [row]


def _variant(row: Contender, variant: str) -> Contender:
    """Another row of ours; ZeRO-2 has the microbatches of FSDP, since it reduces gradients in each, too."""
    size = MICRO_BATCH_SIZES["fsdp" if "optim_grads" in variant else row.layout]
    return replace(row, micro_batch_size=min(size, row.workload.batch), variant=variant)


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to measure, and how long."""

    repeats: int = 20
    """Turns of every contender; medians and intervals are over turns."""
    steps: int = 1
    """Steps per turn."""
    micro_batch_size: int | None = None
    """Sequences per microbatch for every contender alike (default: our fastest for each layout)."""
    only: str = ""
    """Measure only the rows whose name contains this, and the rows that they are compared with."""
    peers: tuple[str, ...] = tuple(PACKAGES)
    """The peers to compare with."""
    model: str = "all"
    """The models: all, or tiny (for tests)."""
    cache_dir: str = str(Path.home() / ".cache" / "megatron-llama-peers")
    """Directory for the peers' virtual environments, which are made once."""
    timeout: float = 600
    """Seconds that a contender may take to answer."""
    json: str | None = None
    """File for the figures."""

    def check(self) -> None:
        require_at_least(2, {"--repeats": self.repeats})
        require_at_least(1, {"--steps": self.steps})
        refuse_urls({"--json": self.json, "--cache-dir": self.cache_dir}, "name a local path")
        for peer in self.peers:
            if peer not in PACKAGES:
                raise ConfigError(f"--peers {peer} is not known: choose from {', '.join(PACKAGES)}.")
        if self.model not in ("all", "tiny"):
            raise ConfigError(f"--model {self.model} is not known: use all or tiny.")

    @property
    def groups(self) -> list[list[Contender]]:
        """The contenders of each layout, with both references: they take turns.

        The processes of all layouts would not fit into the memory of a small machine.
        """
        workloads = (SMALL, MEDIUM) if self.model == "all" else (TINY,)
        every = [self._group(workload, layout) for workload in workloads for layout in workload.layouts]
        return [group for group in every if group]

    def _group(self, workload: Workload, layout: str) -> list[Contender]:
        rows = contenders_of(self.peers, workload)
        chosen = [row for row in rows if row.layout == layout and self.only in row.name]
        wanted = [row for row in rows if row in chosen or (chosen and _is_reference(row))]
        if self.micro_batch_size is not None:
            wanted = [replace(row, micro_batch_size=self.micro_batch_size) for row in wanted]
        return wanted


def _is_reference(row: Contender) -> bool:
    """Whether other rows are compared with the row: transformers eager and ours, on one rank."""
    plain = not row.is_compiled and not row.variant
    return plain and row.layout == "one" and row.peer in ("ours", "transformers")


@dataclass
class Result:
    """What a contender did."""

    contender: Contender
    losses: list[float]
    """Losses of the first steps."""
    seconds: list[float]
    """Seconds of a step, by turn; empty after an error."""
    error: str | None = None


def start_weights(model: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights by Hugging Face's names; the gains of norms differ from 1, so that the losses show mistakes."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.05

    def gains() -> Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    hidden, mlp, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    queries, keys = (model[f"num_{kind}_heads"] * model["head_dim"] for kind in ("attention", "key_value"))
    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "lm_head.weight": matrix(vocab, hidden)}
    weights["model.norm.weight"] = gains()
    for layer in range(model["num_hidden_layers"]):
        attention, feed_forward = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        weights |= {
            f"{attention}.q_proj.weight": matrix(queries, hidden),
            f"{attention}.k_proj.weight": matrix(keys, hidden),
            f"{attention}.v_proj.weight": matrix(keys, hidden),
            f"{attention}.o_proj.weight": matrix(hidden, queries),
            f"{feed_forward}.gate_proj.weight": matrix(mlp, hidden),
            f"{feed_forward}.up_proj.weight": matrix(mlp, hidden),
            f"{feed_forward}.down_proj.weight": matrix(hidden, mlp),
            f"model.layers.{layer}.input_layernorm.weight": gains(),
            f"model.layers.{layer}.post_attention_layernorm.weight": gains(),
        }
    return weights


def write_inputs(workload: Workload, directory: Path) -> None:
    """Write the start weights and the batches of ``workload``."""
    directory.mkdir()
    save_file(start_weights(workload.model), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(workload.model))
    shape = (BATCHES, workload.batch, workload.model["max_position_embeddings"] + 1)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(workload.model["vocab_size"], shape, generator=generator)
    save_file({"batches": batches}, directory / "batches.safetensors")


def start(contender: Contender, number: int, config: BenchmarkConfig, directory: Path) -> RankProcesses:
    """Start the ranks of a contender and build their models."""
    python = make_environment(contender.peer, Path(config.cache_dir))
    weights = directory / contender.workload.name.replace(" ", "")
    if not weights.exists():
        write_inputs(contender.workload, weights)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = str(directory / f"store{number}")
    jobs = [contender.job(rank, device, str(weights), store) for rank in range(contender.ranks)]
    return RankProcesses(python, jobs, contender.workload.threads, directory, config.timeout)


def measure(config: BenchmarkConfig, contenders: Sequence[Contender]) -> list[Result]:
    """Build the contenders, compare their first losses, and time them in turns."""
    results = [Result(contender, [], []) for contender in contenders]
    running: dict[str, RankProcesses] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        for number, result in enumerate(results):
            show(f"build {result.contender.name}")
            try:
                processes = stack.enter_context(start(result.contender, number, config, Path(directory)))
                result.losses = processes.steps(CHECKED_STEPS).losses
                running[result.contender.name] = processes
            except (ContenderError, ConfigError) as error:
                result.error = error_line(error)
        compare_losses(results)
        for turn in range(config.repeats):
            show(f"turn {turn + 1} of {config.repeats}")
            for result in results:
                if result.error is not None:
                    continue
                try:
                    timed = running[result.contender.name].steps(config.steps)
                    result.seconds.append(timed.seconds / config.steps)
                except ContenderError as error:
                    result.error, result.seconds = error_line(error), []
    show("")
    return results


def compare_losses(results: Sequence[Result]) -> None:
    """Give every result whose losses differ from ours on one rank an error."""
    ours = {one.contender.workload.name: one for one in results if is_of(one.contender, "ours")}
    for result in results:
        reference, tolerance = ours[result.contender.workload.name].losses, result.contender.tolerance
        if result.error is None and reference:
            pairs = zip(result.losses, reference, strict=True)
            # torch's maximum is NaN if a number is; Python's may drop it.
            difference = torch.tensor([abs(mine / other - 1) for mine, other in pairs]).max().item()
            if not difference <= tolerance:
                result.error = f"the losses differ from ours by {difference:.1e} (relative), more than {tolerance:.0e}"


def is_of(contender: Contender, peer: str) -> bool:
    """Whether ``contender`` is the reference of ``peer``."""
    return contender.peer == peer and _is_reference(contender)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """10 %, median and 90 % of ``values``."""
    low, *_, high = quantiles(values, n=10, method="inclusive")
    return low, median(values), high


def relative_speed(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float] | None:
    """The interval of the speed as a multiple of the reference's, turn by turn; None if one of them has no times."""
    if not seconds or not reference:
        return None
    return interval([other / mine for mine, other in zip(seconds, reference, strict=True)])


def report(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of every row."""
    rows: dict[str, Any] = {}
    for result in results:
        same = [one for one in results if one.contender.workload == result.contender.workload]
        row: dict[str, Any] = {"losses": result.losses, "seconds_per_step": result.seconds, "error": result.error}
        for key, peer in (("x_transformers", "transformers"), ("x_ours", "ours")):
            reference = next((one.seconds for one in same if is_of(one.contender, peer)), [])
            row[key] = relative_speed(result.seconds, reference)
        if result.seconds:
            row["milliseconds"] = [1000 * value for value in interval(result.seconds)]
        rows[result.contender.name] = row
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines of the table: medians, with the 10 % and 90 % quantiles over turns."""
    width = max(len(name) for name in rows)
    lines = [f"{'':{width}}  {'ms per step':>22}  {'x transformers eager':>22}  {'x ours, one rank':>22}"]
    for name, row in rows.items():
        if row["error"] is not None:
            lines.append(f"{name:{width}}  {row['error']}")
            continue
        cells = (_cell(row["milliseconds"], 1), _cell(row["x_transformers"], 2), _cell(row["x_ours"], 2))
        lines.append(f"{name:{width}}  " + "  ".join(f"{cell:>22}" for cell in cells))
    return lines


def _cell(values: Sequence[float] | None, digits: int) -> str:
    if values is None:
        return "-"
    low, middle, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def show(progress: str) -> None:
    """Write ``progress`` over the last."""
    print(f"\r\033[K{progress}", end="", file=sys.stderr, flush=True)


def measure_all(config: BenchmarkConfig) -> None:
    """Measure, and report."""
    config.check()
    rows: dict[str, Any] = {}
    for contenders in config.groups:
        for name, row in report(measure(config, contenders)).items():
            rows.setdefault(name, row)  # the rows that others are compared with are in each group
        if config.json is not None:
            figures = {"torch": torch.__version__, "cores": os.cpu_count(), "flags": asdict(config), "rows": rows}
            Path(config.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(rows)))


main = partial(run_tool, BenchmarkConfig, measure_all, __doc__)

if __name__ == "__main__":
    sys.exit(main())
