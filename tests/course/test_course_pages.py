"""The pages of the course: what they say that a command prints is printed, and a lesson has all that belongs to it."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_llama.commands import command
from megatron_llama.course.__main__ import verdict
from megatron_llama.course.lesson import HOLE, LESSONS, Lesson

ANSWERS = Path(__file__).parent / "answers"
COURSE = Path(__file__).parents[2] / "docs" / "course"
BLOCKS = [
    pytest.param(words.replace("\\\n", " "), output, id=f"{page.stem} {words.strip()}")
    for page in sorted(COURSE.glob("[1-8]_*.md"))
    for words, output in re.findall(
        r"^```bash\nmegatron-llama ([^`]*)\n```\n\n```\n(.*?)^```", page.read_text("utf-8"), re.M | re.S
    )
]


@pytest.mark.parametrize(("words", "output"), BLOCKS)
def test_a_command_prints_what_the_page_shows(
    words: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # of the terminal
    command(*shlex.split(words))
    printed, shown = (
        [" ".join(line.split()) for line in text.splitlines()] for text in (capsys.readouterr().out, output)
    )
    assert {*shown} > {"…"} and {*shown} - {"…"} <= {*printed}


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_has_a_page_an_exercise_and_a_row(lesson: Lesson) -> None:
    page = (COURSE / f"{lesson.number}_{lesson.name}.md").read_text(encoding="utf-8")
    assert f"`docs/course/exercises/{lesson.file.name}`" in page
    assert f"megatron-llama course check {lesson.number}\n" in page and "## In production" in page
    assert "explorer.html#" in page
    exercise, answer = (place.read_text(encoding="utf-8") for place in (lesson.file, ANSWERS / lesson.file.name))
    # What surrounds the holes is what the learner starts from.
    position, parts = 0, re.split(rf' +raise NotImplementedError\("{HOLE}"\)\n', exercise)
    assert len(parts) > 1
    for part in parts:
        position = answer.index(part, position) + len(part)
    row = (
        rf"^\| {lesson.number} \| \[.*\]\({lesson.number}_{lesson.name}\.md\) \| .* \| {re.escape(lesson.exercise)} \|$"
    )
    assert re.search(row, (COURSE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_crashes_of_the_page_are_those_of_the_check() -> None:
    page = (COURSE / "8_failures.md").read_text(encoding="utf-8")
    assert re.findall(r"\d+ crashes", page)[0] in verdict("failures", ANSWERS / "8_failures.py")[1]
