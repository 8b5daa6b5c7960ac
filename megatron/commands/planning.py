"""What a run will need: the search of its layout (``tools/plan_layout.py``, ``--plan``), and the dry run of one
(``--dry-run``)."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron.command_line.parser import parse_known
from megatron.commands.tool import write_file, write_json
from megatron.config.activations import ActivationConfig
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine
from megatron.config.dry_run import DryRunConfig, PlanConfig
from megatron.config.parallel import ParallelConfig, PipelineConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError, UserError
from megatron.flags import require_at_least, require_positive, values_of
from megatron.planner.search.accuracy import measured_level
from megatron.planner.search.enumeration import require_layout
from megatron.planner.search.layout import Job, Operation
from megatron.planner.step_time.workload import read_cluster
from megatron.urls import refuse_urls

# What needs torch is imported once the job is known to have layouts, or the run to be sound.
if TYPE_CHECKING:
    from megatron.planner.plan import Run
    from megatron.planner.search.result import SearchResult

DESCRIPTION = """\
Search the layout of a training run: which sizes, schedule, sharding and recompute are fastest and fit.

python tools/plan_layout.py --model llama3.1-70b --cluster h100 --num-gpus 64 --seq-length 8192 \\
--global-batch-size 128 --precision bf16 --html plan.html

Prints the best layouts with time, memory and what limits them, the flags of the best one, and the days and the price of
a run. The best five are simulated by the dry run. It needs no corpus, no tokenizer and no GPU.

Every further flag of pretrain_llama.py is a constraint: --tensor-model-parallel-size 8 searches the layouts with this
size. A model without a preset is described by its flags (--num-layers, --hidden-size, ..., --vocab-size).
docs/step_times.md describes the model of the step time and its errors.
"""
"""Text of ``tools/plan_layout.py --help``."""
_WIDTH_OF_SEARCH, _WIDTH_OF_DRY_RUN = 170, 150
"""Columns of the tables in a narrow terminal or a file."""
_TOP, _SIMULATED = 10, 5


@dataclass(frozen=True)
class PlanLayoutConfig:
    """The job; further flags of pretrain_llama.py are constraints."""

    num_gpus: int
    """GPUs of the run."""
    seq_length: int
    """Tokens of a sequence."""
    global_batch_size: int
    """Sequences of a step."""
    model: str | None = None
    """Preset, such as llama3.1-70b (default: the flags of the model)."""
    cluster: str = "h100"
    """Name of a cluster (a100-80gb, h100, h200, b200, gb200, ...), or the path of a TOML file that
    tools/calibrate_cluster.py wrote."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """fp8: the linear layers in FP8, everything else in bf16."""
    tokens: float = 1e12
    """Tokens of the whole run, for days and price."""
    price_per_gpu_hour: float | None = None
    """Price of a GPU for an hour (default: the cluster's)."""
    save_s: float = 5.0
    """Seconds for which a save blocks training."""
    restart_s: float = 300.0
    """Seconds from a failure to the first new step."""
    measured: str | None = None
    """--metrics-jsonl file of a real run on this cluster, whose step time corrects the level of all predictions."""
    top: int = _TOP
    """Layouts to print."""
    rehearse: int = _SIMULATED
    """Layouts to simulate by the dry run, from the best on."""
    json: str | None = None
    """File for all layouts in JSON."""
    html: str | None = None
    """File for the report, a page without references to other files."""

    def check(self) -> None:
        sizes = ("num_gpus", "seq_length", "global_batch_size", "top")
        require_at_least(1, values_of(self, *sizes))
        require_at_least(0, values_of(self, "rehearse", "save_s", "restart_s", "price_per_gpu_hour"))
        require_positive(values_of(self, "tokens"))
        files = values_of(self, "json", "html", "measured")
        refuse_urls(files | {"--cluster": self.cluster}, "name a local file")

    @property
    def words(self) -> list[str]:
        """The flags of the job, for pretrain_llama.py."""
        words = [] if self.model is None else ["--model", self.model]
        words += ["--seq-length", str(self.seq_length), "--global-batch-size", str(self.global_batch_size), "--bf16"]
        return words + (["--fp8-format", "hybrid"] if self.precision == "fp8" else [])


def parse(arguments: Sequence[str]) -> tuple[PlanLayoutConfig, CommandLine]:
    """The flags of this tool, and those of the job for pretrain_llama.py. Raises :class:`UserError`."""
    config, constraints = parse_known(PlanLayoutConfig, DESCRIPTION, arguments)
    config.check()
    read_cluster(config.cluster)
    # The precision is a flag of this tool, so a flag of the same meaning is not repeated.
    of_precision = ("--bf16", "--fp8-format") if config.precision == "fp8" else ("--bf16",)
    line = CommandLine.of_flags([one for one in constraints if one.flag not in of_precision]).over(config.words)
    line.parse().checked()
    return config, line


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Shows what is being done: a bar on a terminal, elsewhere a line for each part but the first, which is quick."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        shown = ["", "enumerate layouts"]

        def print_line(what: str, done: int, total: int) -> None:
            line = f"{what}: {done} of {total}" if total > 1 else what
            if line not in shown:
                print(f"> {line} ...", file=sys.stderr, flush=True)
                shown.append(line)

        yield print_line
        return
    # On a terminal a bar that is gone at the end.
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def plan(config: RunConfig, line: CommandLine, world_size: int) -> None:
    """``pretrain_llama.py --plan``: search the layout of the run of ``config``, which was parsed from ``line``."""
    config.plan.check()
    if world_size > 1:
        raise ConfigError("--plan is one process, whatever --num-gpus says: start it with python, not torchrun.")
    if config.dry_run.num_gpus is None:
        raise ConfigError("--plan needs --num-gpus: set it to the number of GPUs of the run.")
    of_run = line.without({"num_gpus", *(flag.name for flag in fields(PlanConfig))})
    operation = Operation(config.plan.plan_tokens, config.plan.plan_price_per_gpu_hour)
    job = Job.of(of_run, read_cluster(config.plan.plan_cluster), config.dry_run.num_gpus, operation)
    result = _search(job, config.plan.plan_measured, "--plan-measured")
    show(result, _TOP, {"--plan-json": config.plan.plan_json, "--plan-html": config.plan.plan_html})


def _search(job: Job, measured: str | None, measured_flag: str, num_simulated: int = _SIMULATED) -> "SearchResult":
    require_layout(job)
    level = None if measured is None else measured_level(Path(measured), job, measured_flag)
    # Only now: torch is not needed to refuse a job.
    from megatron.planner.search.search import search

    with progress_bar() as report:
        return search(job, num_simulated, level, report)


def show(result: "SearchResult", top: int, files: Mapping[str, str | None]) -> None:
    """Print the result, and write it to the files, by flag: JSON, then HTML."""
    from rich.console import Console

    from megatron.commands.pages.plan_report import plan_page, print_result
    from megatron.planner.search.result import as_json

    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, _WIDTH_OF_SEARCH))
    print_result(result, console, top)
    (json_flag, json_file), (html_flag, html_file) = files.items()
    if json_file is not None:
        write_json(json_file, as_json(result), json_flag)
    if html_file is not None:
        write_file(html_flag, html_file, plan_page(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan; the exit code."""
    try:
        config, line = parse(sys.argv[1:] if arguments is None else arguments)
        operation = Operation(config.tokens, config.price_per_gpu_hour, config.save_s, config.restart_s)
        job = Job.of(line, read_cluster(config.cluster), config.num_gpus, operation)
        result = _search(job, config.measured, "--measured", config.rehearse)
        show(result, config.top, {"--json": config.json, "--html": config.html})
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    return 0


# --- the dry run ---------------------------------------------------------------------------------------------

_GROUPS = (ParallelConfig, PipelineConfig, ActivationConfig, DryRunConfig)
"""Groups of flags of which a search takes few: the others fix a part of the layout, or have a meaning in some alone."""
_KEPT = (
    *("cp_comm_type", "distributed_backend", "distributed_timeout_minutes", "overlap_p2p_communication"),
    *("loss_chunk_size", "gpu_memory_gb", "gpus_per_node"),
)
"""Their flags that a search takes as they are."""


def dry_run(config: RunConfig, line: CommandLine, world_size: int) -> None:
    """``pretrain_llama.py --dry-run``: simulate the run of ``config``, which was parsed from ``line``, and report
    what it will need, also in ``--dry-run-json`` and ``--dry-run-html``."""
    config.dry_run.check()
    if world_size > 1:
        raise ConfigError("--dry-run is one process, whatever --num-gpus says: start it with python, not torchrun.")
    assert config.dry_run.num_gpus is not None
    check_run(config, config.dry_run.num_gpus)
    from rich.console import Console

    from megatron.commands.pages.dry_run_report import as_json, dry_run_page, print_report
    from megatron.planner.plan import Run, largest_fitting_load, make_plan
    from megatron.training.build.vocabulary import planned_vocabulary

    started = time.monotonic()
    run = Run.of(config, config.dry_run.num_gpus, planned_vocabulary(config))
    rank = config.dry_run.dry_run_rank
    if run.config is not config:
        print("layers of Transformer Engine are simulated with the local layers, whose memory is similar")
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)] if rank is None else [rank])
    # What does not fit is answered with the search of what does.
    command = None if plan.fits else plan_command(run, line)
    fitting_load = largest_fitting_load(plan)
    if (path := config.dry_run.dry_run_json) is not None:
        text = json.dumps(as_json(plan, command, fitting_load, time.monotonic() - started))
        write_file("--dry-run-json", path, text + "\n")
    if (path := config.dry_run.dry_run_html) is not None:
        write_file("--dry-run-html", path, dry_run_page(plan, command, fitting_load, time.monotonic() - started))
    # Lines are at least as wide as the tables, also in a narrow terminal or a file.
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, _WIDTH_OF_DRY_RUN))
    print_report(plan, command, fitting_load, console)


def plan_command(run: "Run", line: CommandLine) -> str:
    """The command that searches the layouts of ``run``: the flags of its ``line`` without those of the layout."""
    parallel, training = run.config.parallel, run.config.training
    dropped = {field.name for group in _GROUPS for field in fields(group)} - {*_KEPT} | {"micro_batch_size"}
    if parallel.hierarchical_context_parallel_sizes:
        dropped |= {"cp_comm_type"}  # needs the sizes
    batch = []
    if training.global_batch_size is None:
        # A search is for one batch size: that of the end of a schedule.
        dropped |= {"step_batch_size_schedule"}
        batch = ["--global-batch-size", str(run.global_batch_size)]
    words = [*line.without(dropped).words, *batch, "--plan", "--num-gpus", str(run.grid.world_size)]
    return shlex.join(["python", "pretrain_llama.py", *words])
