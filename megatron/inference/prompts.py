"""Files of prompts, and of the texts that continue them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.inference.generator import Completion

KEY = "prompt"


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file."""

    text: str
    fields: Mapping[str, Any]
    """Its JSON object, whose other fields are copied to the result."""

    def result(self, completion: Completion) -> str:
        """The line of the result."""
        new = {"text": completion.text, "tokens": completion.tokens, "finish": completion.finish}
        return json.dumps({KEY: self.text, **self.fields, **new}, ensure_ascii=False)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: one a line, or in a file named ``*.jsonl`` the field "prompt" of one object a line. Empty
    lines are left out. Raises :class:`DataError`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"--prompts {path} cannot be read ({error.strerror}): check the path.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {path} is not UTF-8 text ({error}): convert it.") from error
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise DataError(f"--prompts {path} holds no prompt: write one a line.")
    if path.suffix != ".jsonl":
        return [Prompt(line, {}) for _, line in numbered]
    return [_parse(line, f"Line {number} of {path}") for number, line in numbered]


def _parse(line: str, where: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): correct it, or name the file *.txt.") from error
    if not isinstance(fields, dict) or not isinstance(fields.get(KEY), str):
        raise DataError(f'{where} is not an object with a text under "{KEY}": add it.')
    return Prompt(fields[KEY], fields)
