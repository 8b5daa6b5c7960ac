"""Recipes of Megatron-LM as words of a command line: files of its functional tests, shell scripts, files of words."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from megatron.config.words import Given, split_words
from megatron.errors import ConfigError

_LAUNCHER_FLAGS = """--nproc-per-node --nnodes --node-rank --master-addr --master-port --rdzv-backend --rdzv-endpoint
--rdzv-id --max-restarts --log-dir --tee --redirects --standalone --monitor-interval --local-ranks-filter"""
"""Flags of torchrun, which stand in the same scripts."""

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
"""Flags of architectures that the registry does not have, by architecture."""

DATA_FLAGS = frozenset(
    ["--data-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--fim-data", "--fim-rate", "--fim-spm-rate"]
)
"""Flags that name the corpus and the tokenizer, and change the text of the corpus."""


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


def num_ranks(words: list[str], gpus_per_node: int = 8) -> int:
    """The ranks of the smallest number of nodes that holds a model replica."""
    sizes = {given.flag: given.values for given in split_words(words)}
    ranks = 1
    for axis in ("tensor-model", "pipeline-model", "context"):
        value = sizes.get(f"--{axis}-parallel-size", ())
        ranks *= int(value[0]) if value and value[0].isdigit() and int(value[0]) else 1
    return ceil(ranks / gpus_per_node) * gpus_per_node if gpus_per_node % ranks else gpus_per_node


def read_recipes(path: Path) -> dict[str, list[str]]:
    """The words of every recipe in ``path`` by its name: a file, a directory of functional tests of Megatron-LM
    (``NAME/model_config.yaml``), or the JSON file with the flags of all of them in ``tests/config/recipes``.

    Raises :class:`ConfigError` for a file that cannot be read.
    """
    try:
        if path.is_dir():
            files = sorted(path.glob("**/model_config.yaml"))
            if not files:
                raise ConfigError(f"{path} has no NAME/model_config.yaml: name a recipe, or a directory of them.")
            return {file.parent.name: _words_of_yaml(file) for file in files}
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            return {
                name: list(_words_of_mapping(dict(content["flags"][number] for number in numbers)))
                for name, numbers in content["recipes"].items()
            }
        if path.suffix in (".yaml", ".yml"):
            return {path.name: _words_of_yaml(path)}
        return {path.name: words_of_script(path.read_text(encoding="utf-8"))}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a recipe.") from None
    except (ValueError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no recipe ({error}): name a YAML file, a shell script or a file of flags."
        ) from None


def _words_of_yaml(path: Path) -> list[str]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return list(_words_of_mapping(content.get("MODEL_ARGS", content)))


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


def words_of_script(text: str) -> list[str]:
    """The flags of a shell script, or of a file with flags alone, with their values. Variables that the script sets
    to a constant are replaced; flags of torchrun are left out."""
    lines = re.sub(r"\\\n", " ", text).split("\n")
    variables: dict[str, str] = {}
    words: list[str] = []
    for line in lines:
        try:
            found = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quoted text of several lines
        for word in found:
            assigned = re.fullmatch(r"(?:export )?([A-Za-z_]\w*)=([^()]*)", word)
            if assigned and not word.startswith("-"):
                variables[assigned[1]] = _replaced(assigned[2], variables)
            elif re.match(r"[A-Za-z_]\w*\+?=\($", word) or word in (")", ");", "("):
                words.append("")  # the beginning or the end of an array
            else:
                words.append(_replaced(word, variables))
        words.append("")
    return list(_flags_among(words))


def _replaced(word: str, variables: Mapping[str, str]) -> str:
    """``word`` with the values of variables; ``${X:-value}`` is the value unless X is set."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default)

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, word)


def _flags_among(words: list[str]) -> Iterator[str]:
    """The flags with their values among the words of a script; an empty word ends the values of a flag."""
    is_value = False
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if re.match(r"--[A-Za-z]", word):
            is_value = flag not in _LAUNCHER_FLAGS.split()
        elif word == "" or re.search(r"\[[@*]\]|\.py$", word) or word in ("|", "&&", ">", "2>&1", ";"):
            is_value = False
        if is_value:
            yield word
