"""Megatron-LM's log as text: the arguments that it prints at the start, and its lines of iterations as records.

    adam_beta1 ...................................... 0.9
   [2026-11-28 10:00:00.000000] iteration       10/     100 | consumed samples: … | lm loss: 1.045678E+01 | …

Lines may have a prefix (the rank of torchrun or srun), and lines of other ranks may stand between them. The lines of
iterations of this code are the same.
"""

import ast
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.metrics.jsonl import History

_ARGUMENT = re.compile(r"(?:^|[\]:] )\s*(\w+) (\.*) (.*)")
_ARGUMENT_COLUMNS = 48
"""Letters and dots of an argument; longer names have no dots."""
_ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ *\|(.*)")
_FIELDS = {
    "consumed samples": "consumed_samples",
    "learning rate": "learning_rate",
    "global batch size": "global_batch_size",
    "lm loss": "lm_loss",
    "loss scale": "loss_scale",
    "grad norm": "grad_norm",
    "params norm": "params_norm",
    "num zeros": "num_zeros",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan_iterations",
}
"""Megatron-LM's fields, and their keys in a file of ``--metrics-jsonl``."""
_COUNTS = ("consumed_samples", "global_batch_size", "num_zeros", "skipped", "nan_iterations")
_LONGEST_VALUE = 2000  # characters of an argument that is read as a value of Python
_OUR_FIELD = "tokens/s per GPU:"


@dataclass(frozen=True)
class Log:
    """What a log says."""

    arguments: dict[str, Any]
    """The arguments by name, as values of Python; the text of what is none, such as ``torch.bfloat16``."""
    history: History
    is_ours: bool
    """Whether this code wrote the lines of iterations."""


def read_log(path: Path) -> Log:
    """The arguments and iterations in a log. Raises :class:`DataError` for a file that has none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            log = parse_log(lines)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the path.") from error
    if not log.arguments and not log.history.iterations:
        raise DataError(
            f"{path} is a log of an unknown form: give one with Megatron-LM's lines of iterations or arguments, a file "
            "of --metrics-jsonl, or the directory of a run, of checkpoints or of a model."
        )
    return log


def parse_log(lines: Iterable[str]) -> Log:
    """The arguments and iterations in the ``lines``; of an argument that is printed twice, the last one counts."""
    arguments: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    is_ours = False
    for line in lines:
        if (found := _ITERATION.search(line)) is not None:
            records.append({"iteration": int(found[1]), **_fields(found[2])})
            is_ours = is_ours or _OUR_FIELD in line
        elif (found := _ARGUMENT.search(line)) is not None and len(found[1] + found[2]) >= _ARGUMENT_COLUMNS:
            arguments[found[1]] = _value(found[3].strip())
    return Log(arguments, History(records, (), None), is_ours)


def _fields(text: str) -> dict[str, Any]:
    """The numbers of a line of an iteration. As in a metrics file, a loss that is missing or not finite is None."""
    record: dict[str, Any] = {"lm_loss": None}
    for field in text.split("|"):
        name, _, word = field.rpartition(":")
        key = _FIELDS.get(name.strip())
        try:
            value = float(word)
        except ValueError:
            continue  # text of another rank
        if key is not None:
            finite = value if math.isfinite(value) else None
            record[key] = int(value) if key in _COUNTS and finite is not None else finite
    return record


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text) if len(text) <= _LONGEST_VALUE else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
