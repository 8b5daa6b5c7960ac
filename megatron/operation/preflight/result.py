"""The result of a check."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What a result means for the run."""

    OK = "ok"
    WARNING = "warning"
    """The run can start, but something is not as it should be."""
    FAILURE = "failure"
    """The run must not start before somebody has acted."""


@dataclass(frozen=True)
class Result:
    """What a check found, in words for people."""

    check: str
    verdict: Verdict
    value: str
    """What was measured."""
    limit: str = ""
    """What is allowed."""
    remedy: str = ""
    """What to do; empty if the verdict is ok."""
    rank: int | None = None
    """None if the result is about all ranks."""
    host: str = ""
    """The host of the rank; empty if the result is about all ranks."""
    cause: str = ""
    """The cause class (megatron/operation/causes.py) if the node is at fault; empty if something else may be."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Result":
        return cls(**{**record, "verdict": Verdict(record["verdict"])})

    @property
    def place(self) -> str:
        """Where, for people."""
        parts = [self.host] if self.host else []
        return ", ".join([*parts, f"rank {self.rank}"] if self.rank is not None else parts) or "all ranks"

    def sentence(self) -> str:
        """The result in one sentence."""
        limit = f" (limit: {self.limit})" if self.limit else ""
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{self.check}, {self.place}: {self.value}{limit}{remedy}"


def failed_hosts(results: Iterable[Result]) -> list[str]:
    """The hosts with a failure, each once."""
    return list(dict.fromkeys(one.host for one in results if one.verdict is Verdict.FAILURE and one.host))


def worst(results: Iterable[Result]) -> Verdict:
    """The most severe verdict."""
    order = list(Verdict)
    return max((one.verdict for one in results), key=order.index, default=Verdict.OK)


def table(results: Sequence[Result]) -> list[str]:
    """Lines for people: a row for each result, with the remedy below it."""
    if not results:
        return []
    rows = [("check", "verdict", "where", "measured", "limit")]
    rows += [(one.check, one.verdict.value, one.place, one.value, one.limit) for one in results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for number in range(len(results), 0, -1):
        if results[number - 1].remedy:
            lines.insert(number + 1, f"  -> {results[number - 1].remedy}")
    return lines
