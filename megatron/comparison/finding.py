"""What a comparison finds: differences, by the part of two runs in which they are, and what could not be compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["flags", "versions", "environment", "kernels", "data", "weights", "curves", "operations"]


@dataclass(frozen=True)
class Difference:
    """One difference between the sides A and B."""

    part: Part
    what: str
    """A flag such as ``--rotary-base``, a package, a parameter, ``tokens``, an operation."""
    a: str
    b: str
    """The two values, as text."""
    remark: str = ""
    """Where and how large it is, as a phrase."""
    changes_loss: bool = True
    """Whether it can change the loss by more than rounding."""


@dataclass(frozen=True)
class Comparison:
    """The result for one part."""

    part: Part
    compared: str
    """What was compared, as a sentence; or what could not be."""
    differences: tuple[Difference, ...] = ()
    is_complete: bool = True
    """Whether the part could be compared as a whole."""
    figures: Mapping[str, Any] | None = None
    """Further values for the JSON and the page, such as the curves."""


@dataclass(frozen=True)
class Verdict:
    """Why two sides differ."""

    kind: Literal["equal", "rounding", "cause", "unclear"]
    sentence: str
    causes: tuple[Difference, ...] = ()
    """With these removed on one side, both are equal; or the operation that differs."""
    others: tuple[Difference, ...] = ()
    """They differ, and do not explain."""
    parts: tuple[Comparison, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: equal, or explained by rounding; 3: a cause is named; 2: a person must act."""
        return {"equal": 0, "rounding": 0, "cause": 3, "unclear": 2}[self.kind]
