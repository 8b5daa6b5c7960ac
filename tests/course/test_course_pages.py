"""The pages of the course: what they say that a command prints is printed, and a lesson has all that belongs to it."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_llama.commands import command
from megatron_llama.course.__main__ import verdict
from megatron_llama.course.lesson import HOLE, LESSONS, Lesson

COURSE = Path(__file__).parents[2] / "docs" / "course"
BLOCKS = [
    pytest.param(words.replace("\\\n", " "), output, id=f"{page.stem} {words.strip()}")
    for page in sorted(COURSE.glob("[1-8]_*.md"))
    for words, output in re.findall(
        r"^```bash\nmegatron-llama ((?:estimate|schedule) .*?)\n```\n\n```\n(.*?)^```",
        page.read_text("utf-8"),
        re.M | re.S,
    )
]


@pytest.mark.parametrize(("words", "output"), BLOCKS)
def test_a_command_prints_what_the_page_shows(
    words: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # drawings are as wide as the terminal
    command(*shlex.split(words))
    printed, shown = (
        [" ".join(line.split()) for line in text.splitlines()] for text in (capsys.readouterr().out, output)
    )
    lines = {*shown} - {"…"}
    assert lines and lines <= {*printed}


@pytest.mark.parametrize("lesson", [one for one in LESSONS if one.file.exists()], ids=lambda lesson: lesson.name)
def test_a_lesson_has_a_page_an_exercise_and_a_row(lesson: Lesson) -> None:
    page = (COURSE / f"{lesson.number}_{lesson.name}.md").read_text(encoding="utf-8")
    assert f"`docs/course/exercises/{lesson.file.name}`" in page
    assert f"megatron-llama course check {lesson.number}\n" in page and "## In production" in page
    assert "explorer.html#" in page
    assert HOLE in lesson.file.read_text(encoding="utf-8")
    row = (
        rf"^\| {lesson.number} \| \[.*\]\({lesson.number}_{lesson.name}\.md\) \| .* \| {re.escape(lesson.exercise)} \|$"
    )
    assert re.search(row, (COURSE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_blocks_of_output_are_found() -> None:
    assert BLOCKS


def test_the_page_on_failures_has_as_many_crashes_as_its_check() -> None:
    (crashes,) = set(re.findall(r"\d+ crashes", (COURSE / "8_failures.md").read_text(encoding="utf-8")))
    assert crashes in verdict("failures", Path(__file__).parent / "answers" / "8_failures.py")[1]
