"""Why two runs differ (``megatron-llama diff``), and whether a layout computes what one process does
(``megatron-llama check-layouts``)."""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from megatron.commands.tool import run_tool, write_file
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine
from megatron.errors import ConfigError
from megatron.flags import Argument, require_at_least, values_of
from megatron.urls import refuse_urls

_ROOT = Path(__file__).resolve().parents[2]

DIFF = """\
Say why the losses of two sides differ: A and B are run directories, checkpoints or metrics files of this code, a model
of Hugging Face, or a run of Megatron-LM (its log or its checkpoint).

Compares flags by their meaning, versions, environment, kernels, data, weights and curves. Then both sides run the same
samples from the same weights here, recorded, and the first operation that differs is named. A difference explains only
if both sides are equal without it. The exit code is 0 if the sides are equal or differ by rounding, 3 if a cause is
named, 2 if a person must act. See docs/why_does_my_loss_differ.md.
"""
"""Text of ``megatron-llama diff --help``."""


@dataclass(frozen=True)
class DiffConfig:
    """Two sides, and the outputs."""

    a: Annotated[str, Argument(is_positional=True)]
    """The first side."""
    b: Annotated[str, Argument(is_positional=True)]
    """The second side."""
    html: str | None = None
    """File for a page with the tables and charts."""
    json: str | None = None
    """File for the findings in JSON."""
    experiments: bool = True
    """Run the first steps of both sides; without it, flags, data, weights and curves alone are compared."""
    max_ranks: int = 8
    """Processes of an experiment. A larger layout is made smaller: fewer replicas first."""
    code_a: str | None = None
    """Checkout of this code that runs the experiments of A (default: this one)."""
    code_b: str | None = None
    """Checkout of this code that runs the experiments of B (default: this one)."""
    megatron_core_python: str | None = None
    """Python of an environment with megatron-core, torch, numpy and safetensors, which computes a side of Megatron-LM.
    Without it this code computes that side with its flags."""
    keep: str | None = None
    """New directory that keeps the recordings and logs of the experiments."""

    def check(self) -> None:
        refuse_urls({"A": self.a, "B": self.b}, "copy what it names to a local directory")
        require_at_least(1, values_of(self, "max_ranks"))
        refuse_urls(
            values_of(self, "html", "json", "keep", "megatron_core_python", "code_a", "code_b"), "use a local path"
        )
        python = self.megatron_core_python
        if python is not None and not Path(python).is_file():
            raise ConfigError(f"--megatron-core-python {python} is no file: name the python of that environment.")
        for flag, path in values_of(self, "code_a", "code_b").items():
            if path is not None and not (Path(path) / "megatron" / "comparison").is_dir():
                raise ConfigError(f"{flag} {path} is no checkout of this code with megatron-llama diff: name one.")
        if self.keep is not None and Path(self.keep).exists():
            raise ConfigError(f"--keep {self.keep} exists: name a new directory.")


@contextmanager
def kept_in(keep: str | None) -> Iterator[Path]:
    """A directory for experiments, which remains only if the user names it."""
    if keep is not None:
        Path(keep).mkdir(parents=True)
        yield Path(keep).resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix="megatron-llama-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def diff(config: DiffConfig) -> int:
    """Print the verdict; its exit code."""
    config.check()
    from megatron.comparison.compare import compare
    from megatron.comparison.experiment import Processes
    from megatron.comparison.page import to_json, to_page, to_text

    code = {"A": Path(config.code_a or _ROOT).resolve(), "B": Path(config.code_b or _ROOT).resolve()}
    names = (config.a, config.b)
    with kept_in(config.keep) as directory:
        runner = Processes(code) if config.experiments else None
        say = partial(print, file=sys.stderr, flush=True)
        python = config.megatron_core_python
        core = None if python is None else Path(python).absolute()  # not resolved: the link is in its environment
        verdict = compare(names, runner, directory, config.max_ranks, say, core)
    print(to_text(verdict, names))
    for flag, path, content in (("--html", config.html, to_page), ("--json", config.json, to_json)):
        if path is not None:
            write_file(flag, path, content(verdict, names))
    return verdict.exit_code


main_diff = partial(run_tool, DiffConfig, diff, DIFF)

# --- check-layouts -------------------------------------------------------------------------------------------

CHECK = """\
Check a layout: check-layouts [--max-ranks N] FLAGS OF pretrain_llama.py

Run the model of the flags, scaled down, for two steps in one process and in their layout, in fp64, and compare every
operation, gradient and update: equal to 1e-9, or where not. With --dry-run --num-gpus N the flags say the number of
ranks (default: one replica, without a layout two). The exit code is 0 if the layout is equal, 3 if not, 2 if a person
must act.
"""
"""Text of ``megatron-llama check-layouts --help``."""
TOLERANCE = 1e-9


@dataclass(frozen=True)
class CheckConfig:
    """The flags of check-layouts itself; all others are those of training."""

    max_ranks: int = 8
    """Processes of the layout. A larger one is made smaller: fewer replicas first."""

    def check(self) -> None:
        require_at_least(1, values_of(self, "max_ranks"))


def main_check(arguments: Sequence[str] | None = None) -> int:
    """Run check-layouts; its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words if words[:1] in (["-h"], ["--help"]) else []
    if "--max-ranks" in words:
        place = words.index("--max-ranks")
        own = words[place : place + 2]
        del words[place : place + 2]
    return run_tool(CheckConfig, partial(check_layouts, words), CHECK, own)


def check_layouts(words: Sequence[str], check: CheckConfig) -> int:
    """Compare the layout of the flags ``words`` with one process."""
    check.check()
    from megatron.comparison.bisection import described, rows
    from megatron.comparison.experiment import Processes, Request, batches_of, read_steps, recorded
    from megatron.comparison.layouts import one_process, small_layout, small_model

    given = CommandLine.of(words).parse().checked()
    ranks = given.parallel.model_parallel_size
    world_size = given.dry_run.num_gpus or (ranks if ranks > 1 else 2)
    config, size = small_layout(given, world_size, check.max_ranks)
    config = small_model(config, size)
    check_run(config, size)
    alone = one_process(config)
    with kept_in(None) as directory:
        run = Processes({"A": _ROOT, "B": _ROOT})
        saved = str(directory / "weights.safetensors")
        first, second = directory / "A", directory / "B"
        request = Request(save_weights=saved)
        run("A", recorded(alone, first / "records", request, fp64=True), 1, request, first)
        same = Request(batches_of(first / "records"), saved)
        run("B", recorded(config, second / "records", same, fp64=True), size, same, second)
        one, other = read_steps(first / "records"), read_steps(second / "records")
    found = list(rows(one, other))
    beyond = next((row for row in found if not row.distance <= TOLERANCE), None)
    model, layout = config.model, config.parallel
    print(
        f"{len(found)} tensors of two steps in fp64: {model.num_layers} layers of {model.hidden_size}, one process and "
        f"{size} ranks (tensor {layout.tensor_model_parallel_size}, context {layout.context_parallel_size}, pipeline "
        f"{layout.pipeline_model_parallel_size}, expert {layout.expert_model_parallel_size}, data "
        f"{layout.data_parallel_size(size)}, {layout.sharding_strategy})"
    )
    if beyond is None:
        print(f"equal: the largest difference is {max(row.distance for row in found):.1e} of a norm")
        return 0
    difference = described(replace(beyond, expected=TOLERANCE), one[0].facts)
    print(f"not equal: the first difference is in {difference.what}: {difference.remark}")
    return 3
