"""The right answers to exercises 5 to 8 are right, every planted mistake has a sentence of its own, and the pages show
what is printed."""

import re
import shlex
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from megatron_llama.commands import command
from megatron_llama.course.lesson import Wrong

ANSWERS = Path(__file__).parent / "answers"
PAGES = Path(__file__).parents[2] / "docs" / "course"
EXERCISES = PAGES / "exercises"
BLOCK = re.compile(r"^```bash\nmegatron-llama (.*?)\n```\n\n```\n(.*?)^```", re.MULTILINE | re.DOTALL)
LESSONS = ("5_pipelines", "6_context_parallel", "7_experts", "8_failures")
MISTAKES = [
    (lesson, *mistake) for lesson in LESSONS for mistake in import_module(f"tests.course.mistakes_{lesson}").MISTAKES
]


def sentence(lesson: str, text: str) -> str:
    """What the check of the lesson says about the answer ``text``."""
    module = ModuleType("answer")
    exec(compile(text, f"{lesson}.py", "exec", dont_inherit=True), vars(module))
    check = import_module(f"megatron_llama.course.{lesson[2:]}").check
    return str(check(module))


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_answer_is_right_and_fills_the_hole_of_the_exercise(lesson: str) -> None:
    text, exercise = ((place / f"{lesson}.py").read_text() for place in (ANSWERS, EXERCISES))
    assert sentence(lesson, text)
    with pytest.raises(NotImplementedError, match="fill this hole"):
        sentence(lesson, exercise)
    # What surrounds the holes is what the learner starts from.
    position = 0
    for part in exercise.split('    raise NotImplementedError("fill this hole")\n'):
        position = text.index(part, position) + len(part)


@pytest.mark.parametrize(("lesson", "right", "wrong", "words"), MISTAKES)
def test_a_mistake_is_explained(lesson: str, right: str, wrong: str, words: str) -> None:
    text = (ANSWERS / f"{lesson}.py").read_text()
    assert text.count(right) == 1
    with pytest.raises(Wrong, match=re.escape(words)) as caught:
        sentence(lesson, text.replace(right, wrong))
    said = str(caught.value)
    assert said.endswith(".") and "\n" not in said
    others = {other for number, _, _, other in MISTAKES if number == lesson and other != words}
    assert not [other for other in others if other in said]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_page_shows_what_its_commands_print(lesson: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (PAGES / f"{lesson}.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    for words, output in blocks:
        command(*shlex.split(words))
        printed = capsys.readouterr().out.splitlines()
        assert not [line for line in output.splitlines() if line != "…" and line not in printed]
    assert blocks
    crashes = re.findall(r"\d+ crashes", page)
    assert not crashes or crashes[0] in sentence(lesson, (ANSWERS / f"{lesson}.py").read_text())
