"""The help of every flag, which is its docstring, and the text of ``--help``."""

import ast
import inspect
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from textwrap import dedent, fill
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron.config.run import RunConfig
from megatron.config.words import suggestion
from megatron.errors import ConfigError
from megatron.flags import flag_of


class Flag(NamedTuple):
    """One flag of ``pretrain_llama.py``."""

    name: str
    values: str
    default: str
    """Empty for None."""
    help: str

    @property
    def usage(self) -> str:
        """The flag with its values, as it is typed."""
        if self.values == "on, off":
            return self.name
        values = self.values.removeprefix("one or more: ")
        is_list = values != self.values
        if set(values.split()) <= {"integer", "number", "text"}:
            values = values.upper()
        return f"{self.name} {values.replace(', ', '|')}{' ...' if is_list else ''}"

    @property
    def default_in_words(self) -> str:
        """The default; for None the default that the help describes."""
        described = re.search(r"\(default[^:()]*: ([^()]*)\)|(\w+) \(default\)", self.help)
        return self.default or (described[1] or described[2] if described else "none")

    @property
    def has_no_effect(self) -> bool:
        """Whether it is accepted only for compatibility."""
        return self.help.startswith("Accepted for Megatron-LM compatibility")

    @property
    def is_refused(self) -> bool:
        """Whether it exists only to be refused with a reason."""
        return self.help.startswith("Refused")


def docstrings(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of its base classes, in one line."""
    found: dict[str, str] = {}
    for kind in config.__mro__:
        if "__dataclass_fields__" not in vars(kind):
            continue
        definition = ast.parse(dedent(inspect.getsource(kind))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def flags_of(config: type) -> Iterator[Flag]:
    kinds, hints = get_type_hints(config), get_type_hints(config, include_extras=True)
    # The help is the docstring, or a text that is computed from a table and stands in tyro.conf.arg.
    computed = {name: part.help for name, hint in hints.items() for part in getattr(hint, "__metadata__", ())}
    help_texts = docstrings(config) | computed
    for field in fields(config):
        values, default = describe_values(kinds[field.name]), describe_default(field.default)
        yield Flag(flag_of(field.name), values, default, help_texts[field.name])


def describe_values(kind: Any) -> str:
    """The values of a flag of this type in words."""
    names = {bool: "on, off", int: "integer", float: "number", str: "text"}
    if kind in names:
        return names[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(map(str, arguments))
    if get_origin(kind) in (UnionType, Union):
        # tyro reads an optional boolean from a word.
        parts = [part for part in arguments if part is not NoneType]
        return "True, False" if bool in parts else " or ".join(map(describe_values, parts))
    assert get_origin(kind) is tuple, kind
    if arguments[-1] is Ellipsis:
        return f"one or more: {describe_values(arguments[0])}"
    return " ".join(map(describe_values, arguments))


def describe_default(value: Any) -> str:
    """A default as it is typed on the command line; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    # 500000.0 and 4294967296.0 are easier to read without their fraction.
    return str(int(value)) if isinstance(value, float) and value == int(value) and value >= 10 else str(value)


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


def help_text(topic: str) -> str:
    """The help about ``topic``: a group, a flag, ``all``, or empty for the overview.

    Raises :class:`ConfigError` for another word.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
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
                return f"{_entry(flag, width)}\n\n{title}: --help {group} shows the flags beside it."
    raise ConfigError(
        f"--help {topic} is no group and no flag: {suggestion('--' + name).replace('see --help.', 'use --help alone.')}"
    )


def _group_type(group: str) -> type:
    return get_type_hints(RunConfig)[group.replace("-", "_")]


def _overview(titles: Mapping[str, str], width: int) -> str:
    members = {group: list(flags_of(_group_type(group))) for group in titles}
    by_name = {flag.name: flag for flags in members.values() for flag in flags}
    most_used = [by_name[name] for name in MOST_USED.split()]
    left = max(len(flag.usage) for flag in most_used if len(flag.usage) <= 40) + 2
    lines = [_INTRODUCTION, "", "Flags that most runs need:"]
    for flag in most_used:
        first_sentence = re.split(r"(?<=\.) ", flag.help)[0]
        lines += _two_columns(flag.usage, first_sentence, left, width)
    lines += ["", "Groups of flags:"]
    left = max(map(len, titles)) + 2
    for group, title in titles.items():
        lines += _two_columns(group, f"{title} ({len(members[group])} flags)", left, width)
    lines += ["", "--help GROUP shows a group, --help FLAG a flag, --help all everything; docs/flags.md is the same."]
    return "\n".join(lines)


def _two_columns(name: str, text: str, left: int, width: int) -> list[str]:
    hanging = " " * (left + 2)
    if len(name) > left - 2:
        return [f"  {name}", fill(text, width, initial_indent=hanging, subsequent_indent=hanging)]
    return fill(f"  {name:{left}}{text}", width, subsequent_indent=hanging, break_on_hyphens=False).split("\n")


def _group(group: str, title: str, width: int) -> str:
    kind = _group_type(group)
    title = f"{title}: {' '.join((kind.__doc__ or '').split())}"
    return "\n".join([fill(title, width), *(_entry(flag, width) for flag in flags_of(kind))])


def _entry(flag: Flag, width: int) -> str:
    described = flag.help if not flag.default else f"{flag.help} (default: {flag.default})"
    if flag.values == "on, off" and flag.default == "on":
        described = f"{flag.help} (default: on; --no-{flag.name[2:]} turns it off)"
    indent = " " * 6
    text = fill(described, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {flag.usage}\n{text}"
