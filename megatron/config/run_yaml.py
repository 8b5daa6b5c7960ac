"""The flags of a run as a YAML file: written into the run directory, and read by ``--config``.

A key is a flag without its two hyphens, with hyphens or underscores. A value is the text of the flag's value, so that
``3e-4`` is a number where the flag needs one, whatever YAML takes it for. A flag without a value is ``true`` or
``false``; a flag with several values has a list.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.architectures.catalog import PRESETS
from megatron.config.model import preset
from megatron.config.run import RunConfig
from megatron.config.words import all_spellings, fields_by_flag, is_switch, suggestion
from megatron.errors import ConfigError
from megatron.flags import flag_of

if TYPE_CHECKING:
    import yaml

HEADER = """\
# The flags of this run that differ from their defaults (docs/flags.md).
# To run it again: python pretrain_llama.py --config {name}, under torchrun with the same number of processes.
# Flags beside --config override those of this file.
"""

_TAG = "tag:yaml.org,2002:"


def changed_values(config: RunConfig) -> dict[str, Any]:
    """The values that differ from their defaults, by flag without hyphens; the defaults of the model flags are those
    of the preset."""
    default = RunConfig(model=preset(config.model.model)) if config.model.model in PRESETS else RunConfig()
    changed: dict[str, Any] = {} if config.model.model is None else {"model": config.model.model}
    for group in fields(config):
        ours, others = getattr(config, group.name), getattr(default, group.name)
        for field in fields(ours):
            value = getattr(ours, field.name)
            if value != getattr(others, field.name):
                changed[flag_of(field.name)[2:]] = list(value) if isinstance(value, tuple) else value
    return changed


def run_yaml(config: RunConfig, name: str) -> str:
    """The text of the file ``name``: the flags of ``config`` that differ from their defaults, under a comment that says
    how to run it again."""
    lines = [_line(key, value) for key, value in changed_values(config).items()]
    return HEADER.format(name=name) + "".join(lines)


def _line(key: str, value: Any) -> str:
    import yaml

    texts = value if isinstance(value, list) else [value]
    # Control characters are escaped, because YAML takes some of them for the end of a line.
    options: dict[str, Any] = {"allow_unicode": "".join(map(str, texts)).isprintable(), "width": 1000}
    if isinstance(value, list):
        return f"{key}: {yaml.safe_dump(value, default_flow_style=True, **options)}"
    return yaml.safe_dump({key: value}, default_flow_style=False, **options)


def read_run_yaml(path: Path) -> list[str]:
    """The words of the command line that set the flags of the file ``path``.

    Raises :class:`ConfigError` for a file that is no mapping of flags to values, with everything that is wrong in it.
    """
    import yaml

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read ({error.strerror}): name a YAML file of flags.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not YAML ({reason}): correct it.") from None
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"--config {path} must map flags to values: write a line such as seq-length: 8192 per flag.")
    # Nodes, not values: YAML would read 1:30 as a number and no as false.
    words: list[str] = []
    seen: set[str] = set()
    for key, value in node.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        flag = f"--{key.value}".replace("_", "-") if isinstance(key, yaml.ScalarNode) else ""
        if flag in seen:
            raise ConfigError(f"{flag} stands twice in {place}: remove one of them.")
        seen.add(flag)
        words += _words(flag, value, place)
    return words


def _words(flag: str, value: "yaml.Node", place: str) -> list[str]:
    """The words for one key of the file."""
    if flag == "--config":
        raise ConfigError(f"{flag} in {place} is not allowed in a file of flags: copy the flags of {value.value} here.")
    if flag not in all_spellings():
        raise ConfigError(f"{flag or 'a list'} in {place} is not a flag of pretrain_llama.py: {suggestion(flag)}")
    field = fields_by_flag().get(flag)
    is_boolean = value.tag == _TAG + "bool"
    if field is None or is_switch(field):
        if not is_boolean:
            raise ConfigError(f"{flag} in {place} has no value on the command line: write true or false.")
        is_on = value.value.lower() in ("true", "yes", "on")
        positive = flag if field is not None else f"--{flag.removeprefix('--no-')}"
        return [positive if is_on is (field is not None) else f"--no-{positive[2:]}"]
    if is_boolean and value.value.lower() not in ("true", "false"):
        raise ConfigError(f"{flag} in {place} is {value.value}, which YAML reads as true or false: write it in quotes.")
    texts = list(_texts(flag, value, place))
    # A value that begins with a hyphen must not be taken for a flag.
    return [f"{flag}={texts[0]}"] if len(texts) == 1 and texts[0].startswith("-") else [flag, *texts]


def _texts(flag: str, value: "yaml.Node", place: str) -> Iterator[str]:
    """The words of a scalar, or of a list of scalars."""
    import yaml

    for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        if not isinstance(item, yaml.ScalarNode):
            raise ConfigError(f"{flag} in {place} must be a value, or a list of values: write it as [a, b].")
        if item.tag == _TAG + "null":
            yield "None"
        elif item.tag == _TAG + "float" and item.value.lower().lstrip("+-") in (".inf", ".nan"):
            yield item.value.replace(".", "")
        elif item.tag == _TAG + "bool":
            yield item.value.capitalize()
        else:
            yield item.value
