"""Flags by name, and what sets them: the words of a command line, and a YAML file.

The type of a flag makes a value of its words. In a YAML file (written into the run directory, and read by ``--config``)
a key is a flag without its two hyphens, with hyphens or underscores, and a value is the text of the flag's value, so
that ``3e-4`` is a number where the flag needs one, whatever YAML takes it for. A flag without a value is ``true`` or
``false``; a flag with several values has a list.
"""

import difflib
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from megatron.architectures.catalog import PRESETS
from megatron.config.model import preset
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import flag_of

if TYPE_CHECKING:
    import yaml

_SYNONYMS_BY_FLAG = {
    "--lr": "learning-rate max-lr peak-lr max-learning-rate",
    "--min-lr": "min-learning-rate",
    "--lr-warmup-iters": "warmup warmup-iters warmup-steps num-warmup-steps lr-warmup-steps",
    "--lr-decay-style": "lr-scheduler lr-scheduler-type scheduler",
    "--micro-batch-size or --global-batch-size": "batch-size bs",
    "--micro-batch-size": "mbs per-device-train-batch-size per-device-batch-size device-batch-size",
    "--global-batch-size": "gbs train-batch-size gradient-accumulation-steps grad-accum accumulate-grad-batches",
    "--train-iters": "max-steps steps num-steps train-steps max-iters iterations num-iterations",
    "--train-iters or --train-samples": "epochs num-epochs num-train-epochs max-epochs",
    "--seq-length": "sequence-length seq-len max-seq-len max-seq-length context-length block-size max-length ctx",
    "--num-layers": "layers n-layer n-layers num-hidden-layers",
    "--hidden-size": "d-model n-embd dim embedding-dim",
    "--num-attention-heads": "heads n-head n-heads num-heads",
    "--num-query-groups": "num-key-value-heads num-kv-heads n-kv-heads",
    "--ffn-hidden-size": "intermediate-size mlp-size d-ff",
    "--kv-channels": "head-dim head-size",
    "--rotary-base": "rope-theta rope-base",
    "--norm-epsilon": "rms-norm-eps layernorm-epsilon norm-eps",
    "--no-untie-embeddings-and-output-weights": "tie-embeddings tie-word-embeddings",
    "--num-experts": "experts num-local-experts n-experts",
    "--moe-router-topk": "num-experts-per-tok top-k topk",
    "--tensor-model-parallel-size": "tp tp-size tensor-parallel",
    "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel",
    "--context-parallel-size": "cp cp-size context-parallel",
    "--expert-model-parallel-size": "ep ep-size expert-parallel expert-parallel-size",
    "--data-parallel-sharding-strategy": "fsdp zero zero-stage sharding-strategy",
    "--recompute-activations": "gradient-checkpointing activation-checkpointing checkpoint-activations",
    "--bf16": "precision dtype mixed-precision",
    "--fp8-format": "fp8",
    "--clip-grad": "max-grad-norm grad-clip gradient-clipping gradient-clip-val",
    "--weight-decay": "wd",
    "--adam-beta1": "beta1",
    "--adam-beta2": "beta2",
    "--adam-beta1 or --adam-beta2": "betas adam-betas",
    "--attention-backend": "flash-attention flash-attn attn-implementation",
    "--data-path": "dataset data train-data corpus data-dir",
    "--tokenizer-model": "tokenizer tokenizer-path tokenizer-name",
    "--load": "resume resume-from resume-from-checkpoint checkpoint ckpt checkpoint-path",
    "--load-hf": "pretrained model-name-or-path from-pretrained",
    "--save": "output-dir save-dir out-dir output checkpoint-dir",
    "--save-interval": "save-steps save-every checkpoint-interval",
    "--save-retain-last": "save-total-limit keep-last",
    "--eval-interval": "eval-steps eval-every",
    "--log-interval": "logging-steps log-every",
    "--seed": "random-seed",
    "--num-workers": "dataloader-num-workers workers",
    "--wandb-project": "wandb",
    "--tensorboard-dir": "tensorboard log-dir logging-dir",
}
# Names that other programs have for a flag, without hyphens in front.
SYNONYMS = {name: flag for flag, names in _SYNONYMS_BY_FLAG.items() for name in names.split()}


@cache
def fields_by_flag(run_config: type[RunConfig] = RunConfig) -> dict[str, Field[Any]]:
    """The dataclass field of every flag of ``run_config``, in the order of the groups."""
    return {
        flag_of(flag.name): flag
        for group in fields(run_config)
        for flag in fields(group.default_factory)  # type: ignore[arg-type]
    }


def is_switch(field: Field[Any]) -> bool:
    """Whether the flag has no value, and a ``--no-`` form."""
    return field.type in (bool, "bool")


@cache
def all_spellings() -> list[str]:
    """Every flag, and the ``--no-`` forms."""
    known = fields_by_flag()
    return [*known, *(f"--no-{flag[2:]}" for flag, field in known.items() if is_switch(field))]


def suggestion(flag: str) -> str:
    """What to write instead of the unknown ``flag``."""
    synonym = SYNONYMS.get(flag.lstrip("-"))
    nearest = [synonym] if synonym else difflib.get_close_matches(f"--{flag.lstrip('-')}", all_spellings(), 1, 0.7)
    return f"did you mean {nearest[0]}?" if nearest else "see --help."


class Given(NamedTuple):
    """A flag of the command line with the words after it."""

    flag: str
    """The name with hyphens; empty for the words before the first flag."""
    values: tuple[str, ...]

    @property
    def as_typed(self) -> str:
        return " ".join([self.flag, *self.values])


def split_words(arguments: Iterable[str]) -> list[Given]:
    """The flags in ``arguments`` in order. A word that begins with a hyphen and is no number begins a flag."""
    flag, values = "", list[str]()
    found = []
    for word in arguments:
        # -1 and -inf are values.
        if not re.match(r"--|-[A-Za-z]", word) or re.fullmatch(r"-(inf|nan)", word):
            values.append(word)
            continue
        found.append(Given(flag, tuple(values)))
        name, has_value, value = word.partition("=")
        flag, values = name.replace("_", "-"), [value] if has_value else []
    found.append(Given(flag, tuple(values)))
    return [given for given in found if given != Given("", ())]


def without_flags(arguments: Iterable[str], names: Container[str]) -> list[str]:
    """``arguments`` as typed, without the flags of the fields ``names`` and their values."""
    kept, keeps = [], True
    for word in arguments:
        if word.startswith("--"):
            keeps = word[2:].partition("=")[0].replace("-", "_") not in names
        if keeps:
            kept.append(word)
    return kept


def value_of(flag: str, kind: Any, words: Sequence[str]) -> Any:
    """The value of a flag of the type ``kind``, which is no switch, from the words after it.

    Raises :class:`ConfigError` for words that this flag does not take.
    """
    parts = [part for part in get_args(kind) if part is not NoneType]
    if NoneType in get_args(kind):
        if list(words) == ["None"]:
            return None
        kind = parts[0]
        assert len(parts) == 1, kind
    if get_origin(kind) is not tuple:
        if not words:
            raise ConfigError(f"{flag} has no value: add {_example(kind)} after it.")
        if len(words) > 1:
            raise ConfigError(surplus(words[1]))
        return _scalar(flag, kind, words[0])
    kinds = get_args(kind)
    if kinds[-1] is Ellipsis:
        return tuple(_scalar(flag, kinds[0], word) for word in words)
    if len(words) > len(kinds):
        raise ConfigError(surplus(words[len(kinds)]))
    if len(words) < len(kinds):
        raise ConfigError(f"{flag} needs {len(kinds)} values, not {len(words)}: add {_example(kinds[0])} for each.")
    return tuple(_scalar(flag, part, word) for part, word in zip(kinds, words, strict=True))


def surplus(word: str) -> str:
    """The sentence about a word that belongs to no flag."""
    return f"{word!r} is not a value of any flag: remove it, or check the number of values of the flag before it."


def _scalar(flag: str, kind: Any, word: str) -> Any:
    if get_origin(kind) is Literal:
        return _choice(flag, get_args(kind), word)
    if kind is bool:
        return _choice(flag, ("True", "False"), word) == "True"
    if kind is int:
        return _whole_number(flag, word)
    if kind is float:
        try:
            return float(word)
        except ValueError:
            raise ConfigError(f"{flag} needs a number, not {word!r}: write one such as 3e-4.") from None
    return word


# What other programs call a value.
_VALUE_SYNONYMS = {("--optimizer", "adamw"): "adam, whose weight decay is decoupled as AdamW's"}


def _choice(flag: str, choices: Sequence[Any], word: str) -> Any:
    for choice in choices:
        if str(choice) == word:
            return choice
    by_name = {str(choice).lower(): str(choice) for choice in choices}
    nearest = difflib.get_close_matches(word.lower(), by_name, 1, 0.75)
    meant = _VALUE_SYNONYMS.get((flag, word.lower())) or (by_name[nearest[0]] if nearest else None)
    raise ConfigError(
        f"{flag} {word!r} is unknown: " + (f"did you mean {meant}?" if meant else f"use {one_of(choices)}.")
    )


def one_of(choices: Sequence[Any]) -> str:
    """The choices in words: "a, b or c"."""
    names = [str(choice) for choice in choices]
    return " or ".join([*([", ".join(names[:-1])] if names[:-1] else []), names[-1]])


_UNITS = {"k": 1024, "K": 1024, "m": 2**20, "M": 2**20}


def _whole_number(flag: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        pass
    # 8k, 1M and 1e6 are common, and ambiguous: the message has the number in digits.
    remedy = "write it in digits"
    if suffixed := re.fullmatch(r"(\d+)([kKmM])", word):
        remedy = f"write {int(suffixed[1]) * _UNITS[suffixed[2]]}"
    elif re.fullmatch(r"[\d.]+(e\+?\d+)?", word, re.IGNORECASE) and word.count(".") < 2 and float(word).is_integer():
        remedy = f"write {int(float(word))}"
    raise ConfigError(f"{flag} needs a whole number, not {word!r}: {remedy}.")


def _example(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return one_of(get_args(kind))
    return {int: "a whole number", float: "a number", bool: "True or False"}.get(kind, "one")


# --- YAML ----------------------------------------------------------------------------------------------------

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
    lines = [_yaml_line(key, value) for key, value in changed_values(config).items()]
    return HEADER.format(name=name) + "".join(lines)


def _yaml_line(key: str, value: Any) -> str:
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
        words += _yaml_words(flag, value, place)
    return words


def _yaml_words(flag: str, value: "yaml.Node", place: str) -> list[str]:
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
    texts = list(_yaml_texts(flag, value, place))
    # A value that begins with a hyphen must not be taken for a flag.
    return [f"{flag}={texts[0]}"] if len(texts) == 1 and texts[0].startswith("-") else [flag, *texts]


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
