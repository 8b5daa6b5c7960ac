"""Flags for pipeline parallelism: the schedule, and which layers each stage holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
PlacementShape = Literal["loop", "v"]


@dataclass(frozen=True)
class ScheduleTraits:
    """What the rest of a run must know of a schedule."""

    chunks: Literal["one chunk", "several chunks", "two chunks"]
    """Chunks of the model on a stage."""
    placement: PlacementShape
    """Where the chunks lie (:class:`~megatron.core.pipeline_parallel.schedule.Placement`)."""
    splits_backward: bool
    """Whether weight gradients are actions of their own."""

    def settle_chunks(self, wanted: int | None) -> int:
        """The number of chunks that is meant when ``wanted`` are asked for."""
        if wanted is not None:
            return wanted
        return 1 if self.chunks == "one chunk" else 2

    def allows(self, chunks: int) -> bool:
        """Whether the schedule runs that many chunks."""
        return {"one chunk": chunks == 1, "several chunks": chunks > 1, "two chunks": chunks == 2}[self.chunks]


SCHEDULES: Mapping[ScheduleName, ScheduleTraits] = {
    "gpipe": ScheduleTraits("one chunk", "loop", splits_backward=False),
    "1f1b": ScheduleTraits("one chunk", "loop", splits_backward=False),
    "interleaved": ScheduleTraits("several chunks", "loop", splits_backward=False),
    "zb-h1": ScheduleTraits("one chunk", "loop", splits_backward=True),
    "zb-v": ScheduleTraits("two chunks", "v", splits_backward=True),
    "dualpipe-v": ScheduleTraits("two chunks", "v", splits_backward=True),
}
