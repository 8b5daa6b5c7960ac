"""The help of every flag, which is its docstring, and the text of ``--help``."""

import ast
import inspect
import re
import shutil
from collections.abc import Iterable, Iterator
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


def help_texts_of(config: type) -> dict[str, str]:
    """The help of every flag of a group: its docstring, or computed text in ``tyro.conf.arg``."""
    hints = get_type_hints(config, include_extras=True)
    computed = {name: part.help for name, hint in hints.items() for part in getattr(hint, "__metadata__", ())}
    return docstrings(config) | computed


def flags_of(config: type) -> Iterator[Flag]:
    """The flags of a group, in order."""
    kinds, help_texts = get_type_hints(config), help_texts_of(config)
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
