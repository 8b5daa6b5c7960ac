"""The command line: flags to a :class:`RunConfig`, and everything that is wrong with them at once.

The parser is not tyro, which the tools use, because tyro stops at the first mistake.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from megatron.architectures.registry import PRESETS
from megatron.config.checks import check_run, flags_in, without_sentences_on
from megatron.config.compatibility import DESCRIPTIVE
from megatron.config.dry_run import FlagFileConfig
from megatron.config.help import docstrings, help_text
from megatron.config.megatron_lm import NO_EFFECT, NOT_SUPPORTED, NOT_SUPPORTED_VALUES, remedy_of_family
from megatron.config.model import ModelConfig, preset
from megatron.config.run import RunConfig
from megatron.config.run_yaml import read_run_yaml
from megatron.config.words import Given, fields_by_flag, is_switch, split_words, suggestion, surplus, value_of
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
    given = split_words(arguments)
    values: dict[str, Any] = {}
    mistakes: list[ConfigError] = []
    no_effect: list[str] = []
    for one in given:
        try:
            if one.flag in NO_EFFECT:
                NO_EFFECT[one.flag].check(one)
                no_effect.append(one.as_typed)
                continue
            name, value = _parsed(one)
        except ConfigError as error:
            mistakes.append(error)
            continue
        values[name] = value
        if _has_no_effect(name):
            no_effect.append(one.as_typed)
    default = replace(defaults or RunConfig(), model=preset_of(arguments) or model_defaults or ModelConfig())
    groups = {group.name: getattr(default, group.name) for group in fields(default)}
    changed = {
        name: replace(group, **{flag.name: values[flag.name] for flag in fields(group) if flag.name in values})
        for name, group in groups.items()
    }
    config = RunConfig(**changed)
    inferred = []
    if config.has_two_tokenizer_files_alone:
        config = replace(config, tokenizer=replace(config.tokenizer, tokenizer_type="GPT2BPETokenizer"))
        inferred.append("--tokenizer-type GPT2BPETokenizer: --vocab-file and --merge-file are its files")
    no_effect += [*_without_experts(config), *config.tokenizer.without_effect]
    return ParsedLine(config, tuple(mistakes), tuple(dict.fromkeys(no_effect)), tuple(inferred))


def _without_experts(config: RunConfig) -> list[str]:
    """Flags that have no effect on a model without experts, where Megatron-LM accepts them, too."""
    if config.model.num_experts or config.checkpoint.use_checkpoint_args:
        return []
    return changed_flags(config.parallel, "expert_tensor_parallel_size")


def _parsed(given: Given) -> tuple[str, Any]:
    """The field and the value of a flag; raises :class:`ConfigError` for an unknown flag and for an invalid value."""
    if not given.flag:
        raise ConfigError(*map(surplus, given.values))
    if " " in given.flag:
        raise ConfigError(f"{given.flag!r} is one word with a blank: write two words, or take the quotes away.")
    known = fields_by_flag(RunConfig)
    positive = f"--{given.flag.removeprefix('--no-')}"
    field = known.get(given.flag)
    if field is None and given.flag.startswith("--no-") and positive in known and is_switch(known[positive]):
        _refuse_values(given)
        return known[positive].name, False
    if field is None:
        raise ConfigError(_unknown_flag_message(given.flag))
    if is_switch(field):
        _refuse_values(given)
        return field.name, True
    for word in given.values:
        reason = NOT_SUPPORTED_VALUES.get(given.flag, {}).get(word)
        if reason is not None:
            raise ConfigError(f"{given.flag} {word} of Megatron-LM is not supported: {reason}")
    return field.name, value_of(given.flag, _types(RunConfig)[field.name], given.values)


def _refuse_values(given: Given) -> None:
    """Raise :class:`ConfigError` for a value of a switch; ``--bf16 true`` and the like have a remedy of their own."""
    if not given.values:
        return
    word = given.values[0]
    switched = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(word.lower())
    if switched is None or len(given.values) > 1:
        raise ConfigError(surplus(word))
    is_negative = given.flag.startswith("--no-") and given.flag not in fields_by_flag()
    flag = f"--{given.flag.removeprefix('--no-')}" if is_negative else given.flag
    wanted = flag if switched != is_negative else f"--no-{flag[2:]}"
    raise ConfigError(f"{given.flag} {word} has a value, which a switch does not take: write {wanted}.")


def _unknown_flag_message(flag: str) -> str:
    remedy = NOT_SUPPORTED.get(flag) or remedy_of_family(flag)
    if remedy is not None:
        return f"{flag} of Megatron-LM is not supported: {remedy}"
    return f"{flag} is not a flag of pretrain_llama.py: {suggestion(flag)}"


@cache
def _types(run_config: type[RunConfig]) -> dict[str, Any]:
    """The type of every field."""
    kinds: dict[str, Any] = {}
    for group in get_type_hints(run_config).values():
        kinds |= get_type_hints(group)
    return kinds


@cache
def _compatible(run_config: type[RunConfig]) -> frozenset[str]:
    """The fields that are accepted for compatibility alone."""
    texts: dict[str, str] = {}
    for group in get_type_hints(run_config).values():
        texts |= docstrings(group)
    return frozenset(name for name, text in texts.items() if text.startswith("Accepted for Megatron-LM"))


def _has_no_effect(name: str) -> bool:
    return name in _compatible(RunConfig) and name not in DESCRIPTIVE


def _found_by_checks(line: ParsedLine, world_size: int) -> list[ConfigError]:
    """What the checks find, without sentences about a flag that has a mistake."""
    named = {flag for error in line.mistakes for sentence in error.sentences for flag in flags_in(sentence)}
    if line.config.checkpoint.load_hf is not None:
        return []  # The directory has sizes that the checks need.
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
