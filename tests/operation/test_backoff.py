"""The pause before a restart grows while attempts fail without progress."""

from megatron.operation.backoff import Backoff


def test_pauses() -> None:
    """None before the first restart, then doubling up to a limit; progress starts the count anew."""
    backoff = Backoff(first_s=1.0, longest_s=30.0)
    assert [backoff.pause_after_failure(False) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.pause_after_failure(True) == 0
    assert [backoff.pause_after_failure(False) for _ in range(3)] == [0, 1, 2]
