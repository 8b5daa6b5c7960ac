"""A URL where a flag of training or of a tool names a place: it is read or written as a URL, or refused before anything
is written, but never a folder named "s3:"."""

import importlib
import os
import signal
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from megatron.command_line.words import most_values
from megatron.commands.convert_checkpoint import COMMANDS
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import flag_of
from megatron.urls import is_url, refuse_urls
from tests.end_to_end.run_process import REPOSITORY
from tests.tool_entries import ENTRIES, command_lines

URL = "s3://bucket/place"

SCRIPTS = {name: REPOSITORY / f"tools/{name}.py" for name in ENTRIES}
SCRIPTS |= {path.stem: path for path in sorted((REPOSITORY / "benchmarks").glob("*.py"))}
del SCRIPTS["evaluate"]  # runs as a rank: end_to_end/test_evaluate.py

NEEDED = {
    "average_checkpoints": "--load a --iterations 1 2",
    "calibrate_cluster": "--out a.toml",
    "compare_losses": "--reference a.jsonl --metrics a.jsonl --bands 1",
    "convert_checkpoint from-hf": "--hf a --save a",
    "convert_checkpoint from-megatron": "--load a --save b",
    "convert_checkpoint to-hf": "--load a --hf b",
    "convert_checkpoint upcycle": "--load a --save b --num-experts 8",
    "course": "check 1",
    "diff_runs": "a b",
    "diff_runs a": URL,
    "diff_runs b": "a",
    "evaluate_tasks": "--load a --tasks b",
    "evaluate_tasks --load-hf": "--tasks b",
    "explore": "--out a",
    "explore --out": "",
    "first_contact": "--out a",
    "first_contact_report": "--out a",
    "generate_text --load-hf": "--prompt b",
    "generate_text --output": "--load a --prompts b",
    "generate_text --prompts": "--load a",
    "generate_text --tokenizer-model": "--load a --prompt b",
    "gpu_day": "--out a",
    "inspect_dataset": "a",
    "merge_datasets": "--input a",
    "pipeline_schedule": "--schedule 1f1b --stages 2 --microbatches 2",
    "pipeline_schedule --measured": "",
    "plan_layout": "--num-gpus 8 --seq-length 8 --global-batch-size 8",
    "plot_metrics": "--metrics a.jsonl --output a.png",
    "predict_runs": "--csv a --json b",
    "preprocess_data": "--input a --tokenizer-type NullTokenizer --vocab-size 9",
    "rank_groups": "--num-gpus 8",
    "report_run": "a",
    "report_run run": "",
    "simulate_run": "--days 1 --seeds 1",
    "train_tokenizer": "--input a --vocab-size 300",
}
"""What a tool, or one of its flags, needs beside the flag."""
TAKES_A_URL = {
    "average_checkpoints": {"load"},
    "convert_checkpoint to-hf": {"load"},
    "convert_checkpoint upcycle": {"load"},
    "evaluate_tasks": {"load"},
    "generate_text": {"load"},
    "inspect_checkpoint": {"load"},
    "inspect_dataset": {"prefix"},
    "merge_datasets": {"input"},
    "preprocess_data": {"input"},
    "train_tokenizer": {"input"},
}
POSITIONAL = {("report_run", "run"), ("diff_runs", "a"), ("diff_runs", "b")}
NAMES_NO_PLACE = {
    "dataset_config", "dataset_split", "device", "flags", "json_key", "moe_layer_freq", "json_keys", "max_shard_size",
    "model", "models", "name", "names", "only", "peers", "precisions", "prompt", "rows", "shapes", "tasks",
}  # fmt: skip


def takes_text(kind: Any) -> bool:
    return kind in (str, Path) or any(takes_text(part) for part in get_args(kind) if not isinstance(part, str))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_flag_that_does_not_take_a_url_says_so(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every flag of a text or a path that is not in the tables above."""
    monkeypatch.chdir(tmp_path)
    # A tool that handles SIGTERM is called in this process.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [script])
    # tests/planner/test_arithmetic.py has the flags of estimate.
    for kind in command_lines(SCRIPTS[script], [*COMMANDS] if script == "convert_checkpoint" else []):
        subcommand = [name for name, one in COMMANDS.items() if one is kind]
        tool = " ".join([script, *subcommand])
        places = {name for name, hint in get_type_hints(kind).items() if takes_text(hint) and not name.startswith("_")}
        assert TAKES_A_URL.get(tool, set()) <= places
        for name in sorted(places - NAMES_NO_PLACE - TAKES_A_URL.get(tool, set())):
            flag = name if (script, name) in POSITIONAL else flag_of(name)
            needed = NEEDED.get(f"{script} {flag}", NEEDED.get(tool, "")).split()
            suffix = f".{name}" if name in ("svg", "png") else ""
            named = [flag] if flag.startswith("--") else []  # a word without a flag
            monkeypatch.setattr(sys, "argv", [script, *subcommand, *needed, *named, URL + suffix])
            module, function = ENTRIES.get(script, (f"benchmarks.{script}", "main"))
            try:
                status = getattr(importlib.import_module(module), function.replace("run", "main"))()
            except SystemExit as end:
                status = end.code
            # What sys.exit() is given is printed by the interpreter.
            sentence = status if isinstance(status, str) else capsys.readouterr().err.strip()
            assert status and sentence.startswith(f"ERROR: {flag.upper() if not named else flag} s3:/"), sentence
            assert "is a URL, but the flag needs a local path: " in sentence and "\n" not in sentence
    assert os.listdir(tmp_path) == []


# --- flags of training ---------------------------------------------------------------------------------------

FLAGS_WITH_URLS = """
    load pretrained_checkpoint redundant_save data_path train_data_path valid_data_path test_data_path
    train_text_path valid_text_path
"""
FLAGS_WITHOUT_PLACE = """
    freeze_parameters inject_fault pipeline_model_parallel_layout moe_layer_freq no_rope_freq new_data_stage rank_order
    save_interval split step_batch_size_schedule validation_set_names wandb_entity wandb_exp_name wandb_project kernel
    window_size window_attn_skip_freq text_key fim_prefix_token fim_middle_token fim_suffix_token
"""


def text_flags() -> list[tuple[Any, Field[Any]]]:
    """Every flag of training that takes any text, with the group that it is in."""
    return [
        (group.default_factory, flag)
        for group in fields(RunConfig)
        for flag in fields(group.default_factory)  # type: ignore[arg-type]
        if takes_text(flag.type)
    ]


@pytest.mark.parametrize(
    ("group", "flag"),
    [
        pytest.param(group, flag, id=flag.name)
        for group, flag in text_flags()
        if flag.name not in f"{FLAGS_WITH_URLS} {FLAGS_WITHOUT_PLACE}".split()
    ],
)
def test_a_flag_of_training_that_does_not_take_a_url_says_so(group: Any, flag: Field[Any]) -> None:
    values = (URL,) if most_values(get_type_hints(group)[flag.name]) > 1 else URL
    name = "--" + flag.name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{name} {URL} is a URL, but the flag needs a local path: ."):
        group(**{flag.name: values}).check()


def test_every_listed_flag_exists() -> None:
    assert {flag.name for _, flag in text_flags()} >= {*FLAGS_WITH_URLS.split(), *FLAGS_WITHOUT_PLACE.split()}


def test_a_scheme_makes_a_url_and_all_else_is_a_path() -> None:
    for place in ("s3://bucket/run", "gs://b", "simplecache::s3://bucket/run", "memory://x", "file:///x"):
        assert is_url(place), place
    for place in ("run", "./run", "/data/a:b", "a:b/c", "C:/run", "s3:/bucket"):
        assert not is_url(place), place


def test_a_path_object_that_has_lost_a_slash_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"--json s3:/bucket/x is a URL"):
        refuse_urls({"--json": Path("s3://bucket/x")}, "name a local file")
    refuse_urls({"--json": Path("out/a:b.json"), "--svg": None}, "name a local file")
