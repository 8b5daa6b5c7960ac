"""Every row of the table in docs/coming_from_megatron.md says what the parser and the checks do with the flag. The
pages that docs/flag_pages.py writes are what the code says, and the tool notices when not.

The rows are read from the page, and every value that Megatron-LM documents is given to ``pretrain_llama.py``, in the
runs of ``megatron_flags.txt``.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from docs import flag_pages
from docs.flag_pages import MegatronFlag, ReferenceConfig, megatron_flags
from megatron.command_line.words import Given, split_words
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.megatron_lm import NO_EFFECT
from megatron.config.run import RunConfig
from megatron.config.run_parser import RUN_PARSER
from megatron.errors import ConfigError
from tests.config.flag_values import assert_same, value_in

PAGE = Path(__file__).parents[2] / "docs/coming_from_megatron.md"
RUN = "--model tiny --mock-data --vocab-size 1000 --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
"""A run that is accepted, to which the flags are added."""
RUNS = [
    split_words(shlex.split(line))
    for line in re.sub(r"\n +", " ", Path(__file__).with_name("megatron_flags.txt").read_text()).splitlines()
    if not line.startswith("#")
]


class Row(NamedTuple):
    """A row of the table."""

    asked: MegatronFlag
    answer: str

    @property
    def choices(self) -> set[str]:
        """The values that Megatron-LM documents."""
        values = NO_EFFECT[self.asked.flag].values if self.asked.flag in NO_EFFECT else None
        return {*self.asked.choices.split(), *(values or "").strip("*").split("|")} - {""}

    @property
    def refused_values(self) -> set[str]:
        """The values behind the word "not"; all of a flag that is refused."""
        listed = re.search(r"; not ([^;]*)$", self.answer)
        return self.choices if self.answer.startswith("refused") else set(listed[1].split(", ") if listed else ())


def rows_of(page: str) -> list[Row]:
    by_name = {flag.flag: flag for flag in megatron_flags()}
    found = re.findall(r"^\| `(--[\w-]+)` \| [^|]* \| (.*) \|$", page, re.MULTILINE)
    return [Row(by_name[name], answer) for name, answer in found]


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


def accept(given: list[Given]) -> RunConfig:
    """Parse and check a run with these flags; raises ConfigError where one is refused."""
    words = [word for one in given for word in (one.flag, *one.values)]
    config = parse_command_line([*RUN.split(), *words])
    check_run(config, 8)
    return config


def test_every_row_is_read() -> None:
    assert [row.asked.flag for row in ROWS] == [flag.flag for flag in megatron_flags()]
    for row in ROWS:
        assert row.refused_values <= row.choices, row


@pytest.mark.parametrize("given", RUNS, ids=len)
def test_a_run_with_flags_of_the_rows_is_accepted_and_has_their_values(given: list[Given]) -> None:
    assert len({one.flag for one in given}) == len(given), "a flag is given twice"
    config = accept(given)
    for one in given:
        # tests/config/test_command_line.py shows that the flags without effect change nothing.
        if one.flag in RUN_PARSER.spellings and one.flag not in NO_EFFECT and one.values != ("None",):
            assert_same(value_in(config, one.flag), one.values)


def test_the_runs_have_every_value_of_every_row() -> None:
    given: dict[str, set[str]] = {}
    for run in RUNS:
        for one in run:
            given.setdefault(one.flag, set()).update(one.values or [""])
    accepted = [row for row in ROWS if not row.answer.startswith("refused")]
    assert not [row.asked.flag for row in accepted if row.asked.flag not in given]
    missing = {row.asked.flag: row.choices - row.refused_values - given[row.asked.flag] for row in accepted}
    assert not {flag: values for flag, values in missing.items() if values}


def test_what_a_row_calls_refused_is_refused_by_name() -> None:
    refused = [
        Given(row.asked.flag, (value,) if value else ())
        for row in ROWS
        for value in row.refused_values or ([""] if row.answer.startswith("refused") else [])
    ]
    assert len(refused) > 100
    for one in refused:
        with pytest.raises(ConfigError, match=rf"{one.flag}(?![\w-])"):
            accept([one])


# --- the tool ------------------------------------------------------------------------------------------------

DOCS = flag_pages.REPOSITORY / "docs"


def copied_pages(directory: Path) -> Path:
    for name in ("flags.md", "coming_from_megatron.md"):
        shutil.copy(DOCS / name, directory)
    return directory


def test_the_pages_are_what_the_code_says() -> None:
    flag_pages.write(ReferenceConfig(check=True))


@pytest.mark.parametrize("name", ["flags.md", "coming_from_megatron.md"])
def test_a_page_that_says_something_else_is_refused_and_mended(tmp_path: Path, name: str) -> None:
    page = copied_pages(tmp_path) / name
    page.write_text(page.read_text().replace("; no effect", "; some effect").replace("| supported |", "| ignored |"))
    changed = page.read_text()
    with pytest.raises(ConfigError, match=f"{name} differs from the code: run python docs/flag_pages.py"):
        flag_pages.write(ReferenceConfig(check=True, docs=tmp_path))
    assert page.read_text() == changed, "--check writes nothing"
    flag_pages.write(ReferenceConfig(docs=tmp_path))
    assert page.read_text() == (DOCS / name).read_text()


def test_what_people_wrote_around_the_table_stays(tmp_path: Path) -> None:
    page = copied_pages(tmp_path) / "coming_from_megatron.md"
    page.write_text(page.read_text().replace("refused:", "ignored:") + "The last word.\n")
    flag_pages.write(ReferenceConfig(docs=tmp_path))
    assert page.read_text() == (DOCS / "coming_from_megatron.md").read_text() + "The last word.\n"


def test_a_page_without_the_marks_is_refused(tmp_path: Path) -> None:
    page = copied_pages(tmp_path) / "coming_from_megatron.md"
    page.write_text(page.read_text().replace(flag_pages.END, ""))
    with pytest.raises(ConfigError, match="lacks the marks"):
        flag_pages.write(ReferenceConfig(docs=tmp_path))


def test_every_flag_has_its_row() -> None:
    page = flag_pages.flag_page()
    for flag in RUN_PARSER.flags:
        assert page.count(f"\n| `{flag}` |") == 1, flag


def test_every_flag_of_megatron_is_answered_once() -> None:
    """Every answer: :func:`flag_pages.answer` fails for a flag that has none."""
    listed = [flag.flag for flag in flag_pages.megatron_flags()]
    assert len(set(listed)) == len(listed) > 250
    table = flag_pages.megatron_table()
    for flag in listed:
        assert table.count(f"\n| `{flag}` |") == 1, flag


def answer_to(flag: str, default: str, choices: str = "") -> str:
    return flag_pages.answer(MegatronFlag("", flag, default, choices), flag_pages.accepted_flags())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("--seq-length", "none"), "supported"),
        (("--rotary-base", "10000"), "supported; default 500000"),
        (("--num-query-groups", "1"), "supported; default `--num-attention-heads`"),
        (("--no-save-optim", "on"), "supported"),
        (("--swiglu", "off"), "no effect; default on"),
        (("--no-rope-fusion", "on"), "supported"),
        (("--no-use-mcore-models", "on"), "refused, because there is one implementation of the model"),
        (("--optimizer", "adam", "adam sgd soap"), "supported; not soap"),
        (("--muon-tp-mode", "duplicated", "blockwise duplicated"), "supported; not blockwise"),
        (("--cp-comm-type", "p2p", "p2p a2a"), "supported"),
        (("--spec", "none"), "refused: it changes the architecture: remove it."),
    ],
)
def test_an_answer_says_what_becomes_of_a_flag(asked: tuple[str, ...], expected: str) -> None:
    assert answer_to(*asked) == expected


def test_a_flag_of_megatron_without_an_answer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--frobnicate of Megatron-LM is neither accepted nor refused"):
        answer_to("--frobnicate", "off")


def test_help_cannot_break_a_table() -> None:
    assert flag_pages.in_cell("t*3|(--tt|) <a> --no-x.") == "t\\*3\\|(`--tt`\\|) \\<a> `--no-x`."
