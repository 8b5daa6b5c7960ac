"""Planted mistakes in the right answers of the course: each has a sentence of its own."""

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_llama.course.__main__ import verdict

ANSWERS = Path(__file__).parent / "answers"


class Mistake(NamedTuple):
    """Text of the right answer that is replaced, and a part of the sentence about it."""

    lesson: str
    old: str
    new: str
    part: str


MISTAKES = [
    Mistake(answer.stem, *mistake)
    for answer in sorted(ANSWERS.glob("*.py"))
    for mistake in import_module(f"tests.course.mistakes_{answer.stem}").MISTAKES
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: f"{one.lesson} {one.part}")
def test_a_planted_mistake_has_its_sentence(mistake: Mistake, tmp_path: Path) -> None:
    right = (ANSWERS / f"{mistake.lesson}.py").read_text(encoding="utf-8")
    assert mistake.old in right
    wrong = tmp_path / f"{mistake.lesson}.py"
    wrong.write_text(right.replace(mistake.old, mistake.new), encoding="utf-8")
    is_right, sentence = verdict(mistake.lesson.partition("_")[2], wrong)
    of_others = [one.part for one in MISTAKES if one.lesson == mistake.lesson and one != mistake]
    assert not is_right and mistake.part in sentence, sentence
    assert not [part for part in of_others if part in sentence], sentence
    assert sentence[-1] == "." and "\n" not in sentence and ". " not in sentence


def test_every_lesson_has_ten_mistakes() -> None:
    lessons = [mistake.lesson for mistake in MISTAKES]
    assert all(lessons.count(answer.stem) >= 10 for answer in ANSWERS.glob("*.py"))
