"""A run's flags as YAML: written into the run directory, and read by ``--config``.

A key is a flag without its two hyphens, with hyphens or underscores, and a value is the text of the flag's value, so
that ``3e-4`` is a number where the flag needs one, whatever YAML takes it for. A flag without a value is ``true`` or
``false``; a flag with several values has a list.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.architectures.catalog import PRESETS
from megatron.command_line.parser import changed_values
from megatron.command_line.words import Given
from megatron.config.model import preset
from megatron.config.run import RunConfig
from megatron.config.run_parser import RUN_PARSER
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


def changed_flags(config: RunConfig) -> dict[str, Any]:
    """The values that differ from their defaults, by flag without hyphens; the defaults of the model flags are those
    of the preset."""
    name = config.model.model
    changed = changed_values(config, RunConfig(model=preset(name)) if name in PRESETS else RunConfig())
    changed = changed if name is None else {"model": name, **changed}
    return {flag_of(one)[2:]: list(value) if isinstance(value, tuple) else value for one, value in changed.items()}


def run_yaml(config: RunConfig, name: str) -> str:
    """The text of the file ``name``: the flags of ``config`` that differ from their defaults, under a comment that says
    how to run it again."""
    lines = [_yaml_line(key, value) for key, value in changed_flags(config).items()]
    return HEADER.format(name=name) + "".join(lines)


def _yaml_line(key: str, value: Any) -> str:
    import yaml

    is_list = isinstance(value, list)
    # Control characters are escaped, because YAML takes some of them for the end of a line.
    is_printable = "".join(map(str, value if is_list else [value])).isprintable()
    # None: a list in brackets, on the line of its key.
    style = None if is_list else False
    return yaml.safe_dump({key: value}, default_flow_style=style, allow_unicode=is_printable, width=1000)


def read_run_yaml(path: Path) -> list[Given]:
    """The flags of the file ``path``.

    Raises :class:`ConfigError` for a file that is no mapping of flags to values, with everything that is wrong in it.
    """
    import yaml

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read ({error.strerror}): name a YAML file of flags.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not YAML ({reason}): correct it.") from None
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"--config {path} must map flags to values: write a line such as seq-length: 8192 per flag.")
    # Nodes, not values: YAML would read 1:30 as a number and no as false.
    given: list[Given] = []
    seen: set[str] = set()
    for key, value in node.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        flag = f"--{key.value}".replace("_", "-") if isinstance(key, yaml.ScalarNode) else ""
        if flag in seen:
            raise ConfigError(f"{flag} stands twice in {place}: remove one of them.")
        seen.add(flag)
        given.append(_given(flag, value, place))
    return given


def _given(flag: str, value: "yaml.Node", place: str) -> Given:
    """The flag of one key of the file."""
    if flag == "--config":
        raise ConfigError(f"{flag} in {place} is not allowed in a file of flags: copy the flags of {value.value} here.")
    found = RUN_PARSER.find(flag)
    if found is None:
        raise ConfigError(
            f"{flag or 'a list'} in {place} is not a flag of pretrain_llama.py: {RUN_PARSER.suggestion(flag)}"
        )
    is_boolean = value.tag == _TAG + "bool"
    if found[0].is_switch:
        if not is_boolean:
            raise ConfigError(f"{flag} in {place} has no value on the command line: write true or false.")
        is_on = value.value.lower() in ("true", "yes", "on")
        positive = flag_of(found[0].field.name)
        return Given(positive if is_on is found[1] else f"--no-{positive[2:]}", (), place)
    if is_boolean and value.value.lower() not in ("true", "false"):
        raise ConfigError(f"{flag} in {place} is {value.value}, which YAML reads as true or false: write it in quotes.")
    return Given(flag, tuple(_yaml_texts(flag, value, place)), place)


def _yaml_texts(flag: str, value: "yaml.Node", place: str) -> Iterator[str]:
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
