"""The pages that tools/flag_reference.py writes: they are what the code says, and the tool notices when not."""

import shutil
from pathlib import Path
from typing import Literal

import pytest

from megatron.commands import explain_flags as flag_reference
from megatron.commands.explain_flags import MegatronFlag, ReferenceConfig
from megatron.config.help import describe_values
from megatron.config.megatron_lm import NOT_SUPPORTED
from megatron.config.words import fields_by_flag
from megatron.errors import ConfigError

DOCS = flag_reference.REPOSITORY / "docs"


def copied_pages(directory: Path) -> Path:
    for name in ("flags.md", "coming_from_megatron.md"):
        shutil.copy(DOCS / name, directory)
    return directory


def test_the_pages_are_what_the_code_says() -> None:
    flag_reference.write(ReferenceConfig(check=True))


@pytest.mark.parametrize("name", ["flags.md", "coming_from_megatron.md"])
def test_a_page_that_says_something_else_is_refused_and_mended(tmp_path: Path, name: str) -> None:
    page = copied_pages(tmp_path) / name
    page.write_text(page.read_text().replace("; no effect", "; some effect").replace("| supported |", "| ignored |"))
    changed = page.read_text()
    with pytest.raises(ConfigError, match=f"{name} differs from the code: run python tools/flag_reference.py"):
        flag_reference.write(ReferenceConfig(check=True, docs=tmp_path))
    assert page.read_text() == changed, "--check writes nothing"
    flag_reference.write(ReferenceConfig(docs=tmp_path))
    assert page.read_text() == (DOCS / name).read_text()


def test_what_people_wrote_around_the_table_stays(tmp_path: Path) -> None:
    page = copied_pages(tmp_path) / "coming_from_megatron.md"
    page.write_text(page.read_text().replace("refused:", "ignored:") + "The last word.\n")
    flag_reference.write(ReferenceConfig(docs=tmp_path))
    assert page.read_text() == (DOCS / "coming_from_megatron.md").read_text() + "The last word.\n"


def test_a_page_without_the_marks_is_refused(tmp_path: Path) -> None:
    page = copied_pages(tmp_path) / "coming_from_megatron.md"
    page.write_text(page.read_text().replace(flag_reference.END, ""))
    with pytest.raises(ConfigError, match="lacks the marks"):
        flag_reference.write(ReferenceConfig(docs=tmp_path))


def test_every_flag_has_its_row() -> None:
    page = flag_reference.flag_page()
    for flag in fields_by_flag():
        assert page.count(f"\n| `{flag}` |") == 1, flag


def test_every_flag_of_megatron_is_answered_once_and_none_is_refused_that_it_does_not_have() -> None:
    """Every answer: :func:`flag_reference.answer` fails for a flag that has none."""
    listed = [flag.flag for flag in flag_reference.megatron_flags()]
    assert len(set(listed)) == len(listed) > 250
    assert set(listed) >= NOT_SUPPORTED.keys()
    table = flag_reference.megatron_table()
    for flag in listed:
        assert table.count(f"\n| `{flag}` |") == 1, flag


def answer_to(flag: str, default: str, choices: str = "") -> str:
    return flag_reference.answer(MegatronFlag("", flag, default, choices), flag_reference.accepted_flags())


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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (bool, "on, off"),
        (bool | None, "True, False"),
        (int | None, "integer"),
        (Literal["a", "b"] | None, "a, b"),
        (tuple[str, ...], "one or more: text"),
        (tuple[int, int, int] | None, "integer integer integer"),
    ],
)
def test_values_are_described(kind: object, expected: str) -> None:
    assert describe_values(kind) == expected


def test_help_cannot_break_a_table() -> None:
    assert flag_reference.in_cell("t*3|(--tt|) <a> --no-x.") == "t\\*3\\|(`--tt`\\|) \\<a> `--no-x`."
