"""The data of a run: the number of samples of each split, and loaders that start at the run's progress."""

from collections.abc import Iterator
from functools import partial

from megatron.checkpoint.schema import DataStage
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.core.context_parallel.split import ContextSplit
from megatron.core.control import ControlGroup
from megatron.core.run_on_ranks import run_on_all_ranks
from megatron.data.corpus_check import BlockComparison, Digests, Share, check_indexes
from megatron.data.gpt_dataset import Dataset, epochs_of
from megatron.data.loader import Microbatch, build_datasets, build_loader
from megatron.data.loader_processes import Patience
from megatron.data.sources import Sources, read_sources
from megatron.data.tokenizers import describe_tokenizer
from megatron.errors import ConfigError
from megatron.training.build.plan import RunPlan, evaluates, used_prefixes
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.context import RunContext
from megatron.training.loop.batch_schedule import BatchSchedule
from megatron.training.loop.data import Data, Lookahead
from megatron.training.loop.data_check import DataCheck, consumed_ranges, describe_iteration, name_those_without_digests


def build_data(context: RunContext, vocabulary: Vocabulary, plan: RunPlan) -> Data:
    """Datasets (rank 0 builds cached orders first) and loaders that start at the progress of ``plan``."""
    config, topology = context.config, context.topology
    progress, stage, batches = plan.progress, plan.stage, plan.batches
    sources = run_on_all_ranks(topology.control, lambda: read_sources(config.data))
    counts = sample_counts(config, plan, sources)
    digests = run_on_all_ranks(topology.control, lambda: _check_indexes(config.data, sources, counts, topology.control))
    name_those_without_digests(digests, context.log_rank0)
    described = describe_tokenizer(config.tokenizer) if config.tokenizer.tokenizer_type is not None else None
    train, validation, test = run_on_all_ranks(
        topology.control,
        lambda: build_datasets(
            config.data,
            vocab_size=vocabulary.size,
            eod=vocabulary.end_of_document,
            seed=config.training.seed,
            sample_counts=counts,
            tokenizer_description=described,
            inspect=topology.control.rank == 0,
        ),
        first=True,
    )
    evaluated = _evaluations(config, stage, progress.iteration) * _samples_per_evaluation(config, batches)
    assert train is not None
    consumed = progress.consumed_samples - stage.first_sample
    loader = partial(_loader, context, vocabulary)
    return Data(
        train=Lookahead(loader(train, consumed)),
        validation=None if validation is None else loader(validation, evaluated),
        test=None if test is None else loader(test, 0),
        train_epochs=epochs_of(train),
        check=DataCheck(
            BlockComparison(digests, Share(topology.control.rank, topology.control.size)),
            consumed_ranges(config, topology.grid.dp, (train, validation, test), (consumed, evaluated, 0), counts),
            config.data.data_verification_rate * 1e6,
            topology.control,
            partial(describe_iteration, batches, progress.iteration, progress.consumed_samples, stage.first_sample),
        ),
    )


def _check_indexes(data: DataConfig, sources: Sources, counts: tuple[int, int, int], control: ControlGroup) -> Digests:
    """Compare this rank's share of the indexes that the run needs with their digests."""
    prefixes = used_prefixes(sources, [index for index, count in enumerate(counts) if count and sources.has(index)])
    share = Share(control.rank, control.size)
    return check_indexes(prefixes, data.index_cache_path, share, data.num_dataset_builder_threads)


def sample_counts(config: RunConfig, plan: RunPlan, sources: Sources) -> tuple[int, int, int]:
    """Samples that the run reads of each split from the beginning of the stage, as in Megatron-LM."""
    stage, progress, batches = plan.stage, plan.progress, plan.batches
    remaining = plan.train_iters - progress.iteration
    end = config.training.train_samples or batches.total_samples(max(remaining, 0), progress.consumed_samples)
    train = max(end - stage.first_sample, 0)
    if not evaluates(config):
        return train, 0, 0
    if not sources.has(1) and sources.split is None:
        raise ConfigError(
            "Evaluation needs validation data: set --valid-data-path to their corpora, or remove --eval-interval."
        )
    if not sources.has(1):
        raise ConfigError(
            f"Evaluation needs a validation split, but it is empty in --split {sources.split!r}: raise its second "
            "weight, or remove --eval-interval."
        )
    per_evaluation = _samples_per_evaluation(config, batches)
    evaluations = _evaluations(config, stage, plan.train_iters) + 1
    return train, evaluations * per_evaluation, per_evaluation if sources.has(2) else 0


def _evaluations(config: RunConfig, stage: DataStage, iteration: int) -> int:
    """Evaluations from the beginning of ``stage`` up to ``iteration``."""
    interval = config.validation.eval_interval
    return iteration // interval - stage.first_iteration // interval if interval else 0


def _samples_per_evaluation(config: RunConfig, batches: BatchSchedule) -> int:
    return config.validation.eval_iters * (config.validation.eval_global_batch_size or batches.final_batch_size)


def _loader(context: RunContext, vocabulary: Vocabulary, dataset: Dataset, consumed: int) -> Iterator[Microbatch]:
    config, topology = context.config, context.topology
    split = ContextSplit(topology.context_parallel.rank, topology.context_parallel.size)
    return build_loader(
        dataset,
        vocab_size=vocabulary.size,
        consumed_samples=consumed,
        micro_batch_size=config.micro_batch_size,
        data_parallel_rank=topology.data_parallel.rank,
        data_parallel_size=topology.grid.dp,
        num_workers=config.data.num_workers,
        dataloader_type=config.data.dataloader_type,
        pin_memory=topology.device.type != "cpu",
        positions=split.positions(config.seq_length).numpy() if split.size > 1 else None,
        patience=Patience(config.dataloader_timeout, lambda: context.signals.received),
    )
