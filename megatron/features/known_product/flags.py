"""The flag for the known product."""

from dataclasses import dataclass

from megatron.flags import require_at_least, values_of


@dataclass(frozen=True)
class KnownProductFlags:
    """The known product."""

    known_answer_interval_s: float = 3600.0
    """Seconds between two tests in which each rank computes a matrix product whose bits are known; the first is before
    the first iteration. 0 disables them."""

    def check(self) -> None:
        require_at_least(0, values_of(self, "known_answer_interval_s"))
