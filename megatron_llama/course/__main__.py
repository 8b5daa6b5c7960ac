"""The process that checks an answer: ``python -m megatron_llama.course NAME ANSWER SECONDS DIRECTORY``.

It writes its verdict to ``DIRECTORY/verdict.json``, or after ``SECONDS`` where its threads stand to
``DIRECTORY/stacks.txt``, and ends.
"""

import faulthandler
import importlib.util
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from megatron.commands.tool import exit_at_once
from megatron_llama.course.lesson import HOLE, Wrong


def load(file: Path) -> ModuleType:
    """Execute the answer, whose name is not that of a module."""
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location("answer", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def sentence_of(error: BaseException, file: Path) -> str:
    """What is wrong with an answer that ended with ``error``."""
    name, text = type(error).__name__, str(error).strip().partition("\n")[0][:300].rstrip(".")
    if isinstance(error, Wrong):
        return str(error)
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file.name}, line {error.lineno}, is not Python ({error.msg}): correct the line."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, AttributeError) and getattr(error.obj, "__file__", None) == str(file):
        return f"{file.name} has no {error.name}: keep the names of the exercise."
    if not frames:
        return (
            f"The check cannot use what the answer gave it ({name}: {text}): compare the types of the results with the "
            "signatures of the exercise."
        )
    place = f"{file.name}, line {frames[-1].lineno}, in {frames[-1].name}"
    if isinstance(error, NotImplementedError) and text == HOLE:
        return f"{place}: the hole is not filled yet."
    return f"{place}: {name}{f': {text}' if text else ''}."


def verdict(name: str, file: Path) -> tuple[bool, str]:
    """Whether the answer in ``file`` to the lesson ``name`` is right, and the sentence about it."""
    check = import_module(f"megatron_llama.course.{name}").check
    try:
        return True, check(load(file))
    except BaseException as error:  # also SystemExit, which an answer may raise
        return False, sentence_of(error, file)


def main() -> None:
    name, answer, seconds, directory = sys.argv[1:]
    place = Path(directory)
    import_module(f"megatron_llama.course.{name}")  # the seconds are those of the answer
    with (place / "stacks.txt").open("w") as stacks:
        faulthandler.dump_traceback_later(float(seconds), file=stacks, exit=True)
        found = verdict(name, Path(answer))
        faulthandler.cancel_dump_traceback_later()
    (place / "verdict.json").write_text(json.dumps(found), encoding="utf-8")
    exit_at_once(0)  # a thread of the answer that still waits would keep the process alive


if __name__ == "__main__":
    main()
