"""The lessons of the course, and what their checks share.

The module ``megatron_llama.course.NAME`` of a lesson has ``check(answer: ModuleType) -> str``: a sentence with a figure
for a right answer. It raises :class:`Wrong` for a wrong one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
HOLE = "fill this hole"
"""Text of the :class:`NotImplementedError` that stands in an exercise where the answer belongs."""


class Wrong(Exception):
    """A wrong answer, in one sentence: what the answer did, why that is wrong, and what to look at."""


@dataclass(frozen=True)
class Lesson:
    """A lesson: its page is ``docs/course/N_name.md``."""

    number: int
    name: str
    exercise: str

    @property
    def file(self) -> Path:
        """The exercise, which is the answer unless another file is named."""
        return REPOSITORY / "docs" / "course" / "exercises" / f"{self.number}_{self.name}.py"


LESSONS = tuple(
    Lesson(number, name, exercise)
    for number, (name, exercise) in enumerate(
        (
            ("memory_wall", "activation checkpointing as an autograd function"),
            ("collectives", "reduce-scatter and the ring all-reduce from messages"),
            ("zero", "the ZeRO-1 update of a rank"),
            ("tensor_parallel", "the operators f and g, and an MLP in two products"),
            ("pipelines", "a pipeline schedule as lists of actions"),
            ("context_parallel", "a split of the causal triangle, and the merge of two partial softmaxes"),
            ("experts", "the dispatch of tokens to experts, and back"),
            ("failures", "a checkpoint that no crash loses"),
        ),
        start=1,
    )
)


def require_tensor(value: object, what: str, shape: Sequence[int], dtype: "torch.dtype") -> "Tensor":
    """``value``, which must be a tensor of ``shape`` and ``dtype``; raises :class:`Wrong` about ``what``."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise Wrong(f"{what} is of type {type(value).__name__}: return a tensor.")
    if value.shape != torch.Size(shape) or value.dtype != dtype:
        found, wanted = (f"{[*size]} in {str(kind)[6:]}" for size, kind in ((value.shape, value.dtype), (shape, dtype)))
        raise Wrong(f"{what} is {found}, and not {wanted}: look at shapes and dtypes at each step.")
    if value.isnan().any():
        raise Wrong(f"{what} has NaN: memory was read before it was written, such as a message before its wait.")
    return value
