"""``--dry-run``: simulate the run and report its memory and communication."""

import json
import time
from pathlib import Path

from rich.console import Console

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.dry_run_page import dry_run_page
from megatron.planner.expert_load import largest_fitting_load
from megatron.planner.plan import Plan, Run, make_plan, planned_vocabulary
from megatron.planner.report import as_json, print_report
from megatron.planner.suggestions import find_suggestions

WIDTH = 150
"""Columns of the tables."""


def plan_and_report(config: RunConfig, console: Console | None = None) -> Plan:
    """Simulate the run of checked flags, write ``--dry-run-json`` and ``--dry-run-html``, and print the report.

    Raises :class:`~megatron.errors.UserError` as the run itself would.
    """
    started = time.monotonic()
    assert config.dry_run.num_gpus is not None
    run = Run.of(config, config.dry_run.num_gpus, planned_vocabulary(config))
    rank = config.dry_run.dry_run_rank
    if run.config is not config:
        print("layers of Transformer Engine are simulated with the local layers, whose memory is similar")
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)] if rank is None else [rank])
    suggestions = [] if plan.fits else find_suggestions(plan, config)
    fitting_load = largest_fitting_load(plan)
    if (path := config.dry_run.dry_run_json) is not None:
        text = json.dumps(as_json(plan, suggestions, fitting_load, time.monotonic() - started))
        _write("--dry-run-json", path, text + "\n")
    if (path := config.dry_run.dry_run_html) is not None:
        _write("--dry-run-html", path, dry_run_page(plan, suggestions, fitting_load, time.monotonic() - started))
    if console is None:
        # Lines are at least as wide as the tables, also in a narrow terminal or a file.
        console = Console(highlight=False, soft_wrap=True, width=max(Console().width, WIDTH))
    print_report(plan, suggestions, fitting_load, console)
    return plan


def _write(flag: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written ({error.strerror}): use another file, or make it writable."
        ) from error
