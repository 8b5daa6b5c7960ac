"""Stand-ins for apex, Transformer Engine and FlashAttention 3."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parents[1] / "stand_ins"


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They can be imported, and nothing else of these names."""
    names = {path.stem for path in STAND_INS.iterdir()}

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in names]

    before = {name: sys.modules.pop(name) for name in imported()}
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    for name in imported():
        del sys.modules[name]
    sys.modules.update(before)
