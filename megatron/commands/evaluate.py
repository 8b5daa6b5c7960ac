"""Evaluate a model: the loss of whole texts, and tasks of lm-eval."""

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.command_line.parser import parse_known
from megatron.commands import pretrain_llama
from megatron.commands.tool import exit_at_once, run_on_ranks, write_file, write_json
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.inference import EvaluateConfig, LoadedModelConfig
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError, ExitCode
from megatron.flags import changed_flags, require_at_least, values_of
from megatron.metrics.writer import EvaluationRecord, MetricsWriter, SetLoss
from megatron.operation.heartbeat import Heartbeat
from megatron.operation.processes import available_cores, prepare_environment
from megatron.training.checkpoints.comparison import with_hugging_face
from megatron.training.run_files import StartedCommand, words_of_process
from megatron.urls import refuse_urls

if TYPE_CHECKING:
    from megatron.checkpoint.schema import SavedState
    from megatron.training.build.data import TextData
    from megatron.training.build.plan import RunPlan
    from megatron.training.context import RunContext

TEXTS = """\
Evaluate a model on whole texts: loss, perplexity and bits per byte.

Architecture, tokenizer, precision and masks come from the checkpoint of --load; every flag of pretrain_llama.py may
follow, such as the flags of a parallel layout under torchrun --nproc-per-node N.
"""
"""Text of ``tools/evaluate.py --help``."""
_MICROBATCH_TOKENS = 4096
_LONGEST_WINDOW = 4096
_LARGEST_EXPONENT = 700.0  # of a double


def run_config(
    evaluate: EvaluateConfig,
    line: CommandLine,
    saved: "SavedState | None",
    model_defaults: ModelConfig | None = None,
) -> RunConfig:
    """The flags of an evaluation: those of ``line`` override the flags of the checkpoint's run."""
    given = line.parse().checked()
    if saved is None:
        length = min(given.model.max_position_embeddings or _LONGEST_WINDOW, _LONGEST_WINDOW)
        defaults = RunConfig(data=DataConfig(seq_length=length, num_workers=0))
    else:
        defaults = defaults_of(saved, given)
    defaults = replace(defaults, model=model_defaults or ModelConfig())
    config = line.with_defaults(defaults, "the checkpoint").parse().checked()
    assert config.data.seq_length is not None
    size = config.training.micro_batch_size or max(1, _MICROBATCH_TOKENS // config.data.seq_length)
    from_checkpoint = config.checkpoint.load is not None
    return replace(
        config,
        training=replace(config.training, micro_batch_size=size),
        validation=replace(config.validation, skip_train=True),
        checkpoint=replace(config.checkpoint, use_checkpoint_args=from_checkpoint),
        data=replace(config.data, valid_data_path=evaluate.input),
    )


def defaults_of(saved: "SavedState", given: RunConfig) -> RunConfig:
    """The defaults of an evaluation from the run of a checkpoint: tokenizer, masks, length and number format."""
    trained = saved.flag_group("data", DataConfig)
    precision = PrecisionConfig()
    if given.precision == PrecisionConfig():
        # FP8 stays a choice of the evaluation: it is the format of products, not of weights.
        name = saved.flag_group("precision", PrecisionConfig).name
        precision = PrecisionConfig(bf16=name == "bf16", fp16=name == "fp16", fp64=name == "fp64")
    return RunConfig(
        tokenizer=saved.flag_group("tokenizer", TokenizerConfig),
        precision=precision,
        data=DataConfig(
            seq_length=trained.seq_length or min(saved.architecture.max_position_embeddings, _LONGEST_WINDOW),
            eod_mask_loss=trained.eod_mask_loss,
            reset_attention_mask=trained.reset_attention_mask,
            dataloader_inter_document_masking=trained.dataloader_inter_document_masking,
            reset_position_ids=trained.reset_position_ids,
            num_workers=0,
        ),
    )


def read_saved_state(config: RunConfig) -> "SavedState":
    """The state of the checkpoint of ``--load``, with the place where its tokenizer is now."""
    from megatron.checkpoint.files import path_of
    from megatron.checkpoint.finding import missing_checkpoint
    from megatron.checkpoint.tokenizer_files import tokenizer_of
    from megatron.training.checkpoints.saved_run import look_up_saved_run

    saved = look_up_saved_run(config.checkpoint)
    if saved is None:
        raise missing_checkpoint(path_of(str(config.checkpoint.load)))
    tokenizer = tokenizer_of(saved.state, saved.root, saved.iteration)
    return replace(saved.state, flags={**saved.state.flags, "tokenizer": asdict(tokenizer)})


def check_flags(config: RunConfig) -> None:
    """Raise :class:`ConfigError` for a flag of ``pretrain_llama.py`` that an evaluation of texts cannot honour."""
    load, load_hf = config.checkpoint.load, config.checkpoint.load_hf
    if (load is None) == (load_hf is None):
        is_missing = "is missing" if load is None else "and --load-hf exclude each other"
        raise ConfigError(
            f"--load {is_missing}: set it to the checkpoints of the model, or --load-hf to its directory."
        )
    for flag in config.data.sources:
        raise ConfigError(f"{flag} has no effect in tools/evaluate.py: name the texts with --input.")
    groups = {
        config.checkpoint: ("save", "save_interval", "finetune", "pretrained_checkpoint"),
        config.validation: ("eval_interval", "eval_iters", "eval_global_batch_size"),
        config.training: ("train_iters", "train_samples"),
        config.dry_run: ("dry_run",),
        config.plan: ("plan",),
    }
    for group, names in groups.items():
        for flag in changed_flags(group, *names):
            raise ConfigError(f"{flag} has no effect in tools/evaluate.py, which reads every text once: remove it.")


def start(arguments: Sequence[str], rank: int, world_size: int, heartbeat: Heartbeat) -> ExitCode:
    """Evaluate as ``arguments`` say."""
    evaluate, others = parse_known(EvaluateConfig, TEXTS, arguments, print_messages=rank == 0)
    line = CommandLine.of_flags(others)
    given = line.parse().checked()
    if not evaluate.input:
        raise ConfigError("--input is missing: set it to the texts to evaluate.")
    refuse_urls(values_of(evaluate, "json"), "use a local file")
    require_at_least(1, values_of(evaluate, "stride"))
    check_flags(given)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    queues = prepare_environment(given, os.environ, available_cores(), local_world_size)
    if given.checkpoint.load_hf is not None:
        line = with_hugging_face(line, given)
    pretrain_llama.import_for_training()
    from megatron.training.build.data import TextData
    from megatron.training.build.run import RunParts
    from megatron.training.initialize import Process
    from megatron.training.pretrain import pretrain

    saved = None if given.checkpoint.load is None else read_saved_state(given)
    config = run_config(evaluate, line, saved)
    if evaluate.stride is not None and evaluate.stride > config.seq_length:
        raise ConfigError(
            f"--stride {evaluate.stride} is more than --seq-length {config.seq_length}, so tokens would be left out: "
            f"use {config.seq_length} or less."
        )
    check_run(config, world_size)
    data = TextData(evaluate)
    parts = RunParts(build_data=data.build, open_writers=partial(open_writers, evaluate, data))
    process = Process.from_environment(os.environ)
    command = StartedCommand.of(arguments, sys.orig_argv, words_of_process(os.getppid()), os.environ, os.getcwd())
    flags_over = partial(run_config, evaluate, line, saved)
    return pretrain(config, process, flags_over, queues, command, heartbeat, parts)


def open_writers(
    evaluate: EvaluateConfig, data: "TextData", context: "RunContext", plan: "RunPlan"
) -> list[MetricsWriter]:
    """The writers of the flags, with the results of this tool in place of Megatron-LM's lines on the console."""
    from megatron.metrics.console import ConsoleWriter
    from megatron.training.build import run

    others = [writer for writer in run.open_writers(context, plan) if not isinstance(writer, ConsoleWriter)]
    return [*others, Results(evaluate, context.config, data)] if context.topology.rank == 0 else []


@dataclass
class Results(MetricsWriter):
    """Prints the results on rank 0, and writes them to ``--json``."""

    evaluate: EvaluateConfig
    config: RunConfig
    data: "TextData"

    def write_evaluation(self, record: EvaluationRecord) -> None:
        assert self.data.texts is not None
        documents = [text.num_documents for text in self.data.texts]
        rows = [
            {"input": name, "documents": number, **figures(one)}
            for name, number, one in zip(self.evaluate.input, documents, record.sets.values(), strict=True)
        ]
        total = {"documents": sum(documents), **figures(record)}
        for name, row in zip(record.sets, rows, strict=True):
            print(describe(name, row), flush=True)
        if len(rows) > 1:
            print(describe("all texts", total), flush=True)
        if self.evaluate.json is not None:
            checkpoint = self.config.checkpoint
            result = {
                "model": checkpoint.load if checkpoint.load is not None else checkpoint.load_hf,
                "iteration": record.iteration,
                "seq_length": self.config.seq_length,
                "stride": self.evaluate.stride or self.config.seq_length,
                "texts": rows,
                "total": total,
            }
            write_json(self.evaluate.json, result)


def figures(one: SetLoss) -> dict[str, float | int | None]:
    """The results of a text, for JSON: None where there is none."""
    is_finite = math.isfinite(one.loss)
    return {
        "tokens": one.num_tokens,
        "bytes": one.num_bytes,
        "loss": one.loss if is_finite else None,
        "perplexity": math.exp(one.loss) if is_finite and one.loss < _LARGEST_EXPONENT else None,
        "bits_per_byte": one.bits_per_byte if is_finite else None,
    }


def describe(name: str, row: dict[str, Any]) -> str:
    """A line for people."""
    formats = {"loss": ".6f", "perplexity": ".6g", "bits_per_byte": ".6f"}
    words = [f"{key.replace('_', ' ')} {row[key]:{form}}" for key, form in formats.items() if row[key] is not None]
    counts = [f"{row[key]:,} {key}" for key in ("tokens", "bytes", "documents") if row[key] is not None]
    return f"{name}: {', '.join(words) or 'the loss is not finite'} ({', '.join(counts)})"


main = partial(pretrain_llama.main, start=start)
run = partial(pretrain_llama.run, start=start)


# --- tasks of lm-eval ----------------------------------------------------------------------------------------

TASKS = """\
Evaluate a trained model on tasks of EleutherAI's lm-eval (pip install lm-eval), such as hellaswag.

Runs in one process, or with tensor and pipeline parallelism under torchrun --nproc-per-node N. The table of the results
goes to standard output.
"""
"""Text of ``tools/evaluate_tasks.py --help``."""


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
        write_file("--json", config.json, json.dumps({"model": model, **kept}, indent=2) + "\n")


def evaluate_and_show(config: EvaluateTasksConfig, rank: int) -> None:
    config.check()
    with redirect_stdout(sys.stderr):  # the table alone is the output
        results = evaluate_tasks(config)
    if rank == 0:
        show(results, config)


main_tasks = partial(run_on_ranks, EvaluateTasksConfig, evaluate_and_show, TASKS)


def run_tasks() -> NoReturn:
    exit_at_once(main_tasks())


if __name__ == "__main__":
    run(sys.argv[1:])
