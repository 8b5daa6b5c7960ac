"""Counters and progress of tools/preprocess_data.py."""

import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megatron.commands.preprocess_work import EncodedBatch

_NAMED_BAD_DOCUMENTS = 10


@dataclass
class Counts:
    """What has been written so far."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    """Documents without a token, which are left out."""
    text_bytes: int = 0
    stored_bytes: int = 0
    """Bytes of the inputs read, as stored."""
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    """The first documents that were skipped, and why."""
    seconds: float = 0.0

    def add(self, other: "Counts") -> None:
        """Add what others have counted; time is not added."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.empty += other.empty
        self.text_bytes += other.text_bytes
        self.stored_bytes += other.stored_bytes
        self.num_bad += other.num_bad
        self.bad = (self.bad + other.bad)[:_NAMED_BAD_DOCUMENTS]

    @classmethod
    def of(cls, batch: EncodedBatch) -> "Counts":
        """Those of one batch."""
        tokens, empty = (sum(values) for values in zip(*((key.tokens.size, key.empty) for key in batch.keys)))
        bad = [f"{place} {reason}" for place, reason in batch.bad]
        return cls(batch.documents, tokens, empty, batch.text_bytes, batch.stored_bytes, batch.num_bad, bad)

    def to_json(self) -> dict[str, Any]:
        """As the constructor takes them."""
        return asdict(self)

    def speed(self) -> str:
        """Documents, bytes and tokens per second."""
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.documents / seconds:,.0f} documents/s, {self.text_bytes / seconds / 1e6:.2f} MB/s, "
            f"{self.tokens / seconds:,.0f} tokens/s"
        )

    def summary(self) -> str:
        """All counts and speeds in one line, and a line for each of the first bad documents."""
        line = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.empty:,} empty documents skipped"
        if not self.num_bad:
            return f"{line}; {self.speed()}"
        more = [f"  and {self.num_bad - len(self.bad):,} more"] if self.num_bad > len(self.bad) else []
        bad = [f"{self.num_bad:,} bad documents skipped:", *(f"  {reason}" for reason in self.bad), *more]
        return "\n".join([f"{line}, {self.num_bad:,} bad documents skipped; {self.speed()}", *bad])


class Progress:
    """Adds counts up and shows them: a bar on a terminal, else a line now and then."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self.counts = Counts()
        self._total = total_bytes
        self._log_interval = log_interval
        self._next_log = log_interval
        self._start = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # a thread, which would keep workers from being forked
            self._bar = tqdm(total=total_bytes or None, unit="B", unit_scale=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, counts: Counts) -> None:
        """Count what has been written."""
        self.counts.add(counts)
        self.counts.seconds = time.monotonic() - self._start
        if self._bar is not None:
            self._bar.update(counts.stored_bytes)
            self._bar.set_postfix_str(self.counts.speed())
        elif self.counts.documents >= self._next_log:
            print(self._line(), file=sys.stderr, flush=True)
            self._next_log = (self.counts.documents // self._log_interval + 1) * self._log_interval

    def _line(self) -> str:
        counts = self.counts
        left = ""
        if self._total and counts.stored_bytes:
            share = min(counts.stored_bytes / self._total, 1.0)
            seconds = round(counts.seconds * (1 - share) / share)
            left = f"; {share:.1%}, {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
        bad = f", {counts.num_bad:,} bad documents skipped" if counts.num_bad else ""
        return f"{counts.documents:,} documents, {counts.tokens:,} tokens{bad}; {counts.speed()}{left}"
