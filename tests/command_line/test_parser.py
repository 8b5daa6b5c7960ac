"""The parser of the tools: every kind of flag, all mistakes at once, commands, and the help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from megatron.command_line.parser import parse, parse_command, parse_known
from megatron.command_line.words import Given
from megatron.errors import ConfigError
from megatron.flags import Argument


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    width: int = 64
    """Width of a layer."""
    shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class Tool:
    """A tool with every kind of flag."""

    place: Annotated[str, Argument(is_positional=True)]
    """Where it works."""
    count: int
    """How often."""
    sizes: Sizes = field(default_factory=Sizes)
    kind: Literal["fast", "slow"] = "fast"
    """Kind of work."""
    rates: tuple[float, ...] = ()
    """Rates to try."""
    out: Path | None = None
    """File."""
    seed: Annotated[int, Argument(aliases=("--random-seed",))] = 0
    """Seed."""
    check: bool = True
    """Check the result."""
    strict: bool | None = None


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tools/work.py"])
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("here --count 3", Tool("here", 3)),
        ("--count 3 here", Tool("here", 3)),  # a flag takes no more words than it has values
        ("--count=-3 --no-check here", Tool("here", -3, check=False)),
        ("--no_check --random_seed 7 here --count 1", Tool("here", 1, seed=7, check=False)),
        ("here --count 1 --width 8 --shape 2 3", Tool("here", 1, Sizes(8, (2, 3)))),
        ("here --count 1 --count 2 --kind slow --out a/b", Tool("here", 2, kind="slow", out=Path("a/b"))),
        ("here --count 1 --strict False", Tool("here", 1, strict=False)),
        ("here --count 1 --rates 1 -2.5 -inf", Tool("here", 1, rates=(1, -2.5, float("-inf")))),
    ],
)
def test_words_become_the_dataclass(words: str, expected: Tool) -> None:
    assert parse(Tool, None, words.split()) == expected


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ("", ["PLACE is missing: add it.", "--count is missing: add it with a whole number."]),
        ("here there --count 1", ["'there' is not a value of any flag"]),
        ("here --count many", ["--count needs a whole number, not 'many'"]),  # and is not missing
        (f"here --count {10**20}", [f"--count {10**20} is too large: use a number below 2^63."]),
        ("here --cuont 1 --count 1", ["--cuont is not a flag of work.py: did you mean --count?"]),
        ("here --count 1 --kind Slow", ["--kind 'Slow' is unknown: did you mean slow?"]),
        ("here --count 1 --shape 2", ["--shape needs 2 values, not 1"]),
        ("here --count 1 --no-seed", ["--no-seed is not a flag of work.py"]),
        ("--count x --width y --colour z", ["--count needs", "--width needs", "--colour is not", "PLACE is missing"]),
    ],
)
def test_everything_that_is_wrong_is_said_at_once(words: str, sentences: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(Tool, None, words.split())
    assert len(raised.value.sentences) == len(sentences)
    for found, expected in zip(raised.value.sentences, sentences, strict=True):
        assert found.startswith(expected)


def test_other_defaults_hold_and_nothing_is_missing() -> None:
    default = Tool("there", 9, Sizes(1))
    assert parse(Tool, None, ["--kind", "slow"], default) == Tool("there", 9, Sizes(1), "slow")


def test_flags_of_another_dataclass_come_back_as_they_are() -> None:
    parsed, rest = parse_known(Sizes, None, ["--width", "3", "--lr", "1e-3", "--bf16"])
    assert parsed == Sizes(3)
    assert rest == [Given("--lr", ("1e-3",)), Given("--bf16", ())]


def test_the_first_word_chooses_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"sizes": Sizes, "work": Tool}
    assert parse_command(commands, "Two commands.", ["sizes", "--width", "3"]) == Sizes(3)
    for words, sentence in (
        ([], "The first word is missing: begin with sizes or work."),
        (["wrok"], "wrok is no command: did you mean work?"),
        (["--width"], "--width is no command: begin with sizes or work."),
    ):
        with pytest.raises(ConfigError) as raised:
            parse_command(commands, "Two commands.", words)
        assert str(raised.value) == sentence
    with pytest.raises(SystemExit) as end:
        parse_command(commands, "Two commands.", ["--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    assert text.startswith("usage: work.py COMMAND [FLAGS]\n\nTwo commands.") and "sizes  Sizes of the model." in text


HELP = """\
usage: work.py PLACE [FLAGS]

What it does.

  PLACE
      Where it works. (required)
  --count INTEGER
      How often. (required)
  --kind fast|slow
      Kind of work. (default: fast)
  --rates NUMBER ...
      Rates to try.
  --out PATH
      File.
  --seed INTEGER
      Seed. (default: 0)
  --check
      Check the result. (default: on; --no-check turns it off)
  --strict True|False


Sizes.
  --width INTEGER
      Width of a layer. (default: 64)
  --shape INTEGER INTEGER
"""


def test_the_help_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for prints in (True, False):
        with pytest.raises(SystemExit) as end:
            parse(Tool, "What it does.", ["--count", "x", "--help"], print_messages=prints)
        assert not end.value.code
        assert capsys.readouterr().out.rstrip() == (HELP.rstrip() if prints else "")
