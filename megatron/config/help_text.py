"""The text of ``--help``: an overview, one group, one flag, or everything."""

import shutil
from collections.abc import Iterable
from dataclasses import fields
from textwrap import fill
from typing import get_type_hints

from megatron.config.help import Flag, docstrings, flags_of
from megatron.config.run import RunConfig
from megatron.config.words import suggestion
from megatron.errors import ConfigError

_INTRODUCTION = """\
Pretrain a Llama model.

  One process:   python pretrain_llama.py FLAGS
  Several:       torchrun --nproc-per-node N pretrain_llama.py FLAGS
  A first run:   bash examples/quickstart.sh"""

MOST_USED = (
    "--model",
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--data-path",
    "--mock-data",
    "--tokenizer-type",
    "--tokenizer-model",
    "--seq-length",
    "--micro-batch-size",
    "--global-batch-size",
    "--train-iters",
    "--lr",
    "--min-lr",
    "--lr-decay-style",
    "--lr-warmup-iters",
    "--weight-decay",
    "--bf16",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--use-distributed-optimizer",
    "--recompute-activations",
    "--save",
    "--save-interval",
    "--load",
    "--eval-interval",
    "--log-interval",
    "--dry-run",
    "--config",
)
"""Flags of the overview."""

_INDENT = " " * 6


def help_text(topic: str) -> str:
    """The help about ``topic``: a group, a flag, ``all``, or empty for the overview.

    Raises :class:`ConfigError` for another word.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    name = topic.removeprefix("--").replace("_", "-")
    if name == "":
        return _overview(width)
    if name == "all":
        return "\n\n".join([_INTRODUCTION, *(_group(group, width) for group in group_names())])
    if name in group_names():
        return _group(name, width)
    for group, title in group_names().items():
        for flag in _flags(group):
            if flag.name == f"--{name.removeprefix('no-')}" or flag.name == f"--{name}":
                return f"{_entry(flag, width)}\n\n{title}: --help {group} shows the flags beside it."
    raise ConfigError(
        f"--help {topic} is no group and no flag: {suggestion('--' + name).replace('see --help.', 'use --help alone.')}"
    )


def group_names() -> dict[str, str]:
    """The title of every group by its name for ``--help``, flags for compatibility last."""
    titles = docstrings(RunConfig)
    return {field.name.replace("_", "-"): titles[field.name].rstrip(".") for field in fields(RunConfig)}


def _flags(group: str) -> Iterable[Flag]:
    return flags_of(get_type_hints(RunConfig)[group.replace("-", "_")])


def _overview(width: int) -> str:
    by_name = {flag.name: flag for group in group_names() for flag in _flags(group)}
    left = max(len(_usage(by_name[name])) for name in MOST_USED if len(_usage(by_name[name])) <= 40) + 2
    lines = [_INTRODUCTION, "", "Flags that most runs need:"]
    for name in MOST_USED:
        lines += _two_columns(_usage(by_name[name]), _first_sentence(by_name[name].help), left, width)
    lines += ["", "Groups of flags:"]
    groups = group_names()
    left = max(map(len, groups)) + 2
    for group, title in groups.items():
        lines += _two_columns(group, f"{title} ({len(list(_flags(group)))} flags)", left, width)
    lines += ["", "--help GROUP shows a group, --help FLAG a flag, --help all everything; docs/flags.md is the same."]
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def _two_columns(name: str, text: str, left: int, width: int) -> list[str]:
    hanging = " " * (left + 2)
    if len(name) > left - 2:
        return [f"  {name}", fill(text, width, initial_indent=hanging, subsequent_indent=hanging)]
    return fill(f"  {name:{left}}{text}", width, subsequent_indent=hanging, break_on_hyphens=False).split("\n")


def _group(group: str, width: int) -> str:
    kind = get_type_hints(RunConfig)[group.replace("-", "_")]
    title = f"{group_names()[group]}: {' '.join((kind.__doc__ or '').split())}"
    return "\n".join([fill(title, width), *(_entry(flag, width) for flag in _flags(group))])


def _entry(flag: Flag, width: int) -> str:
    described = flag.help if not flag.default else f"{flag.help} (default: {flag.default})"
    if flag.values == "on, off":
        described = f"{flag.help} (default: {flag.default}; --no-{flag.name[2:]} turns it off)"
        if flag.default == "off":
            described = f"{flag.help} (default: off)"
    text = fill(described, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
    return f"  {_usage(flag)}\n{text}"


def _usage(flag: Flag) -> str:
    """A flag with its values, as it is typed."""
    names = {"on, off": "", "integer": "INTEGER", "number": "NUMBER", "text": "TEXT", "True, False": "True|False"}
    if flag.values in names:
        return f"{flag.name} {names[flag.values]}".rstrip()
    values = flag.values
    is_list = values.startswith("one or more: ")
    values = values.removeprefix("one or more: ")
    if values in names or set(values.split()) <= {"integer", "number", "text"}:
        values = " ".join(word.upper() for word in values.split())
    else:
        values = values.replace(", ", "|")
    return f"{flag.name} {values}{' ...' if is_list else ''}"
