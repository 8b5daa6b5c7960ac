"""``--dry-run``: simulate the run and report its memory and communication."""

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from megatron.commands.pages.dry_run_report import as_json, dry_run_page, print_report
from megatron.config.compute import ActivationConfig
from megatron.config.dry_run import DryRunConfig
from megatron.config.parallel import ParallelConfig, PipelineConfig
from megatron.config.run import RunConfig
from megatron.config.words import without_flags
from megatron.errors import ConfigError
from megatron.planner.plan import Plan, Run, largest_fitting_load, make_plan
from megatron.training.build.vocabulary import planned_vocabulary

WIDTH = 150
"""Columns of the tables."""
_GROUPS = (ParallelConfig, PipelineConfig, ActivationConfig, DryRunConfig)
"""Groups of flags of which a search takes few: the others fix a part of the layout, or have a meaning in some alone."""
_KEPT = (
    *("cp_comm_type", "distributed_backend", "distributed_timeout_minutes", "overlap_p2p_communication"),
    *("loss_chunk_size", "gpu_memory_gb", "gpus_per_node"),
)
"""Their flags that a search takes as they are."""


def plan_and_report(config: RunConfig, arguments: Sequence[str], console: Console | None = None) -> Plan:
    """Simulate the run of checked flags, write ``--dry-run-json`` and ``--dry-run-html``, and print the report.

    ``arguments`` are the words that ``config`` was parsed from. Raises :class:`~megatron.errors.UserError` as the run
    itself would.
    """
    started = time.monotonic()
    assert config.dry_run.num_gpus is not None
    run = Run.of(config, config.dry_run.num_gpus, planned_vocabulary(config))
    rank = config.dry_run.dry_run_rank
    if run.config is not config:
        print("layers of Transformer Engine are simulated with the local layers, whose memory is similar")
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)] if rank is None else [rank])
    # What does not fit is answered with the search of what does.
    command = None if plan.fits else plan_command(run, arguments)
    fitting_load = largest_fitting_load(plan)
    if (path := config.dry_run.dry_run_json) is not None:
        text = json.dumps(as_json(plan, command, fitting_load, time.monotonic() - started))
        _write("--dry-run-json", path, text + "\n")
    if (path := config.dry_run.dry_run_html) is not None:
        _write("--dry-run-html", path, dry_run_page(plan, command, fitting_load, time.monotonic() - started))
    if console is None:
        # Lines are at least as wide as the tables, also in a narrow terminal or a file.
        console = Console(highlight=False, soft_wrap=True, width=max(Console().width, WIDTH))
    print_report(plan, command, fitting_load, console)
    return plan


def plan_command(run: Run, arguments: Sequence[str]) -> str:
    """The command that searches the layouts of ``run``: the words of its command line without those of the layout."""
    parallel, training = run.config.parallel, run.config.training
    dropped = {field.name for group in _GROUPS for field in fields(group)} - {*_KEPT} | {"micro_batch_size"}
    if parallel.hierarchical_context_parallel_sizes:
        dropped |= {"cp_comm_type"}  # needs the sizes
    batch = []
    if training.global_batch_size is None:
        # A search is for one batch size: that of the end of a schedule.
        dropped |= {"step_batch_size_schedule"}
        batch = ["--global-batch-size", str(run.global_batch_size)]
    dropped |= {f"no_{name}" for name in dropped}
    words = [*without_flags(arguments, dropped), *batch, "--plan", "--num-gpus", str(run.grid.world_size)]
    return shlex.join(["python", "pretrain_llama.py", *words])


def _write(flag: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written ({error.strerror}): use another file, or make it writable."
        ) from error
