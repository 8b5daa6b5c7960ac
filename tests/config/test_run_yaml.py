"""run.yaml: what is written is read as the same run, and a mistake in a file is named with its line."""

from dataclasses import fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from megatron.architectures.catalog import PRESETS
from megatron.config.command_line import CommandLine, parse_command_line
from megatron.config.dry_run import FlagFileConfig
from megatron.config.model import ModelConfig, preset
from megatron.config.run import RunConfig
from megatron.config.run_yaml import changed_flags, read_run_yaml, run_yaml
from megatron.errors import ConfigError

TEXTS = st.one_of(
    st.sampled_from(["null", "yes", "1:30", "0x10", "1_000", "3e-4", "99,1,0", "0:16 1M:32", "a: b # c", "[1]", "~"]),
    st.just("a\x85b"),
    # On a command line the word None is no text, but no value.
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1).filter(
        lambda text: not text.startswith("-") and text != "None"
    ),
)


def values_for(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a flag of this type, with those that YAML writes in another way."""
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_for(arguments[0]), min_size=1, max_size=3).map(tuple)
        return st.tuples(*map(values_for, arguments))
    if arguments:
        return st.one_of(*(values_for(part) for part in arguments if part is not NoneType))
    numbers = {bool: st.booleans(), int: st.integers(-9, 10**12), float: st.floats(0)}
    return numbers.get(kind, TEXTS)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """A run with a value for many flags; it need not pass the checks."""
    groups = {}
    for group, kind in get_type_hints(RunConfig).items():
        if kind is FlagFileConfig:
            continue
        hints = get_type_hints(kind)
        chosen = draw(st.sets(st.sampled_from([field.name for field in fields(kind)]), max_size=8))
        default = kind()
        if kind is ModelConfig and draw(st.booleans()):
            default, chosen = preset(draw(st.sampled_from(sorted(PRESETS)))), chosen - {"model"}
        groups[group] = replace(default, **{name: draw(values_for(hints[name])) for name in sorted(chosen - {"model"})})
    config = RunConfig(**groups)
    tokenizer = config.tokenizer
    # The parser infers the type from the two files.
    assume(tokenizer.tokenizer_type is not None or None in (tokenizer.vocab_file, tokenizer.merge_file))
    return config


@given(config=configs())
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
def test_what_is_written_is_read_as_the_same_run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = run_yaml(config, "run.yaml")
    line = CommandLine(tuple(read_run_yaml(write(tmp_path_factory.getbasetemp(), text))))
    read = line.parse().checked()
    for group in fields(RunConfig):
        assert getattr(read, group.name) == getattr(config, group.name), text


def test_only_what_differs_from_the_defaults_is_written() -> None:
    config = parse_command_line(
        ["--model", "llama3-8b", "--num-layers", "2", "--lr", "3e-4", "--bf16", "--no-save-optim"]
    )
    text = run_yaml(config, "run.yaml")
    assert yaml.safe_load(text) == {
        "model": "llama3-8b",
        "num-layers": 2,
        "bf16": True,
        "lr": 0.0003,
        "save-optim": False,
    }
    assert text.startswith("# The flags of this run") and "--config run.yaml" in text
    assert not changed_flags(RunConfig())
    back = parse_command_line(["--model", "llama3.2-1b", "--untie-embeddings-and-output-weights"])
    assert changed_flags(back) == {"model": "llama3.2-1b", "untie-embeddings-and-output-weights": True}


def write(directory: Path, text: str) -> Path:
    path = directory / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("seq-length: 64", "--seq-length 64"),
        ("seq_length: 64", "--seq-length 64"),
        ("lr: 3e-4", "--lr 3e-4"),
        ("rampup-batch-size: [32, 32, 1000]", "--rampup-batch-size 32 32 1000"),
        ("bf16: true", "--bf16"),
        ("save-optim: no", "--no-save-optim"),
        ("no-save-optim: true", "--no-save-optim"),
        ("no-save-optim: false", "--save-optim"),
        ("split: 99,1,0", "--split 99,1,0"),
        ('save-interval: "1:30"', "--save-interval 1:30"),
        ("save-interval: 1:30", "--save-interval 1:30"),
        ("# nothing", ""),
    ],
)
def test_a_line_is_a_flag(tmp_path: Path, line: str, words: str) -> None:
    assert CommandLine(tuple(read_run_yaml(write(tmp_path, line)))).words == words.split()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seq-lenght: 64", "--seq-lenght in {path}, line 1 is not a flag of .*: did you mean --seq-length"),
        ("lr: 1\n? [a]\n: 1", "a list in {path}, line 2 is not a flag"),
        ("lr: 1e-3\nlr: 2e-3", "--lr stands twice in {path}, line 2: remove one"),
        ("bf16: 1", "--bf16 in {path}, line 1 has no value on the command line: write true or false"),
        ("save: no", "--save in {path}, line 1 is no, which YAML reads as true or false: write it in quotes"),
        ("lr: {a: 1}", "--lr in {path}, line 1 must be a value, or a list of values"),
        ("[a, b]", "--config {path} must map flags to values"),
        ("lr: [", "--config {path} is not YAML"),
        ("[" * 5000, "--config {path} is not YAML"),
        ("config: other.yaml", "--config in {path}, line 1 is not allowed .*: copy the flags of other.yaml"),
        ("!!python/object/apply:os.system [false]: 1", "a list in {path}, line 1 is not a flag"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=sentence.format(path=path)):
        read_run_yaml(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*missing\.yaml cannot be read"):
        parse_command_line(["--config", str(tmp_path / "missing.yaml")])
    with pytest.raises(ConfigError, match="--config needs a YAML file"):
        parse_command_line(["--config", "--bf16"])
    with pytest.raises(ConfigError, match="'b' is not a value of any flag"):
        parse_command_line(["--config", "a", "b"])


def test_flags_of_the_command_line_override_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: tiny\nlr: 1e-3\nbf16: true\nseq-length: 64\n")
    for words in (
        ["--config", str(path), "--lr", "2e-3", "--no-bf16"],
        ["--lr", "2e-3", "--no-bf16", f"--config={path}"],
    ):
        config = parse_command_line(words)
        assert config == parse_command_line(["--model", "tiny", "--lr", "2e-3", "--seq-length", "64"])
    with pytest.raises(ConfigError, match="--config is given twice"):
        parse_command_line(["--config", str(path), "--config", str(path)])
