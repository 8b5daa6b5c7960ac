"""Train on the same few samples until the loss is near zero, in one process and in each layout, and compare.

A model that cannot overfit a few samples has a defect: in the loss, the gradients, the optimizer or the layout. The
samples are random tokens, so the only way to a small loss is to remember them. Each layout is a run of its own with
--processes processes on this machine, started by the launcher of training; the first run is one process.

    overfit_check.py FLAGS -- FLAGS OF ALL RUNS -- FLAGS OF A LAYOUT -- FLAGS OF A LAYOUT ...
"""

import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.commands.tool import run_tool
from megatron.errors import ConfigError, DataError, ExitCode, report
from megatron.flags import require_at_least, require_positive

_ROOT = Path(__file__).resolve().parents[2]  # processes find the package megatron here


@dataclass(frozen=True)
class OverfitCheck:
    """Runs on the same samples."""

    processes: int = 2
    """Processes of each layout."""
    samples: int = 32
    """Number of samples, all of them in every iteration."""
    seq_length: int = 32
    """Tokens per sample."""
    vocab_size: int = 256
    """Number of ids."""
    iterations: int = 150
    """Iterations of each run."""
    lr: float = 3e-3
    """Learning rate, constant after ten iterations of warm-up."""
    threshold: float = 0.05
    """Largest last loss that passes."""
    seed: int = 1234
    """Seed of the weights and of the samples."""

    def check(self) -> None:
        sizes = ("processes", "samples", "seq_length", "iterations")
        require_at_least(1, {f"--{name.replace('_', '-')}": getattr(self, name) for name in sizes})
        require_at_least(2, {"--vocab-size": self.vocab_size})
        require_positive({"--lr": self.lr, "--threshold": self.threshold})
        if self.samples % self.processes:
            raise ConfigError(f"--samples {self.samples} is not divisible by --processes {self.processes}: change one.")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], list[list[str]]]:
    """Three lists of flags: for this tool, for all runs (architecture, precision, kernels), and one list per layout.
    Each ``--`` begins the next list."""
    groups: list[list[str]] = [[]]
    for word in arguments:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    mine, *others = groups
    return mine, (others[0] if others else []) or ["--model", "tiny"], others[1:]


@dataclass(frozen=True)
class Outcome:
    """The losses of a run; none if it failed."""

    name: str
    losses: tuple[float, ...]
    log: str  # the end of its output

    def verdict(self, config: OverfitCheck) -> str:
        """``pass``, or ``FAIL`` and the reason."""
        if not self.losses:
            return "FAIL: the run failed"
        # A new model's predictions are nearly uniform.
        expected = math.log(config.vocab_size + 1)
        if abs(self.losses[0] - expected) > 0.1 * expected:
            return f"FAIL: the first loss is not about ln(vocabulary) = {expected:.3f}"
        if not self.losses[-1] <= config.threshold:
            return f"FAIL: the last loss is above --threshold {config.threshold:g}"
        return "pass"


def write_samples(config: OverfitCheck, prefix: Path) -> None:
    """A corpus with one document of random tokens for each sample."""
    import numpy as np

    from megatron.data.corpus_writer import IndexedDatasetWriter

    tokens = np.random.RandomState(config.seed).randint(config.vocab_size, size=(config.samples, config.seq_length + 1))
    with IndexedDatasetWriter(str(prefix), config.vocab_size + 1) as writer:
        for document in tokens:
            writer.add_document(document)


def command_of(config: OverfitCheck, flags: Sequence[str], processes: int, directory: Path) -> list[str]:
    """The command line of one run; a document of a whole sample is one sample of the order best-fit."""
    launcher = [sys.executable, "-m", "megatron.operation.launch", "--standalone", "--nproc-per-node", str(processes)]
    launcher += ["-m", "megatron.commands.pretrain_llama"]
    values = {
        "data-path": directory / "samples",
        "split": "1,0,0",
        "sample-order": "best-fit",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": config.vocab_size,
        "seq-length": config.seq_length,
        "micro-batch-size": config.samples // config.processes,
        "global-batch-size": config.samples,
        "train-iters": config.iterations,
        "lr": config.lr,
        "lr-decay-style": "constant",
        "lr-warmup-iters": min(10, config.iterations - 1),
        "weight-decay": 0,
        "log-interval": 1,
        "num-workers": 0,
        "seed": config.seed,
        "metrics-jsonl": directory / f"{processes}.jsonl",
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*launcher, *words, *flags]


def run(config: OverfitCheck, common: Sequence[str], layout: Sequence[str], processes: int) -> Outcome:
    """Train in one layout."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_samples(config, directory / "samples")
        process = subprocess.run(
            command_of(config, [*common, *layout], processes, directory), cwd=_ROOT, capture_output=True, text=True
        )
        metrics = directory / f"{processes}.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = tuple(row["lm_loss"] if row["lm_loss"] is not None else math.nan for row in rows)
    is_complete = process.returncode == 0 and len(losses) == config.iterations
    return Outcome(
        shlex.join(layout) or "one process", losses if is_complete else (), (process.stdout + process.stderr)[-3000:]
    )


def describe(outcome: Outcome, reference: Outcome, config: OverfitCheck) -> str:
    """A row of the table."""
    if not outcome.losses:
        return f"{outcome.verdict(config)}: {outcome.name}\n{outcome.log}"
    first, last = outcome.losses[0], outcome.losses[-1]
    difference = ""
    if outcome is not reference and reference.losses:
        # Later losses are near zero, where a small difference is a large part.
        half = len(outcome.losses) // 2 or 1
        pairs = zip(outcome.losses[:half], reference.losses[:half])
        largest = max(abs(one - other) for one, other in pairs)
        difference = f", differs from one process by up to {largest:.1e} in the first {half} iterations"
    return f"{outcome.verdict(config)}: {outcome.name}: loss {first:.4f} to {last:.4f}{difference}"


def check_all(common: Sequence[str], layouts: Sequence[Sequence[str]], config: OverfitCheck) -> int:
    """Run one process and all layouts, and print a row for each; 1 if one did not pass."""
    config.check()
    outcomes: list[Outcome] = []
    for layout, processes in [((), 1), *((layout, config.processes) for layout in layouts)]:
        outcomes.append(run(config, common, layout, processes))
        print(describe(outcomes[-1], outcomes[0], config), flush=True)
    return 0 if all(outcome.verdict(config) == "pass" for outcome in outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status: 0 if every layout passed, 1 if one did not, 2 for a mistake."""
    mine, common, layouts = split_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        return run_tool(OverfitCheck, partial(check_all, common, layouts), __doc__, mine)
    except OSError as error:
        report(DataError(f"The samples cannot be written ({error.strerror}): free some space in TMPDIR."), rank=0)
        return ExitCode.ACTION_REQUIRED
