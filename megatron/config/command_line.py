"""The command line: flags to a :class:`RunConfig`, and everything that is wrong with them at once.

The parser is not tyro, which the tools use, because tyro stops at the first mistake.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from megatron.architectures.catalog import PRESETS
from megatron.config.checks import check_run, flags_in, without_sentences_on
from megatron.config.compatibility import DESCRIPTIVE
from megatron.config.dry_run import FlagFileConfig
from megatron.config.help import docstrings, help_text
from megatron.config.megatron_lm import NO_EFFECT, NOT_SUPPORTED, NOT_SUPPORTED_VALUES, remedy_of_family
from megatron.config.model import ModelConfig, preset
from megatron.config.run import RunConfig
from megatron.config.words import (
    Given,
    fields_by_flag,
    is_switch,
    one_of,
    read_run_yaml,
    split_words,
    suggestion,
    surplus,
    value_of,
)
from megatron.errors import ConfigError
from megatron.flags import changed_flags


@dataclass(frozen=True)
class ParsedLine:
    """A command line with its mistakes."""

    config: RunConfig
    """The run, in which flags with a mistake have their defaults."""
    mistakes: tuple[ConfigError, ...]
    """What is wrong with the words."""
    no_effect: tuple[str, ...]
    """Flags that change nothing, as they were typed."""
    inferred: tuple[str, ...] = ()
    """Flags that follow from others, with the reason."""


def parse_command_line(
    arguments: Sequence[str],
    model_defaults: ModelConfig | None = None,
    *,
    print_messages: bool = True,
    world_size: int | None = None,
    defaults: RunConfig | None = None,
) -> RunConfig:
    """Parse ``arguments``. A preset named by ``--model``, else ``model_defaults``, sets the defaults of the model
    flags; ``defaults`` has the defaults of all other flags.

    On ``--help``, prints the help if ``print_messages`` (true on one rank) and raises :class:`SystemExit`. Raises
    :class:`ConfigError` for unknown flags, with the nearest known ones, and for invalid values; with ``world_size``
    the error also says what the checks find in the flags that can be parsed.
    """
    # Flags of the file come first, so that the command line overrides them.
    arguments = with_flags_of_file(arguments)
    asked = help_topic(arguments)
    if asked is not None:
        text = help_text(asked)
        if print_messages:
            print(text)
        raise SystemExit(0)
    line = parse_line(arguments, model_defaults, defaults)
    if line.mistakes:
        raise ConfigError.of([*line.mistakes, *([] if world_size is None else _found_by_checks(line, world_size))])
    return line.config


def parse_line(
    arguments: Sequence[str], model_defaults: ModelConfig | None = None, defaults: RunConfig | None = None
) -> ParsedLine:
    """Parse ``arguments``, and collect the mistakes."""
    values: dict[str, Any] = {}
    mistakes: list[ConfigError] = []
    no_effect: list[str] = []
    idle = _fields_without_effect(RunConfig)
    for one in split_words(arguments):
        try:
            if one.flag in NO_EFFECT:
                _check_without_effect(one)
                no_effect.append(one.as_typed)
                continue
            name, value = _parsed(one)
        except ConfigError as error:
            mistakes.append(error)
            continue
        values[name] = value
        if name in idle:
            no_effect.append(one.as_typed)
    # The preset is the default of the model's flags, wherever --model stands.
    default = replace(defaults or RunConfig(), model=preset_of(arguments) or model_defaults or ModelConfig())
    changed = {}
    for group in fields(default):
        flags = getattr(default, group.name)
        given = {flag.name: values[flag.name] for flag in fields(flags) if flag.name in values}
        changed[group.name] = replace(flags, **given)
    config = RunConfig(**changed)
    inferred = []
    if config.has_two_tokenizer_files_alone:
        config = replace(config, tokenizer=replace(config.tokenizer, tokenizer_type="GPT2BPETokenizer"))
        inferred.append("--tokenizer-type GPT2BPETokenizer: --vocab-file and --merge-file are its files")
    if not config.model.num_experts and not config.checkpoint.use_checkpoint_args:
        # Without experts it has no effect, and Megatron-LM accepts it, too.
        no_effect += changed_flags(config.parallel, "expert_tensor_parallel_size")
    no_effect += config.tokenizer.without_effect
    return ParsedLine(config, tuple(mistakes), tuple(dict.fromkeys(no_effect)), tuple(inferred))


def _parsed(given: Given) -> tuple[str, Any]:
    """The field and the value of a flag; raises :class:`ConfigError` for an unknown flag and for an invalid value."""
    if not given.flag:  # words before the first flag
        raise ConfigError(*map(surplus, given.values))
    if " " in given.flag:
        raise ConfigError(f"{given.flag!r} is one word with a blank: write two words, or take the quotes away.")
    known = fields_by_flag(RunConfig)
    field = known.get(given.flag)
    if field is None and given.flag.startswith("--no-"):
        positive = known.get(f"--{given.flag.removeprefix('--no-')}")
        if positive is not None and is_switch(positive):
            _refuse_values(given)
            return positive.name, False
    if field is None:
        remedy = NOT_SUPPORTED.get(given.flag) or remedy_of_family(given.flag)
        if remedy is not None:
            raise ConfigError(f"{given.flag} of Megatron-LM is not supported: {remedy}")
        raise ConfigError(f"{given.flag} is not a flag of pretrain_llama.py: {suggestion(given.flag)}")
    if is_switch(field):
        _refuse_values(given)
        return field.name, True
    # A value of Megatron-LM has a better message than an unknown word.
    for word in given.values:
        reason = NOT_SUPPORTED_VALUES.get(given.flag, {}).get(word)
        if reason is not None:
            raise ConfigError(f"{given.flag} {word} of Megatron-LM is not supported: {reason}")
    return field.name, value_of(given.flag, _types(RunConfig)[field.name], given.values)


def _check_without_effect(given: Given) -> None:
    """Raise :class:`ConfigError` unless a flag without effect is ``given`` with values that it can have."""
    known = NO_EFFECT[given.flag]
    most = 0 if known.values is None else 1
    if known.values != "*" and len(given.values) > most:
        raise ConfigError(surplus(given.values[most]))
    if known.values is not None and not given.values:
        raise ConfigError(f"{given.flag} has no value: add one after it, or remove {given.flag}.")
    choices = (known.values or "").split("|")
    if known.values not in (None, "", "*") and given.values[0] not in choices:
        raise ConfigError(
            f"{given.as_typed} of Megatron-LM is not supported, because {known.reason}: use {one_of(choices)}, or "
            "remove it."
        )


def _refuse_values(given: Given) -> None:
    """Raise :class:`ConfigError` for a value of a switch; ``--bf16 true`` and the like have a remedy of their own."""
    if not given.values:
        return
    word = given.values[0]
    switched = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(word.lower())
    if switched is None or len(given.values) > 1:
        raise ConfigError(surplus(word))
    # --no-x false means --x, unless --no-x is a flag of its own.
    is_negative = given.flag.startswith("--no-") and given.flag not in fields_by_flag()
    flag = f"--{given.flag.removeprefix('--no-')}" if is_negative else given.flag
    wanted = flag if switched != is_negative else f"--no-{flag[2:]}"
    raise ConfigError(f"{given.flag} {word} has a value, which a switch does not take: write {wanted}.")


@cache
def _types(run_config: type[RunConfig]) -> dict[str, Any]:
    """The type of every field."""
    kinds: dict[str, Any] = {}
    for group in get_type_hints(run_config).values():
        kinds |= get_type_hints(group)
    return kinds


@cache
def _fields_without_effect(run_config: type[RunConfig]) -> frozenset[str]:
    """The fields that are accepted for compatibility alone, and do not describe the model."""
    texts: dict[str, str] = {}
    for group in get_type_hints(run_config).values():
        texts |= docstrings(group)
    accepted = {name for name, text in texts.items() if text.startswith("Accepted for Megatron-LM")}
    return frozenset(accepted.difference(DESCRIPTIVE))


def _found_by_checks(line: ParsedLine, world_size: int) -> list[ConfigError]:
    """What the checks find, without sentences about a flag that has a mistake."""
    if line.config.checkpoint.load_hf is not None:
        return []  # The directory has sizes that the checks need.
    named = {flag for error in line.mistakes for sentence in error.sentences for flag in flags_in(sentence)}
    try:
        check_run(line.config, line.config.dry_run.num_gpus or world_size)
    except ConfigError as error:
        return [kept for one in error.causes or [error] for kept in without_sentences_on(one, named)]
    except Exception:
        return []  # A check may need a flag that has a mistake.
    return []


def with_flags_of_file(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the flags of the file of ``--config`` before the others, which override them."""
    rest: list[str] = []
    path = None
    words = iter(arguments)
    for word in words:
        flag, has_value, value = word.partition("=")
        if flag != "--config":
            rest.append(word)
            continue
        if path is not None:
            raise ConfigError("--config is given twice: write all flags into one file.")
        path = value if has_value else next(words, "")
        if not path or path.startswith("--"):
            raise ConfigError("--config needs a YAML file: add its path.")
    if path is None:
        return rest
    FlagFileConfig(config=path).check()
    return [*read_run_yaml(Path(path)), *rest]


def help_topic(arguments: Sequence[str]) -> str | None:
    """The word after ``--help``, empty for none; None without ``--help``."""
    for given in split_words(arguments):
        if given.flag in ("--help", "-h"):
            return given.values[0] if given.values else ""
    return None


def preset_of(arguments: Sequence[str]) -> ModelConfig | None:
    """The preset named by ``--model`` in ``arguments``; None for none, and for an unknown one, which is refused."""
    names = [given.values[0] for given in split_words(arguments) if given.flag == "--model" and given.values]
    return preset(names[-1]) if names and names[-1] in PRESETS else None
