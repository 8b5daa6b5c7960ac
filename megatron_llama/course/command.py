"""Checks the answer to an exercise of the course, or lists the lessons.

megatron-llama course
megatron-llama course check 1
megatron-llama course check 1 --answer my_answer.py

The exercises are in docs/course/exercises; docs/course/README.md is the first page. The answer runs in a process of its
own with a time limit. The exit code is 0 if it is right, 3 if it is not, 2 if a person must act.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from megatron.commands.tool import run_tool
from megatron.errors import ConfigError
from megatron.flags import Argument, require_positive, values_of
from megatron.urls import refuse_urls
from megatron_llama.course.lesson import LESSONS, REPOSITORY, Lesson

WRONG = 3
"""Exit code of a wrong answer."""
_IMPORT_SECONDS = 300.0
"""Seconds that the process of an answer has to import torch, also on a loaded machine."""
_MARGIN_SECONDS = 30.0
"""Seconds that it has after the time limit, to write where its threads stand and to end."""


@dataclass(frozen=True)
class CourseConfig:
    """The exercise, and the answer to it."""

    action: Annotated[Literal["list", "check"], Argument(is_positional=True)] = "list"
    """list: the lessons; check: an answer."""
    lesson: Annotated[int | None, Argument(is_positional=True)] = None
    """Number of the lesson whose exercise is checked."""
    answer: str | None = None
    """File with the answer (default: the exercise in docs/course/exercises)."""
    time_limit: float = 50.0
    """Seconds after which an answer without a result is wrong."""

    def check(self) -> None:
        refuse_urls({"--answer": self.answer}, "name a local file")
        require_positive(values_of(self, "time_limit"))

    def chosen(self) -> tuple[Lesson, Path]:
        """The lesson, and the file with its answer."""
        if self.lesson is None or not 1 <= self.lesson <= len(LESSONS):
            given = "The number of the lesson is missing"
            if self.lesson is not None:
                given = f"There is no lesson {self.lesson}"
            raise ConfigError(f"{given}: use a number from 1 to {len(LESSONS)}, which `megatron-llama course` lists.")
        lesson = LESSONS[self.lesson - 1]
        file = lesson.file if self.answer is None else Path(self.answer)
        try:
            file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8"
            remedy = f"copy the exercise {lesson.file.name} from docs/course/exercises and name the copy with --answer."
            raise ConfigError(f"The answer {file} cannot be read ({reason}): {remedy}") from error
        return lesson, file.resolve()


def course(config: CourseConfig) -> int:
    """List the lessons, or check an answer."""
    config.check()
    if config.action == "list":
        for lesson in LESSONS:
            print(f"{lesson.number}  {lesson.name:16}  {lesson.exercise}")
        pages = REPOSITORY / "docs" / "course"
        place = pages if pages.is_dir() else "docs/course of a clone (an installed package has none)"
        print(f"\nPages and exercises: {place}; to check one: megatron-llama course check 1")
        return 0
    lesson, file = config.chosen()
    is_right, sentence = checked(lesson, file, config.time_limit)
    print(f"Lesson {lesson.number}, {lesson.name}: {'right' if is_right else 'not yet'}. {sentence}")
    return 0 if is_right else WRONG


def checked(lesson: Lesson, file: Path, seconds: float) -> tuple[bool, str]:
    """Whether the answer in ``file`` is right, and the sentence about it, at most ``seconds`` after the imports."""
    with tempfile.TemporaryDirectory() as directory:
        words = map(str, (lesson.name, file, seconds, directory))
        command = [sys.executable, "-m", "megatron_llama.course", *words]
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
        child = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
        verdict, stacks = (Path(directory, name) for name in ("verdict.json", "stacks.txt"))
        limit, has_begun = time.monotonic() + _IMPORT_SECONDS, False
        try:
            while (code := child.poll()) is None and time.monotonic() < limit:
                if not has_begun and stacks.exists():  # the seconds of the answer begin
                    limit, has_begun = time.monotonic() + seconds + _MARGIN_SECONDS, True
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also the processes that the answer has started
            child.wait()
        if verdict.exists():
            is_right, sentence = json.loads(verdict.read_text(encoding="utf-8"))
            return is_right, sentence
        stack = stacks.read_text(encoding="utf-8") if stacks.exists() else ""
        if code is None or stack:
            return False, hang(stack, file, seconds)
        if code < 0:
            return False, (
                f"The process of the answer was killed by {signal.Signals(-code).name}: look for a tensor that fills "
                "the memory."
            )
        return False, f"The answer has ended the process with exit code {code}: return from its functions instead."


def hang(stack: str, file: Path, seconds: float) -> str:
    """The sentence about an answer without a result, whose threads stood at ``stack``."""
    places = re.findall(rf'File "{re.escape(str(file))}", line (\d+) in (\w+)', stack)
    stood = "it stood in {1}, line {0}".format(*places[0]) if places else "no thread of it was in its own code"
    return (
        f"No result after {seconds:g} s, {stood}: look for a loop that does not end, or for a wait for something that "
        "nothing sends."
    )


main = partial(run_tool, CourseConfig, course, __doc__)
