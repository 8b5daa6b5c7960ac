"""A URL where a tool reads or writes a file: read as a URL, or refused before anything is written."""

import importlib
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import tyro

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
TAKES_A_URL = {
    "average_checkpoints": {"load"},
    "convert_checkpoint": {"load"},
    "evaluate": {"input", "json"},  # --json is refused only when the checkpoint has been read
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


def takes_text(kind: Any) -> bool:
    return kind in (str, Path) or any(takes_text(part) for part in get_args(kind) if not isinstance(part, str))


def dataclasses_of(kind: Any) -> Iterator[Any]:
    """The class of a command line, or those of its subcommands."""
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind
    for part in get_args(kind):
        yield from dataclasses_of(part)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_place_that_a_tool_takes_is_known(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fields of the classes that tyro makes a command line of."""
    seen: list[Any] = []

    def note(kind: Any, **_: Any) -> None:
        seen.append(kind)
        sys.exit()

    entry = REPOSITORY / "tools" / f"{script}.py" if script in COMMANDS else SCRIPTS[script]
    parses = any(word in SCRIPTS[script].read_text() for word in ("tyro.cli", "local_ranks"))
    if parses and "__main__" in entry.read_text():
        monkeypatch.setattr(tyro, "cli", note)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", [script])
        with pytest.raises(SystemExit):
            runpy.run_path(str(entry), run_name="__main__")
    found = {
        name
        for kind in seen
        for one in dataclasses_of(kind)
        for name, hint in get_type_hints(one).items()
        if takes_text(hint) and not name.startswith("_")
    }
    refused = {
        flag.removeprefix("--").replace("-", "_").lower() for tool, flag, _ in REFUSED if tool.split()[0] == script
    }
    assert found - NAMES_NO_PLACE == refused | TAKES_A_URL.get(script, set())
