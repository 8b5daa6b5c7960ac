"""Flags for pipeline parallelism: the schedule, and which layers each stage holds."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from megatron.errors import ConfigError
from megatron.flags import changed_flags, flag_of, require_at_least, require_flag, values_of
from megatron.schedules.catalog import SCHEDULES, ScheduleName
from megatron.schedules.stages import (
    VirtualStage,
    check_that_no_rank_idles,
    chunks_of_layers,
    split_around_ends,
    split_by_layout,
    split_evenly,
)

_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_LAYOUT = ("pipeline_model_parallel_layout",)
_GROUP_SIZE = "microbatch_group_size_per_virtual_pipeline_stage"

_EXCLUSIONS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (_LAYOUT, _CHUNKS + _ENDS + _ACCOUNT, "remove one of them"),
    (_ENDS, _ACCOUNT, "remove one of them"),
    (_ENDS, _CHUNKS[:1], "set the number of chunks with --num-virtual-stages-per-pipeline-rank instead"),
)
_SUMMARIES = ", ".join(f"{name} ({spec.summary})" for name, spec in SCHEDULES.items())
_SCHEDULE_HELP = f"Pipeline schedule. No effect without pipeline parallelism. Choices: {_SUMMARIES}."


@dataclass(frozen=True)
class PipelineConfig:
    """Pipeline schedule, and division of the layers among the pipeline stages."""

    # Schedule and chunks of a rank
    pipeline_schedule: Annotated[ScheduleName | None, tyro.conf.arg(help=_SCHEDULE_HELP)] = None
    """Pipeline schedule. No effect without pipeline parallelism."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per model chunk, for --pipeline-schedule interleaved."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks per pipeline rank, instead of --num-layers-per-virtual-pipeline-stage."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Interleaved: consecutive microbatches of a chunk before the next chunk (default and minimum:
    --pipeline-model-parallel-size)."""
    # Division of the layers
    decoder_first_pipeline_num_layers: int | None = None
    """Layers on the first pipeline rank, in all its chunks; the others share the remaining layers evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers on the last pipeline rank, in all its chunks; the others share the remaining layers evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer, so that the first stage has one layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as a layer, so that the last stage has one layer less."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage as a quoted string: E is the embedding, t a layer, L the output layer with the loss, | ends
    a stage, t*3 and (tt|)*3 repeat: "Et*3|(tt|)*6tL" has 3, six times 2, and 1 layers. The number of stages is the
    number of pipeline ranks, or a multiple of it for several chunks per rank."""
    # Communication
    overlap_p2p_communication: bool = True
    """Overlap receives of activations and gradients with computation."""

    def check(self) -> None:
        require_at_least(1, values_of(self, *_CHUNKS, *_ENDS, _GROUP_SIZE))
        for left, right, remedy in _EXCLUSIONS:
            if (ours := changed_flags(self, *left)) and (others := changed_flags(self, *right)):
                raise ConfigError(f"{ours[0]} and {others[0]} exclude each other: {remedy}.")
        ends = changed_flags(self, *_ENDS)
        if ends and self.pipeline_schedule is not None and SCHEDULES[self.pipeline_schedule].placement == "v":
            raise ConfigError(
                f"{ends[0]} is not supported with --pipeline-schedule {self.pipeline_schedule}, which places both ends "
                "of the model on the first pipeline rank: use --account-for-embedding-in-pipeline-split and "
                "--account-for-loss-in-pipeline-split, or --pipeline-model-parallel-layout."
            )

    def check_stages(self, num_layers: int, num_stages: int) -> None:
        pipelined = changed_flags(self, *_CHUNKS, *_ENDS, *_ACCOUNT, *_LAYOUT, _GROUP_SIZE)
        require_flag("--pipeline-model-parallel-size of 2 or more", num_stages > 1, pipelined[:1])
        schedule, size = self.schedule(num_layers, num_stages), self.microbatch_group_size_per_virtual_pipeline_stage
        if size is not None and not SCHEDULES[schedule].groups_microbatches:
            grouped = " or ".join(name for name, spec in SCHEDULES.items() if spec.groups_microbatches)
            raise ConfigError(
                f"{flag_of(_GROUP_SIZE)} {size} needs --pipeline-schedule {grouped}, but the schedule is {schedule}: "
                "remove it, or use that schedule with --num-virtual-stages-per-pipeline-rank."
            )
        if size is not None and size < num_stages:
            raise ConfigError(
                f"{flag_of(_GROUP_SIZE)} {size} is below --pipeline-model-parallel-size {num_stages}, which would "
                f"deadlock: use {num_stages} or more."
            )
        self.virtual_stages(num_layers, num_stages)

    def num_chunks(self, num_layers: int, num_stages: int) -> int:
        """Model chunks on each of ``num_stages`` pipeline ranks."""
        if num_stages == 1:
            return 1
        if self.pipeline_model_parallel_layout is not None:
            return len(split_by_layout(self.pipeline_model_parallel_layout, num_layers, num_stages)) // num_stages
        if self.num_layers_per_virtual_pipeline_stage is not None:
            layers, wanted = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
            chunks = chunks_of_layers(num_layers, num_stages, layers, *self._account)
            if wanted not in (None, chunks):
                raise ConfigError(
                    f"--num-layers-per-virtual-pipeline-stage {layers} means {chunks} chunks per pipeline rank, but "
                    f"--num-virtual-stages-per-pipeline-rank is {wanted}: remove one of them."
                )
            return chunks
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        needs_two = self.pipeline_schedule is not None and SCHEDULES[self.pipeline_schedule].chunks == "two chunks"
        return 2 if needs_two else 1

    def schedule(self, num_layers: int, num_stages: int) -> str:
        """The effective schedule; raises :class:`ConfigError` if it does not support the number of chunks."""
        if num_stages == 1:
            return "1f1b"  # One rank never waits for another: any other order would only save more activations.
        chunks = self.num_chunks(num_layers, num_stages)
        name = self.pipeline_schedule or ("interleaved" if chunks > 1 else "1f1b")
        if SCHEDULES[name].allows(chunks):
            return name
        remedy = "add --num-virtual-stages-per-pipeline-rank 2, or more"
        asked_by = changed_flags(self, *_LAYOUT, *_CHUNKS)
        if asked_by:
            use = "use --pipeline-schedule interleaved"
            remedy = (
                f"change {asked_by[0]}, or {use if SCHEDULES[name].allows(1) else 'choose another --pipeline-schedule'}"
            )
        raise ConfigError(
            f"--pipeline-schedule {name} needs {SCHEDULES[name].chunks} per pipeline rank, not {chunks}: {remedy}."
        )

    def virtual_stages(self, num_layers: int, num_stages: int) -> tuple[VirtualStage, ...]:
        """The virtual stages in the order of their layers; raises :class:`ConfigError` for an impossible division."""
        if num_stages == 1:
            return split_evenly(num_layers, num_stages)
        if self.pipeline_model_parallel_layout is not None:
            stages = split_by_layout(self.pipeline_model_parallel_layout, num_layers, num_stages)
            shape = SCHEDULES[self.schedule(num_layers, num_stages)].placement
            check_that_no_rank_idles(self.pipeline_model_parallel_layout, stages, num_stages, shape)
            return stages
        # 8 layers, 2 ranks, 2 chunks: rank 0 has virtual stages 0 and 2 (layers 0 1 and 4 5), rank 1 has 1 and 3
        chunks = self.num_chunks(num_layers, num_stages)
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if first is not None or last is not None:
            return split_around_ends(num_layers, num_stages, chunks, first, last)
        return split_evenly(num_layers, num_stages, chunks, *self._account)

    @property
    def _account(self) -> tuple[bool, bool]:
        return self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
