"""The command line: flags to a :class:`RunConfig`."""

import difflib
import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from typing import Any

import tyro

from megatron.architectures.registry import PRESETS
from megatron.config.megatron_flags import NOT_SUPPORTED, NOT_SUPPORTED_VALUES
from megatron.config.model import ModelConfig, preset
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import flag_of

DESCRIPTION = """Pretrain a Llama model.

One process: python pretrain_llama.py FLAGS

Several: torchrun --nproc-per-node N pretrain_llama.py FLAGS

A first run: bash examples/quickstart.sh"""


def parse_command_line(
    arguments: Sequence[str], model_defaults: ModelConfig | None = None, *, print_messages: bool = True
) -> RunConfig:
    """Parse ``arguments``. A preset named by ``--model``, else ``model_defaults``, sets the defaults of the model
    flags.

    On ``--help``, prints the help if ``print_messages`` (true on one rank) and raises :class:`SystemExit`. Raises
    :class:`ConfigError` for an invalid value, and for an unknown flag with the nearest known one.
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
        raise ConfigError(_unsupported_value(arguments) or _sentence_in(messages.getvalue())) from None
    if unknown:
        raise ConfigError(_unknown_flag_message(unknown[0]))
    return config


def _sentence_in(box: str) -> str:
    """The first paragraph of the box that tyro prints."""
    words: list[str] = []
    for line in box.splitlines():
        text = line.strip("│ ")
        if words and text.startswith("─"):
            break
        if line.startswith("│"):
            words.append(text)
    return f"{' '.join(words).rstrip('.') or box.strip()}; see --help."


def _unsupported_value(arguments: Sequence[str]) -> str | None:
    """The sentence about the first value in ``arguments`` that only Megatron-LM has; None for none."""
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, _, argument = argument.partition("=")
            flag = flag.replace("_", "-")
        reason = NOT_SUPPORTED_VALUES.get(flag, {}).get(argument)
        if reason is not None:
            return f"{flag} {argument} of Megatron-LM is not supported: {reason}"
    return None


def preset_of(arguments: Sequence[str]) -> ModelConfig | None:
    """The preset named by ``--model`` in ``arguments``; None for none, and for an unknown one, which tyro refuses."""
    name = None
    for flag, value in zip(arguments, [*arguments[1:], ""]):
        if flag == "--model":
            name = value
        elif flag.startswith("--model="):
            name = flag.partition("=")[2]
    return preset(name) if name in PRESETS else None


def flag_names() -> list[str]:
    """Every flag of the command line, in order, without its ``--no-`` form."""
    return [name for name, _ in _names_and_defaults()]


def _names_and_defaults() -> list[tuple[str, Any]]:
    return [
        (flag_of(flag.name), flag.default)
        for group in fields(RunConfig)
        for flag in fields(group.default_factory)  # type: ignore[arg-type]
    ]


def _unknown_flag_message(argument: str) -> str:
    flag = argument.partition("=")[0].replace("_", "-")
    if not flag.startswith("-"):
        return (
            f"{argument!r} is not a value of any flag: remove it, or check the number of values of the flag before it."
        )
    if flag in NOT_SUPPORTED:
        return f"{flag} of Megatron-LM is not supported: {NOT_SUPPORTED[flag]}"
    negative = ["--no-" + name[2:] for name, default in _names_and_defaults() if isinstance(default, bool)]
    nearest = difflib.get_close_matches(flag, flag_names() + negative, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "see --help."
    return f"{flag} is not a flag of pretrain_llama.py: {hint}"
