"""Recipes of Megatron-LM as words of a command line: files of its functional tests, shell scripts, files of words."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from megatron.command_line.words import Given, most_values, split_words
from megatron.config.bash.evaluation import Started, evaluate
from megatron.config.bash.expansion import shown, sources, without_unset
from megatron.config.megatron_lm import NO_EFFECT
from megatron.config.run_parser import RUN_PARSER
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """The flags of a run of Megatron-LM."""

    words: list[str]
    num_ranks: int | None = None
    """Ranks that the launcher in its script starts, if it says so in numbers."""
    remarks: tuple[str, ...] = ()
    """What could not be decided without running its script."""


# Flags of architectures that the registry does not have, by architecture.
ABSENT_ARCHITECTURES = {
    "GPT-NeoX's rotation of a part of a head, or of pairs": "--rotary-percent --rotary-interleaved",
    "squared ReLU (Nemotron)": "--squared-relu",
    "linear attention and gated attention (Qwen3-Next)": (
        "--experimental-attention-variant --linear-attention-freq --linear-conv-kernel-dim --linear-key-head-dim "
        "--linear-num-key-heads --linear-num-value-heads --linear-value-head-dim --attention-output-gate "
        "--apply-wd-to-qk-layernorm --moe-shared-expert-gate"
    ),
    "ModelOpt's layers, and a teacher beside the model": (
        "--export-te-mcore-model --export-kd-cfg --export-kd-teacher-load"
    ),
}

# Flags that name the corpus and the tokenizer, and change the text of the corpus.
DATA_FLAGS = frozenset(
    ["--data-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--fim-data", "--fim-rate", "--fim-spm-rate"]
)


def edited(words: list[str]) -> list[str]:
    """The one edit under which recipes are counted: architectures that are not in the registry are taken out, and
    mock data with GPT-2's vocabulary size replace corpus and tokenizer."""
    absent = {flag for flags in ABSENT_ARCHITECTURES.values() for flag in flags.split()}
    kept: list[Given] = []
    for given in split_words(words):
        is_whole = given.flag == "--rotary-percent" and float(given.values[0]) == 1
        is_tokenizer = given.flag == "--tokenizer-type" and given.values != ("NullTokenizer",)
        if given.flag not in DATA_FLAGS and (given.flag not in absent or is_whole) and not is_tokenizer:
            kept.append(given)
    flags = {given.flag for given in kept}
    kept += [Given("--mock-data", ())] * ("--mock-data" not in flags)
    kept += [Given("--vocab-size", ("50257",))] * ("--vocab-size" not in flags)
    # The tests count their repetitions in this variable.
    return [word.replace("${REPEAT}", "1") for given in kept for word in (given.flag, *given.values) if word]


class Recipes(NamedTuple):
    """The recipes of a file or a directory."""

    by_name: dict[str, Recipe]
    skipped: list[str]
    """A sentence for each file of a directory that is no recipe."""


def read_recipes(path: Path, environment: Mapping[str, str]) -> Recipes:
    """The recipes in ``path``: a file, a directory of functional tests of Megatron-LM (``NAME/model_config.yaml``), or
    the JSON file with the flags of all of them in ``tests/config/recipes``. A script is read in ``environment``.

    Raises :class:`ConfigError` for a file that cannot be read.
    """
    if not path.is_dir():
        return Recipes(_read_file(path, environment), [])
    found: dict[str, Recipe] = {}
    skipped: list[str] = []
    for file in sorted(path.glob("**/model_config.yaml")):
        try:
            found[file.parent.name] = _read_file(file, environment)[file.name]
        except ConfigError as error:
            skipped += error.sentences
    if not found and not skipped:
        raise ConfigError(f"{path} has no NAME/model_config.yaml: name a recipe, or a directory of them.")
    return Recipes(found, skipped)


def _read_file(path: Path, environment: Mapping[str, str]) -> dict[str, Recipe]:
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            return {
                name: Recipe(list(_words_of_mapping(dict(content["flags"][number] for number in numbers))))
                for name, numbers in content["recipes"].items()
            }
        if path.suffix in (".yaml", ".yml"):
            recipe = Recipe(_words_of_yaml(path))
        else:
            recipe = script_recipe(path.read_text(encoding="utf-8"), environment)
        if not recipe.words:
            raise ValueError("it has no flags")
        return {path.name: recipe}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a recipe.") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no recipe ({error}): name a YAML file, a shell script or a file of flags."
        ) from None


def _words_of_yaml(path: Path) -> list[str]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    flags = content.get("MODEL_ARGS", content)
    if flags is None:
        raise ValueError("its MODEL_ARGS is empty")
    return list(_words_of_mapping(flags))


def _words_of_mapping(flags: Mapping[str, Any]) -> Iterator[str]:
    """The words for flags by name, as the functional tests write them: ``true`` for a flag without a value, and a
    list, also as the text ``[a b]``, for several."""
    for key, value in flags.items():
        if value is False or value is None:
            continue
        yield f"--{key.lstrip('-')}"
        text = str(value)
        if isinstance(value, list):
            yield from " ".join(map(str, value)).split()  # [2 2] is a list of one text in YAML
        elif text.startswith("[") and text.endswith("]"):
            yield from text[1:-1].replace(",", " ").split()
        elif re.fullmatch(r"\d+( \d+)+", text):
            yield from text.split()  # the shell divides it
        elif value is not True and text != "true":
            yield text


def script_recipe(text: str, environment: Mapping[str, str]) -> Recipe:
    """The flags that a shell script, started without arguments in ``environment``, passes to a Python file; or those
    of a file with flags alone.

    Raises :class:`ValueError` for text that is no script.
    """
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if first.lstrip().startswith("--"):
        return Recipe(shlex.split(text, comments=True))
    reading = evaluate(text, environment)
    if reading.started:
        return recipe_of(reading.started, tuple(reading.remarks))
    words: list[str] = []
    for name, value in reading.variables.values.items():
        if isinstance(value, dict):
            words += value.values()
        elif value != environment.get(name) and value.lstrip().startswith("--"):
            words += value.split()
    remark = "The script starts no Python file: the flags of all its variables are read."
    return _recipe(words, None, [*reading.remarks, remark])


def recipe_of(started: Sequence[Started], remarks: Sequence[str] = ()) -> Recipe:
    """The recipe of the training among the commands that a script starts: of the first Python file with pretrain, then
    train, in its name, otherwise of the first one."""
    files = [next(word for word in command.words if word.endswith(".py")) for command in started]
    names = [file.rpartition("/")[2] for file in files]
    number = min(range(len(started)), key=lambda one: 2 - ("pretrain" in names[one]) - ("train" in names[one]))
    chosen = started[number]
    others = [f"{shown(file)} (line {one.line})" for one, file in zip(started, files) if one.words != chosen.words]
    also = [f"Not explained, but started as well: {', '.join(others)}."] if others else []
    place = chosen.words.index(files[number])
    # Before the file stand the launcher and its flags: torchrun says the number of ranks, unless by a variable.
    given = {one.flag: one.values[0] for one in split_words(chosen.words[:place]) if one.values}
    sizes = [given.get("--nproc-per-node", ""), given.get("--nnodes", "1")]
    num_ranks = int(sizes[0]) * int(sizes[1]) if all(size.isdigit() for size in sizes) else None
    return _recipe(chosen.words[place + 1 :], num_ranks, [*remarks, *also])


def _recipe(words: Sequence[str], num_ranks: int | None, remarks: Sequence[str]) -> Recipe:
    """A recipe, with a remark on what has no value in ``words``. A variable that is not set, after a flag that takes no
    further value, is taken for empty."""
    # --lr $LR $MORE: LR is taken as a value, MORE for empty, because --lr has one value.
    missing = list(dict.fromkeys(source for word in words for source in sources(word)))
    kept: list[str] = []
    for given in split_words(words):
        values = list(given.values)
        while len(values) > _most_values(given.flag) and not without_unset(values[-1]):
            values.pop()
        kept += [*([given.flag] if given.flag else []), *values]
    notes = [f"{', '.join(missing)}: no value is known, so the text stands in the flags."] if missing else []
    return Recipe([shown(word) for word in kept], num_ranks, (*remarks, *notes))


def _most_values(flag: str) -> float:
    """The number of values that a flag takes at most."""
    found = RUN_PARSER.find(flag)
    if found is None:
        is_known_switch = flag in NO_EFFECT and NO_EFFECT[flag].values is None
        return 0 if is_known_switch or not flag else inf
    most = most_values(found[0].kind)
    return most if most <= 1 else inf
