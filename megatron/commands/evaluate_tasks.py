"""Evaluate a trained model on tasks of EleutherAI's lm-eval (pip install lm-eval), such as hellaswag.

Runs in one process, or with tensor and pipeline parallelism under torchrun --nproc-per-node N. The table of the results
goes to standard output.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tyro

from megatron.commands.tool import exit_at_once, exit_code_of
from megatron.config.inference import LoadedModelConfig
from megatron.errors import ConfigError
from megatron.flags import require_at_least, values_of
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class EvaluateTasksConfig(LoadedModelConfig):
    """Model and tasks."""

    tasks: tuple[str, ...] = ()
    """Names of tasks and of groups of tasks."""
    include_path: str | None = None
    """Directory with tasks of your own (YAML files). A task file may name Python code beside it, which lm-eval runs:
    name only directories that you trust."""
    num_fewshot: int | None = None
    """Examples before each question (default: the task's number)."""
    limit: int | None = None
    """Questions of each task, for a trial (default: all)."""
    batch_size: int = 8
    """Questions that are computed at once."""
    seed: int = 1234
    """Seed of the choice of examples."""
    json: str | None = None
    """File for the results."""

    def check(self) -> None:
        super().check()
        if not self.tasks:
            raise ConfigError("--tasks is missing: set it to names of tasks, such as hellaswag.")
        refuse_urls(values_of(self, "include_path", "json"), "use a local path")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigError(f"--include-path {self.include_path} is not a directory: name the one with the tasks.")
        require_at_least(1, values_of(self, "limit", "batch_size"))
        require_at_least(0, values_of(self, "num_fewshot", "seed"))


def evaluate_tasks(config: EvaluateTasksConfig) -> dict[str, Any]:
    """lm-eval's results, the same on every rank. Raises :class:`ConfigError` for an unknown task."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"tools/evaluate_tasks.py needs lm-eval ({error}): pip install lm-eval.") from error
    from megatron.inference.lm_eval_model import LmEvalModel
    from megatron.inference.loading import open_model

    manager = None
    # lm-eval reads thousands of files to know its own tasks.
    for with_lm_evals in (False, True) if config.include_path is not None else (True,):
        manager = TaskManager(include_path=config.include_path, include_defaults=with_lm_evals)
        unknown = [name for name in config.tasks if not manager.match_tasks([name])]
        if not unknown:
            break
    if unknown:
        raise ConfigError(
            f"--tasks {' '.join(unknown)}: lm-eval has no such task: `lm-eval ls tasks` lists them, and --include-path "
            "adds your own."
        )
    with open_model(config) as model:
        results: dict[str, Any] = simple_evaluate(
            LmEvalModel(model, config.batch_size, config.add_bos),
            tasks=[*config.tasks],
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
            random_seed=config.seed,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
        return results


def show(results: dict[str, Any], config: EvaluateTasksConfig) -> None:
    """Print the table, and write ``--json``."""
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if config.json is not None:
        kept = {name: results.get(name) for name in ("results", "groups", "versions", "n-shot", "n-samples")}
        model = config.load if config.load is not None else config.load_hf
        try:
            Path(config.json).write_text(json.dumps({"model": model, **kept}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--json {config.json} cannot be written ({error.strerror}): use another file."
            ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate as ``arguments`` say, by default as ``sys.argv`` says; the exit code."""
    rank = int(os.environ.get("RANK", 0))

    def print_table() -> None:
        config = tyro.cli(EvaluateTasksConfig, args=arguments, description=__doc__, console_outputs=rank == 0)
        config.check()
        with redirect_stdout(sys.stderr):  # the table alone is the output
            results = evaluate_tasks(config)
        if rank == 0:
            show(results, config)

    return exit_code_of(print_table, rank)


def run() -> NoReturn:
    """Evaluate in this process, and end it with the exit code."""
    exit_at_once(main())


if __name__ == "__main__":
    run()
