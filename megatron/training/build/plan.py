"""The plan of a run: data stages, batches, iterations, and the schedules that follow from them."""

import dataclasses
from dataclasses import dataclass

from megatron.checkpoint.schema import DataStage
from megatron.config.run import RunConfig
from megatron.config.training import LearningRateConfig
from megatron.core.control import run_on_all_ranks, run_on_rank0
from megatron.core.hyperparameters import LearningRateSchedule, build_learning_rate_schedule
from megatron.data.data_record import DataRecord, build_record, record_corpus
from megatron.data.dataset_builder import read_sources
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import ConfigError
from megatron.training.batch_schedule import BatchSchedule, build_batches
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.checkpoints.saved_run import (
    Progress,
    ResolvedStages,
    SavedRun,
    Start,
    earlier_lengths,
    first_stage,
    resolve_data_stages,
)
from megatron.training.context import RunContext


@dataclass(frozen=True)
class RunPlan:
    """The data stages, batches and length of a run."""

    progress: Progress
    """The progress at the start of this process."""
    stages: ResolvedStages
    batches: BatchSchedule
    train_iters: int
    """Iterations of the whole run, including those of earlier processes."""
    begins_stage: bool = False
    """Whether the run was resumed, and a data stage begins now."""

    @property
    def stage(self) -> DataStage:
        return self.stages.current

    @property
    def planned_samples(self) -> int:
        """Samples of the whole run with the batch sizes of the flags in the current stage."""
        iterations = max(self.train_iters - self.stage.first_iteration, 0)
        return self.batches.total_samples(iterations, self.stage.first_sample)


def plan_run(context: RunContext, vocabulary: Vocabulary, start: Start) -> RunPlan:
    """The plan of a run that starts from ``start``; a collective."""
    config, progress = context.config, start.progress
    stages = find_data_stages(context, vocabulary, start.resumed)
    batches = build_batches(config, context.topology.grid.dp, progress.consumed_samples, earlier_lengths(stages.stages))
    train_iters = config.training.train_iters
    if not has_length(config):
        train_iters = progress.iteration  # --skip-train
    elif train_iters is None:
        assert config.training.train_samples is not None
        remaining = batches.iterations_for_samples(config.training.train_samples, progress.consumed_samples)
        train_iters = progress.iteration + remaining
    profiled = config.logging.profile_pipeline_iteration
    if config.logging.profile_pipeline is not None and not progress.iteration < profiled <= train_iters:
        raise ConfigError(
            f"--profile-pipeline-iteration {profiled} is not one of the iterations {progress.iteration + 1} to "
            f"{train_iters} of this run: choose one of them, or remove --profile-pipeline."
        )
    begins_stage = start.resumed is not None and progress.iteration == stages.current.first_iteration > 0
    return RunPlan(progress, stages, batches, train_iters, begins_stage)


def find_data_stages(context: RunContext, vocabulary: Vocabulary, saved: SavedRun | None) -> ResolvedStages:
    """The data stages of the run, from the flags and the checkpoint that it resumes from, if any.

    Raises :class:`CheckpointError` if the data of the flags differ from the data of the checkpoint.
    """
    config, name = context.config, context.config.data.new_data_stage
    if config.validation.skip_train:
        return first_stage(None, {"sequence_length": config.seq_length})
    now = record_data(context, vocabulary)
    stages = () if saved is None else saved.data_stages(config.seq_length)
    if saved is None or not stages:
        return first_stage(name, now)
    where = f"the checkpoint of iteration {saved.iteration} under {saved.root}"
    return resolve_data_stages(stages, name, now, saved.progress.iteration, saved.progress.consumed_samples, where)


def record_data(context: RunContext, vocabulary: Vocabulary) -> DataRecord:
    """The record of the data of the flags; a collective, in which each rank reads its share of the corpora."""
    config, control, data = context.config, context.control, context.config.data
    sources = run_on_all_ranks(control, lambda: read_sources(data))
    splits = [0, *((1, 2) if evaluates(config) else ())]
    prefixes = sources.prefixes(splits)

    # One corpus after the other, so that few files are open.
    share = run_on_all_ranks(
        control,
        lambda: {
            prefix: record_corpus(IndexedDataset(prefix, data.mmap_bin_files, data.index_cache_path))
            for prefix in prefixes[control.rank :: control.size]
        },
    )
    recorded = {prefix: corpus for one in control.all_gather_object(share) for prefix, corpus in one.items()}
    return run_on_rank0(
        control,
        lambda: build_record(
            data,
            config.tokenizer,
            sources,
            {prefix: recorded[prefix] for prefix in prefixes},
            used_splits=splits,
            seed=config.training.seed,
            vocabulary_size=vocabulary.size,
            end_of_document=vocabulary.end_of_document,
            micro_batch_size=config.micro_batch_size,
            data_parallel_size=context.topology.grid.dp,
        ),
    )


def has_length(config: RunConfig) -> bool:
    """Whether the length of the run is given; ``--skip-train`` does not need it."""
    return config.training.train_iters is not None or config.training.train_samples is not None


def evaluates(config: RunConfig) -> bool:
    validation = config.validation
    reads = validation.full_validation or validation.eval_iters > 0
    return validation.skip_train or (validation.eval_interval is not None and reads)


def build_learning_rate(config: RunConfig, plan: RunPlan) -> LearningRateSchedule:
    """The learning-rate schedule; under ``--skip-train`` it is unused."""
    rates = config.learning_rate if has_length(config) else LearningRateConfig(lr=0.0)
    return build_learning_rate_schedule(
        rates if rates.lr is not None else dataclasses.replace(rates, lr=0.0),
        train_iters=None if config.training.train_samples is not None else plan.train_iters,
        train_samples=config.training.train_samples,
        planned_samples=plan.planned_samples,
        global_batch_size=plan.batches.final_batch_size,
    )
