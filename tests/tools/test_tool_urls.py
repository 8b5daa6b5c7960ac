"""A URL where a tool reads or writes a file: read as a URL, or refused before anything is written."""

import ast
import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end.run_process import REPOSITORY

URL = "s3://bucket/place"

COMMANDS = {path.stem: REPOSITORY / "megatron" / "commands" / path.name for path in (REPOSITORY / "tools").glob("*.py")}
SCRIPTS = dict(sorted(COMMANDS.items())) | {
    path.stem: path for path in sorted((REPOSITORY / "benchmarks").glob("*.py"))
}

PLANNED = ["--num-gpus", "8", "--seq-length", "8", "--global-batch-size", "8"]
REFUSED = [
    ("average_checkpoints", "--save", ["--load", "a", "--iterations", "1", "2"]),
    ("benchmark_checkpoint", "--directory", []),
    ("benchmark_checkpoint", "--json", []),
    ("benchmark_cpu", "--json", []),
    ("benchmark_data", "--input", []),
    ("benchmark_data", "--json", []),
    ("benchmark_data", "--sentencepiece-model", []),
    ("benchmark_data", "--tiktoken-model", []),
    ("benchmark_data", "--huggingface-model", []),
    ("benchmark_collectives", "--json", []),
    ("benchmark_schedules", "--json", []),
    ("benchmark_generate", "--json", []),
    ("benchmark_planner_cpu", "--json", []),
    ("benchmark_step", "--json", []),
    ("calibrate_cluster", "--base", ["--out", "a.toml"]),
    ("calibrate_cluster", "--out", []),
    ("check_node", "--json", []),
    ("check_node", "--save", []),
    ("compare_losses", "--metrics", ["--reference", "a.jsonl", "--bands", "1"]),
    ("compare_losses", "--reference", ["--metrics", "a.jsonl", "--bands", "1"]),
    ("convert_checkpoint from-hf", "--hf", ["--save", "a"]),
    ("convert_checkpoint from-hf", "--save", ["--hf", "a"]),
    ("convert_checkpoint from-megatron", "--load", ["--save", "a"]),
    ("convert_checkpoint from-megatron", "--save", ["--load", "a"]),
    ("convert_checkpoint from-megatron", "--tokenizer-model", ["--load", "a", "--save", "b"]),
    ("convert_checkpoint to-hf", "--hf", ["--load", "a"]),
    ("convert_checkpoint upcycle", "--save", ["--load", "a", "--num-experts", "8"]),
    ("evaluate_tasks", "--include-path", ["--load", "a", "--tasks", "b"]),
    ("evaluate_tasks", "--json", ["--load", "a", "--tasks", "b"]),
    ("evaluate_tasks", "--load-hf", ["--tasks", "b"]),
    ("evaluate_tasks", "--tokenizer-model", ["--load", "a", "--tasks", "b"]),
    ("first_contact", "--archive", ["--out", "a"]),
    ("first_contact", "--out", []),
    ("first_contact_report", "--out", []),
    ("first_contact_report", "--page", ["--out", "a"]),
    ("flag_reference", "--docs", []),
    ("generate_text", "--load-hf", ["--prompt", "b"]),
    ("generate_text", "--output", ["--load", "a", "--prompts", "b"]),
    ("generate_text", "--prompts", ["--load", "a"]),
    ("generate_text", "--tokenizer-model", ["--load", "a", "--prompt", "b"]),
    ("gpu_day", "--archive", ["--out", "a"]),
    ("gpu_day", "--out", []),
    ("inspect_dataset", "--plot", ["a"]),
    ("merge_datasets", "--output-prefix", ["--input", "a"]),
    ("mup_transfer", "--json", []),
    ("mup_transfer", "--plot", []),
    ("parallelism_pictures", "--output", []),
    ("peers", "--cache-dir", []),
    ("peers", "--json", []),
    ("pipeline_schedule", "--json", ["--schedule", "1f1b", "--stages", "2", "--microbatches", "2"]),
    ("pipeline_schedule", "--measured", []),
    ("pipeline_schedule", "--png", ["--schedule", "1f1b", "--stages", "2", "--microbatches", "2"]),
    ("pipeline_schedule", "--svg", ["--schedule", "1f1b", "--stages", "2", "--microbatches", "2"]),
    ("plan_layout", "--cluster", PLANNED),
    ("plan_layout", "--html", PLANNED),
    ("plan_layout", "--json", PLANNED),
    ("plan_layout", "--measured", PLANNED),
    ("plot_metrics", "--metrics", ["--output", "a.png"]),
    ("plot_metrics", "--output", ["--metrics", "a.jsonl"]),
    ("predict_runs", "--csv", ["--json", "a"]),
    ("predict_runs", "--json", ["--csv", "a"]),
    ("preprocess_data", "--output-prefix", ["--input", "a", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]),
    ("rank_groups", "--svg", ["--num-gpus", "8"]),
    ("report_run", "RUN", []),
    ("report_run", "--html", ["a"]),
    ("report_run", "--json", ["a"]),
    ("report_run", "--metrics", ["a"]),
    ("scaling", "--json", []),
    ("scaling", "--picture", []),
    ("train_tokenizer", "--model-prefix", ["--input", "a", "--vocab-size", "300"]),
]
SHARED_FLAGS = ("megatron.config.", "benchmarks.gpu_lines.")
"""Where the flags are that several scripts share."""
TAKES_A_URL = {
    "average_checkpoints": {"load"},
    "convert_checkpoint": {"load"},
    "evaluate_tasks": {"load"},
    "generate_text": {"load"},
    "inspect_checkpoint": {"load"},
    "inspect_dataset": {"prefix"},
    "merge_datasets": {"input"},
    "preprocess_data": {"input"},
    "train_tokenizer": {"input"},
}
NAMES_NO_PLACE = {
    "dataset_config",
    "dataset_split",
    "device",
    "flags",
    "json_key",
    "moe_layer_freq",
    "json_keys",
    "max_shard_size",
    "model",
    "name",
    "names",
    "only",
    "peers",
    "prompt",
    "rows",
    "shapes",
    "tasks",
}


@pytest.mark.parametrize(("tool", "flag", "others"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_flag_that_does_not_take_a_url_says_so(
    tool: str,
    flag: str,
    others: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, *subcommand = tool.split()
    suffix = flag.replace("--", ".") if flag in ("--svg", "--png") else ""
    named = [flag] if flag.startswith("--") else []  # a word without a flag
    monkeypatch.chdir(tmp_path)
    # A tool that handles SIGTERM is called in this process.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [script, *subcommand, *others, *named, URL + suffix])
    try:
        status = importlib.import_module(
            ".".join((*SCRIPTS[script].parent.relative_to(REPOSITORY).parts, script))
        ).main()
    except SystemExit as end:
        status = end.code
    # What sys.exit() is given is printed by the interpreter.
    sentence = status if isinstance(status, str) else capsys.readouterr().err.strip()
    assert status and sentence.startswith(f"ERROR: {flag} s3:/")
    assert "is a URL, but the flag needs a local path: " in sentence and "\n" not in sentence
    assert os.listdir(tmp_path) == []


def places(script: Path) -> set[str]:
    """The flags of a script that take a text or a path: the fields of classes that tyro makes a command line of."""
    tree = ast.parse(script.read_text())
    parsed = {name for call in ast.walk(tree) if _is_command_line(call) for name in _names(call)}
    while True:
        named = {name for one in tree.body if _defines(one, parsed) for name in _names(one)}
        if named <= parsed:
            break
        parsed |= named
    return {
        field.target.id
        for one in [*tree.body, *_classes_of_bases(tree, parsed)]
        if isinstance(one, ast.ClassDef) and one.name in parsed
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if {"str", "Path"} & _names(field.annotation)
    }


def _classes_of_bases(tree: ast.Module, parsed: set[str]) -> list[ast.stmt]:
    """The definitions elsewhere that classes of the script take over; their names join ``parsed``."""
    bases = {
        base.id
        for one in tree.body
        if isinstance(one, ast.ClassDef)
        for base in one.bases
        if isinstance(base, ast.Name)
    }
    found: list[ast.stmt] = []
    for one in tree.body:
        if isinstance(one, ast.ImportFrom) and one.module and one.module.startswith(SHARED_FLAGS):
            taken_over = {alias.name for alias in one.names} & bases
            source = REPOSITORY.joinpath(*one.module.split(".")).with_suffix(".py")
            found += ast.parse(source.read_text()).body if taken_over else []
            parsed |= taken_over
    return found


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_command_line(node: ast.AST) -> bool:
    # ``parse`` of benchmarks/local_ranks.py parses the class, too.
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("tyro.cli", "parse")


def _defines(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id in names for one in node.targets)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_every_place_that_a_tool_takes_is_known(script: Path) -> None:
    refused = {
        flag.removeprefix("--").replace("-", "_").lower() for tool, flag, _ in REFUSED if tool.split()[0] == script.stem
    }
    assert places(script) - NAMES_NO_PLACE == refused | TAKES_A_URL.get(script.stem, set())
