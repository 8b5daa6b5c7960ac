"""Flags for pipeline parallelism: the schedule, and which layers each stage holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least
from megatron.config.stages import (
    PlacementShape,
    VirtualStage,
    check_that_no_rank_idles,
    chunks_of_layers,
    split_around_ends,
    split_by_layout,
    split_evenly,
)

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]


@dataclass(frozen=True)
class ScheduleTraits:
    """What the rest of a run must know of a schedule."""

    chunks: Literal["one chunk", "several chunks", "two chunks"]
    """Chunks of the model on a stage."""
    placement: PlacementShape
    """Where the chunks lie (:class:`~megatron.core.pipeline_parallel.schedule.Placement`)."""
    splits_backward: bool
    """Whether weight gradients are actions of their own."""

    @property
    def kinds(self) -> tuple[Literal["F", "B", "W"], ...]:
        """The kinds of action: forward, backward, and weight gradients where they are split off."""
        return ("F", "B", "W") if self.splits_backward else ("F", "B")

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

_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_LAYOUT = ("pipeline_model_parallel_layout",)
_GROUP_SIZE = ("microbatch_group_size_per_virtual_pipeline_stage",)

_EXCLUSIONS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (_LAYOUT, _CHUNKS + _ENDS + _ACCOUNT, "the layout says which layers each stage holds, so remove the other"),
    (_ENDS, _ACCOUNT, "they are two ways to unburden the ends of the pipeline, so keep one"),
    (_ENDS, _CHUNKS[:1], "give the number of chunks with --num-virtual-stages-per-pipeline-rank instead"),
)


@dataclass(frozen=True)
class PipelineConfig:
    """How --pipeline-model-parallel-size ranks share the layers, and in which order they work."""

    pipeline_schedule: ScheduleName | None = None
    """Order of the passes on each pipeline rank: gpipe (all forward, then all backward), 1f1b (default: one forward,
    one backward), interleaved (default with several chunks per rank: less idle time, more messages), or one whose
    weight gradients fill idle time: zb-h1, zb-v, dualpipe-v (the last two hold two chunks in a V, so that the first
    rank has both ends of the model). One rank alone has nothing to order."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Cut each pipeline rank's layers into chunks of this many, for --pipeline-schedule interleaved."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """The same by the number of chunks on each pipeline rank."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Interleaved: microbatches that a chunk works on in a row before the next chunk's turn (default, and least:
    --pipeline-model-parallel-size)."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers on the first pipeline rank, in all its chunks together; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers on the last pipeline rank, likewise."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when layers are shared out, so that the first stage has one fewer."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the head and its loss as a layer, so that the last stage has one fewer."""
    pipeline_model_parallel_layout: str | None = None
    """Which layers each stage holds, as a quoted string: E is the embedding, t a layer, L the head, | ends a stage,
    t*3 and (tt|)*3 repeat: "Et*3|(tt|)*6tL" is 3, six times 2, and 1. As many stages as pipeline ranks, or a multiple
    of them for several chunks on each."""
    overlap_p2p_communication: bool = True
    """Receive the next activation or gradient while the current one is worked on."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value, or on flags of this group together, that cannot be honoured."""
        sizes = _CHUNKS + _ENDS + _GROUP_SIZE
        require_at_least(1, {_flag(name): getattr(self, name) for name in sizes})
        for left, right, remedy in _EXCLUSIONS:
            if (ours := self._given(left)) and (others := self._given(right)):
                raise ConfigError(f"{ours[0]} and {others[0]} exclude each other: {remedy}.")
        ends = self._given(_ENDS)
        if ends and self.pipeline_schedule is not None and SCHEDULES[self.pipeline_schedule].placement == "v":
            raise ConfigError(
                f"{ends[0]} does not go with --pipeline-schedule {self.pipeline_schedule}, whose first pipeline rank "
                "holds both ends of the model: use --account-for-embedding-in-pipeline-split and "
                "--account-for-loss-in-pipeline-split, or --pipeline-model-parallel-layout."
            )

    def check_stages(self, num_layers: int, num_stages: int) -> None:
        """Raise :class:`ConfigError` where ``num_layers`` on ``num_stages`` pipeline ranks cannot be honoured."""
        pipelined = self._given(_CHUNKS + _ENDS + _ACCOUNT + _LAYOUT + _GROUP_SIZE)
        if num_stages == 1 and pipelined:
            raise ConfigError(
                f"{pipelined[0]} needs --pipeline-model-parallel-size of 2 or more: add that, or remove {pipelined[0]}."
            )
        self._check_group_size(self.schedule(num_layers, num_stages), num_stages)
        self.virtual_stages(num_layers, num_stages)

    def num_chunks(self, num_layers: int, num_stages: int) -> int:
        """Chunks of the model on each of ``num_stages`` pipeline ranks.

        Raises :class:`ConfigError` where the flags ask for a number that ``num_layers`` do not allow, or for two.
        """
        if num_stages == 1:
            return 1
        if self.pipeline_model_parallel_layout is not None:
            return len(split_by_layout(self.pipeline_model_parallel_layout, num_layers, num_stages)) // num_stages
        if self.num_layers_per_virtual_pipeline_stage is not None:
            return self._chunks_of_layers(self.num_layers_per_virtual_pipeline_stage, num_layers, num_stages)
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        needs_two = self.pipeline_schedule is not None and SCHEDULES[self.pipeline_schedule].chunks == "two chunks"
        return 2 if needs_two else 1

    def schedule(self, num_layers: int, num_stages: int) -> ScheduleName:
        """The schedule in force; raises :class:`ConfigError` where it does not run that many chunks."""
        if num_stages == 1:
            return "1f1b"  # One rank never waits for another: any other order would only hold more activations.
        chunks = self.num_chunks(num_layers, num_stages)
        name: ScheduleName = self.pipeline_schedule or ("interleaved" if chunks > 1 else "1f1b")
        if not SCHEDULES[name].allows(chunks):
            raise ConfigError(
                f"--pipeline-schedule {name} runs {SCHEDULES[name].chunks} of the model on each pipeline rank, not "
                f"{chunks}: {self._way_to_other_chunks(name)}."
            )
        return name

    def virtual_stages(self, num_layers: int, num_stages: int) -> tuple[VirtualStage, ...]:
        """What each virtual stage holds, in the order of the layers.

        Raises :class:`ConfigError` where the flags do not divide ``num_layers`` over ``num_stages`` pipeline ranks.
        """
        if num_stages == 1:
            return split_evenly(num_layers, num_stages)
        if self.pipeline_model_parallel_layout is not None:
            stages = split_by_layout(self.pipeline_model_parallel_layout, num_layers, num_stages)
            shape = SCHEDULES[self.schedule(num_layers, num_stages)].placement
            check_that_no_rank_idles(self.pipeline_model_parallel_layout, stages, num_stages, shape)
            return stages
        chunks = self.num_chunks(num_layers, num_stages)
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if first is not None or last is not None:
            return split_around_ends(num_layers, num_stages, chunks, first, last)
        return split_evenly(num_layers, num_stages, chunks, *self._account)

    @property
    def _account(self) -> tuple[bool, bool]:
        return self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split

    def _chunks_of_layers(self, layers_per_chunk: int, num_layers: int, num_stages: int) -> int:
        chunks = chunks_of_layers(num_layers, num_stages, layers_per_chunk, *self._account)
        wanted = self.num_virtual_stages_per_pipeline_rank
        if wanted is not None and wanted != chunks:
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {layers_per_chunk} makes {chunks} chunks on each pipeline "
                f"rank, but --num-virtual-stages-per-pipeline-rank is {wanted}: remove one of them."
            )
        return chunks

    def _check_group_size(self, schedule: ScheduleName, num_stages: int) -> None:
        size = self.microbatch_group_size_per_virtual_pipeline_stage
        if size is not None and schedule != "interleaved":
            raise ConfigError(
                f"{_flag(_GROUP_SIZE[0])} {size} belongs to --pipeline-schedule interleaved, but the schedule is "
                f"{schedule}: remove it, or choose that schedule, with --num-virtual-stages-per-pipeline-rank."
            )
        if size is not None and size < num_stages:
            raise ConfigError(
                f"{_flag(_GROUP_SIZE[0])} {size} is below --pipeline-model-parallel-size {num_stages}, so that the "
                f"ranks would wait for each other for ever: use {num_stages} or more."
            )

    def _way_to_other_chunks(self, name: ScheduleName) -> str:
        asked_by = self._given(_LAYOUT + _CHUNKS)
        if SCHEDULES[name].allows(1):
            return f"change {asked_by[0]}, or use --pipeline-schedule interleaved"
        if asked_by:
            return f"change {asked_by[0]}, or choose another --pipeline-schedule"
        return "add --num-virtual-stages-per-pipeline-rank 2, or more"

    def _given(self, names: tuple[str, ...]) -> list[str]:
        """The flags among ``names`` that are not left at their default."""
        return [_flag(name) for name in names if getattr(self, name) not in (None, False)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
