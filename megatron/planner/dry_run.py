"""``--dry-run``: plan, report."""

import json
import time
from pathlib import Path

from rich.console import Console

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.plan import Plan, Run, make_plan, planned_vocabulary_size
from megatron.planner.report import as_json, print_report
from megatron.planner.suggestions import find_suggestions
from megatron.training.build.vocabulary import Vocabulary, load_vocabulary

WIDTH = 150
"""Columns that the tables take."""


def plan_and_report(config: RunConfig, console: Console | None = None) -> Plan:
    """Rehearse the run of checked flags, and say what it needs; ``--dry-run-json`` is written first.

    Raises :class:`~megatron.errors.UserError` as the run itself would.
    """
    started = time.monotonic()
    assert config.dry_run.num_gpus is not None
    run = Run.of(config, config.dry_run.num_gpus, find_vocabulary(config))
    rank = config.dry_run.dry_run_rank
    if run.config is not config:
        print("layers of Transformer Engine are simulated with the local layers, whose memory is similar")
    plan = make_plan(run, [run.rank_of_stage(stage) for stage in range(run.grid.pp)] if rank is None else [rank])
    suggestions = [] if plan.fits else find_suggestions(plan, config)
    if config.dry_run.dry_run_json is not None:
        _write(Path(config.dry_run.dry_run_json), json.dumps(as_json(plan, suggestions, time.monotonic() - started)))
    print_report(plan, suggestions, console or default_console())
    return plan


def default_console() -> Console:
    """The terminal; where it is narrow, or a file, lines are as wide as the tables."""
    width = Console().width
    return Console(highlight=False, soft_wrap=True, width=max(width, WIDTH))


def find_vocabulary(config: RunConfig) -> Vocabulary:
    """That of the tokenizer where its file is here, else what the flags tell."""
    model = config.tokenizer.tokenizer_model
    if config.tokenizer.tokenizer_type is None or (model is not None and Path(model).exists()):
        return load_vocabulary(config)
    size = planned_vocabulary_size(config)
    return Vocabulary(size, size - 1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--dry-run-json {path} cannot be written ({error.strerror}): use another file, or make it writable."
        ) from error
