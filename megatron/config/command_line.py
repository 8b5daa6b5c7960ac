"""The command line: flags to a :class:`RunConfig`."""

import difflib
import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from typing import Any

import tyro

from megatron.config.errors import ConfigError
from megatron.config.megatron_flags import NOT_SUPPORTED
from megatron.config.model import PRESETS, ModelConfig, preset
from megatron.config.run import RunConfig

DESCRIPTION = """Pretrain a Llama model.

One process: python pretrain_llama.py FLAGS

Several: torchrun --nproc-per-node N pretrain_llama.py FLAGS

A first run: bash examples/quickstart.sh"""


def parse_command_line(
    arguments: Sequence[str], model_defaults: ModelConfig | None = None, *, print_messages: bool = True
) -> RunConfig:
    """The flags in ``arguments``; a preset named by ``--model`` sets the defaults of its group.

    ``model_defaults`` are those of this group where no preset is named.

    Prints help (where ``print_messages`` is true: only one rank should speak) and raises :class:`SystemExit` on
    ``--help``. Raises :class:`ConfigError` on a value that a flag cannot take, and on a flag that does not exist,
    naming the nearest one.
    """
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            config, unknown = tyro.cli(
                RunConfig,
                args=list(arguments),
                default=RunConfig(model=preset_of(arguments) or model_defaults or ModelConfig()),
                description=DESCRIPTION,
                prog="pretrain_llama.py",
                config=(tyro.conf.OmitArgPrefixes,),
                return_unknown_args=True,
                console_outputs=print_messages,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise ConfigError(_sentence_in(messages.getvalue())) from None
    if unknown:
        raise ConfigError(_unknown_flag_message(unknown[0]))
    return config


def _sentence_in(box: str) -> str:
    """What tyro says in the first paragraph of the box that it draws."""
    words: list[str] = []
    for line in box.splitlines():
        text = line.strip("│ ")
        if words and text.startswith("─"):
            break
        if line.startswith("│"):
            words.append(text)
    return f"{' '.join(words).rstrip('.') or box.strip()}; see --help."


def preset_of(arguments: Sequence[str]) -> ModelConfig | None:
    """The preset that ``--model`` names in ``arguments``."""
    name = None
    for flag, value in zip(arguments, [*arguments[1:], ""]):
        if flag == "--model":
            name = value
        elif flag.startswith("--model="):
            name = flag.partition("=")[2]
    # An unknown name is left to the parser, which lists the known ones.
    return preset(name) if name in PRESETS else None


def flag_names() -> list[str]:
    """Every flag of the command line, in order, without its ``--no-`` form."""
    return [name for name, _ in _names_and_defaults()]


def _names_and_defaults() -> list[tuple[str, Any]]:
    return [
        ("--" + flag.name.replace("_", "-"), flag.default)
        for group in fields(RunConfig)
        for flag in fields(group.default_factory)  # type: ignore[arg-type]
    ]


def _unknown_flag_message(argument: str) -> str:
    flag = argument.partition("=")[0].replace("_", "-")
    if not flag.startswith("-"):
        return f"{argument!r} belongs to no flag: remove it, or check the flag before it, which takes fewer values."
    if flag in NOT_SUPPORTED:
        return f"{flag} is a flag of Megatron-LM that is not supported here: {NOT_SUPPORTED[flag]}"
    negative = ["--no-" + name[2:] for name, default in _names_and_defaults() if isinstance(default, bool)]
    known = flag_names() + negative
    nearest = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "see --help."
    return f"{flag} is not a flag of pretrain_llama.py: {hint}"
