"""``pretrain_llama.py --help``: the overview, a group, a flag, or everything."""

from collections.abc import Mapping
from dataclasses import fields
from textwrap import fill
from typing import get_type_hints

from megatron.command_line.flag import docstrings, flags_of
from megatron.command_line.help import first_sentence, flag_help, terminal_width, two_columns
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_INTRODUCTION = """\
Pretrain a Llama model.

  One process:   python pretrain_llama.py FLAGS
  Several:       torchrun --nproc-per-node N pretrain_llama.py FLAGS
  A first run:   bash examples/quickstart.sh"""

# Flags of the overview.
MOST_USED = """
    --model --num-layers --hidden-size --num-attention-heads --data-path --mock-data --tokenizer-type --tokenizer-model
    --seq-length --micro-batch-size --global-batch-size --train-iters --lr --min-lr --lr-decay-style --lr-warmup-iters
    --weight-decay --bf16 --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
    --use-distributed-optimizer --recompute-activations --save --save-interval --load --eval-interval --log-interval
    --dry-run --config
"""


def help_text(topic: str, suggestion: str) -> str:
    """The help about ``topic``: a group, a flag, ``all``, or empty for the overview.

    Raises :class:`ConfigError` for another word, with the ``suggestion``.
    """
    width = terminal_width()
    name = topic.removeprefix("--").replace("_", "-")
    titles = docstrings(RunConfig)
    groups = {field.name.replace("_", "-"): titles[field.name].rstrip(".") for field in fields(RunConfig)}
    if name == "":
        return _overview(groups, width)
    if name == "all":
        return "\n\n".join([_INTRODUCTION, *(_group(group, title, width) for group, title in groups.items())])
    if name in groups:
        return _group(name, groups[name], width)
    for group, title in groups.items():
        for flag in flags_of(_group_type(group)):
            if flag.name in (f"--{name}", f"--{name.removeprefix('no-')}"):
                return f"{flag_help(flag, width)}\n\n{title}: --help {group} shows the flags beside it."
    raise ConfigError(
        f"--help {topic} is no group and no flag: {suggestion.replace('see --help.', 'use --help alone.')}"
    )


def _group_type(group: str) -> type:
    return get_type_hints(RunConfig)[group.replace("-", "_")]


def _overview(titles: Mapping[str, str], width: int) -> str:
    by_name = {flag.name: flag for flag in flags_of(RunConfig)}
    most_used = [by_name[name] for name in MOST_USED.split()]
    left = max(len(flag.usage) for flag in most_used if len(flag.usage) <= 40) + 2
    lines = [_INTRODUCTION, "", "Flags that most runs need:"]
    for flag in most_used:
        lines += two_columns(flag.usage, first_sentence(flag.help), left, width)
    lines += ["", "Groups of flags:"]
    left = max(map(len, titles)) + 2
    for group, title in titles.items():
        lines += two_columns(group, f"{title} ({len(flags_of(_group_type(group)))} flags)", left, width)
    lines += ["", "--help GROUP shows a group, --help FLAG a flag, --help all everything; docs/flags.md is the same."]
    return "\n".join(lines)


def _group(group: str, title: str, width: int) -> str:
    kind = _group_type(group)
    title = f"{title}: {' '.join((kind.__doc__ or '').split())}"
    return "\n".join([fill(title, width), *(flag_help(flag, width) for flag in flags_of(kind))])
