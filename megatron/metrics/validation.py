"""The validation losses of a run, for the summary at its end."""

import json
import math
from contextlib import suppress
from pathlib import Path

from megatron.metrics.record import EvaluationRecord, IterationRecord

_KEY = "validation_loss"


class ValidationHistory:
    """A metrics writer that keeps the validation losses of this process.

    With ``metrics_jsonl``, the file of ``--metrics-jsonl``, it also reads the losses of earlier processes.
    """

    def __init__(self, metrics_jsonl: str | None) -> None:
        self._path = metrics_jsonl
        self._losses: dict[int, float] = {}

    def write_iteration(self, record: IterationRecord) -> None:
        pass

    def write_evaluation(self, record: EvaluationRecord) -> None:
        if record.split == "validation":
            self._losses[record.iteration] = record.loss

    def close(self) -> None:
        pass

    def best(self) -> tuple[int, float] | None:
        """Iteration and loss of the best evaluation so far; None without one that is finite."""
        earlier = {} if self._path is None else _read_losses(Path(self._path))
        losses = {iteration: loss for iteration, loss in (earlier | self._losses).items() if math.isfinite(loss)}
        return min(losses.items(), key=lambda item: item[1], default=None)


def _read_losses(path: Path) -> dict[int, float]:
    """Validation losses by iteration in a metrics file; empty where it cannot be read."""
    losses: dict[int, float] = {}
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if f'"{_KEY}"' in line:
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    record = json.loads(line)
                    losses[int(record["iteration"])] = float(record[_KEY])
    return losses
