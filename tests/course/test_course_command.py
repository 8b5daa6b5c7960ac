"""``megatron-llama course check``: what an answer does to its process is a sentence, in bounded time."""

import time
from pathlib import Path

import pytest

from megatron_llama.course.command import main
from megatron_llama.course.lesson import LESSONS, REPOSITORY
from tests.messages import assert_helpful

ANSWERS = Path(__file__).parent / "answers"
RING = "2_collectives.py"
pytestmark = pytest.mark.processes


def check(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code, and what the command prints."""
    code = main(["check", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out + said.err


def changed(tmp_path: Path, line: str, place: str = "    rank, size = ") -> Path:
    """The right answer of lesson 2 with ``line`` before the last ``place``."""
    before, _, after = (ANSWERS / RING).read_text(encoding="utf-8").rpartition(place)
    (tmp_path / "mine.py").write_text(f"{before}{line}\n{place}{after}", encoding="utf-8")
    return tmp_path / "mine.py"


def number_of(line: str, file: Path) -> int:
    return file.read_text(encoding="utf-8").splitlines().index(line) + 1


@pytest.mark.parametrize("answer", sorted(ANSWERS.glob("*.py")), ids=lambda path: path.stem)
def test_the_right_answer_is_right(answer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number, _, name = answer.stem.partition("_")
    code, said = check(capsys, number, "--answer", answer)
    assert code == 0 and said.startswith(f"Lesson {number}, {name}: right. "), said


def test_a_hole_that_is_not_filled_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, 2)
    assert code == 3 and said.startswith(f"Lesson 2, collectives: not yet. {RING}, line "), said
    assert said.endswith(", in reduce_scatter: the hole is not filled yet.\n")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("    raise KeyError(7)", "mine.py, line {line}, in reduce_scatter: KeyError: 7."),
        ("    raise OSError('No.')", "mine.py, line {line}, in reduce_scatter: OSError: No."),
        ("    if (:", "mine.py, line {line}, is not Python (invalid syntax): correct the line."),
        ("    raise SystemExit(0)", "mine.py, line {line}, in reduce_scatter: SystemExit: 0."),
        ("    import os; os._exit(0)", "The answer has ended the process with exit code 0: return from its functions"),
        ("    import os; os.kill(os.getpid(), 9)", "The process of the answer was killed by SIGKILL: look for "),
        ("    return 'twelve'", "The result of reduce_scatter on rank 0 of 4 is of type str: return a tensor."),
        (
            "    return vector[0]",
            "The result of reduce_scatter on rank 0 of 4 is [] in float64, and not [3] in float64",
        ),
    ],
)
def test_what_an_answer_does_is_a_sentence(
    line: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = changed(tmp_path, line)
    code, said = check(capsys, 2, "--answer", answer)
    sentence = sentence.format(line=number_of(line, answer))
    assert code == 3 and said.startswith(f"Lesson 2, collectives: not yet. {sentence}") and ".." not in said, said


def test_a_function_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = changed(tmp_path, "del reduce_scatter\n\n\n", "def all_reduce")
    code, said = check(capsys, 2, "--answer", answer)
    assert code == 3 and said.endswith("not yet. mine.py has no reduce_scatter: keep the names of the exercise.\n"), (
        said
    )


@pytest.mark.parametrize("line", ["    while True: pass", "    import threading; threading.Event().wait()"])
def test_an_answer_that_hangs_ends_with_the_line_where_it_stood(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = changed(tmp_path, line)
    started = time.monotonic()
    code, said = check(capsys, 2, "--answer", answer, "--time-limit", 4)
    assert time.monotonic() - started < 240
    place = f"it stood in reduce_scatter, line {number_of(line, answer)}"
    assert code == 3 and f"No result after 4 s, {place}: look for a loop" in said, said


def test_an_answer_that_stops_its_process_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_llama.course.command._MARGIN_SECONDS", 1.0)
    answer = changed(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n", "from torch import Tensor")
    started = time.monotonic()
    code, said = check(capsys, 2, "--answer", answer, "--time-limit", 1)
    assert time.monotonic() - started < 240
    assert code == 3 and "No result after 1 s, no thread of it was in its own code" in said, said


def test_a_thread_or_a_process_that_is_left_behind_does_not_delay_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "import subprocess, threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    answer = changed(tmp_path, f"{lines}subprocess.Popen(['sleep', '999'])\n", "from torch import Tensor")
    started = time.monotonic()
    assert check(capsys, 2, "--answer", answer)[0] == 0
    assert time.monotonic() - started < 240


@pytest.mark.parametrize(
    ("words", "sentence", "named"),
    [
        ("", "ERROR: The number of the lesson is missing", "1, 8"),
        ("9", "ERROR: There is no lesson 9", "9, 1, 8"),
        ("2 --answer no_such.py", "ERROR: The answer no_such.py cannot be read (No such file or", "--answer"),
        ("2 --answer {tmp}", "ERROR: The answer {tmp} cannot be read (Is a directory)", "--answer"),
        ("2 --time-limit 0", "ERROR: --time-limit 0", "--time-limit 0"),
    ],
)
def test_what_a_person_must_correct(
    words: str, sentence: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(capsys, *words.format(tmp=tmp_path).split())
    assert code == 2 and said.startswith(sentence.format(tmp=tmp_path)), said
    assert_helpful(said.strip(), named)


@pytest.mark.parametrize(("root", "place"), [(REPOSITORY, f"{REPOSITORY}/docs/course;"), (Path("/"), "of a clone")])
def test_the_list_names_every_lesson_and_where_the_pages_are(
    root: Path, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_llama.course.command.REPOSITORY", root)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"{lesson.number}  {lesson.name} " in said for lesson in LESSONS)
    assert "Pages and exercises: " in said and place in said
