"""The data of a run: vocabulary, how many samples each split needs, and loaders that start where the run stands."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from megatron.config.errors import ConfigError
from megatron.config.run import RunConfig
from megatron.core.context_parallel.split import ContextSplit
from megatron.core.topology import Topology
from megatron.data.gpt_dataset import Dataset
from megatron.data.loader import Microbatch, build_datasets, build_loader
from megatron.data.sources import Sources, read_sources
from megatron.data.tokenizers import build_tokenizer, describe_tokenizer
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.launch import together
from megatron.training.state import Progress


@dataclass(frozen=True)
class Vocabulary:
    """What data and model need to know of the tokenizer."""

    size: int
    end_of_document: int


def load_vocabulary(config: RunConfig) -> Vocabulary:
    """The tokenizer's vocabulary; without a tokenizer (mock data) ``--vocab-size`` ids, the last ending a document."""
    if config.tokenizer.tokenizer_type is None:
        assert config.tokenizer.vocab_size is not None
        return Vocabulary(config.tokenizer.vocab_size, config.tokenizer.vocab_size - 1)
    tokenizer = build_tokenizer(config.tokenizer)
    return Vocabulary(tokenizer.vocab_size, tokenizer.eod)


@dataclass(frozen=True)
class Data:
    """Endless microbatches of this rank, by split; None where a split is not used."""

    train: Iterator[Microbatch]
    validation: Iterator[Microbatch] | None
    test: Iterator[Microbatch] | None

    def close(self) -> None:
        """End the loaders' worker processes."""
        for source in (self.train, self.validation, self.test):
            if isinstance(source, Generator):
                source.close()


def build_data(
    config: RunConfig,
    topology: Topology,
    vocabulary: Vocabulary,
    batches: BatchSchedule,
    train_iters: int,
    progress: Progress,
) -> Data:
    """Datasets (rank 0 builds cached orders first) and loaders that start where the run stands."""
    sources = together(topology.world, lambda: read_sources(config.data))
    counts = sample_counts(config, batches, train_iters, progress, sources)
    described = describe_tokenizer(config.tokenizer) if config.tokenizer.tokenizer_type is not None else None
    train, validation, test = together(
        topology.world,
        lambda: build_datasets(
            config.data,
            vocab_size=vocabulary.size,
            eod=vocabulary.end_of_document,
            seed=config.training.seed,
            sample_counts=counts,
            tokenizer_description=described,
            inspect=topology.world.rank == 0,
        ),
        first=True,
    )
    interval = config.validation.eval_interval
    evaluations = progress.iteration // interval if interval else 0
    evaluated = evaluations * _samples_per_evaluation(config, batches)

    def loader(dataset: Dataset | None, consumed: int) -> Iterator[Microbatch] | None:
        return None if dataset is None else _loader(config, topology, vocabulary, dataset, consumed)

    assert train is not None
    return Data(
        train=_loader(config, topology, vocabulary, train, progress.consumed_samples),
        validation=loader(validation, evaluated),
        test=loader(test, 0),
    )


def sample_counts(
    config: RunConfig, batches: BatchSchedule, train_iters: int, progress: Progress, sources: Sources
) -> tuple[int, int, int]:
    """Samples that the run will ask of each split, as in Megatron-LM; a split without data is not used."""
    remaining = train_iters - progress.iteration
    train = config.training.train_samples or batches.total_samples(max(remaining, 0), progress.consumed_samples)
    interval, per_evaluation = config.validation.eval_interval, _samples_per_evaluation(config, batches)
    if config.validation.skip_train or (interval is not None and config.validation.eval_iters > 0):
        if not sources.has(1):
            raise ConfigError(_no_validation_data(sources))
        evaluations = train_iters // interval + 1 if interval else 1
        return train, evaluations * per_evaluation, per_evaluation if sources.has(2) else 0
    return train, 0, 0


def _no_validation_data(sources: Sources) -> str:
    if sources.split is None:
        return "Evaluation needs data of its own: give it with --valid-data-path, or drop --eval-interval."
    return (
        f"Evaluation needs a validation split, but --split {sources.split!r} gives it nothing: raise its second "
        "weight, or drop --eval-interval."
    )


def _samples_per_evaluation(config: RunConfig, batches: BatchSchedule) -> int:
    return config.validation.eval_iters * (config.validation.eval_global_batch_size or batches.final_batch_size)


def _loader(
    config: RunConfig, topology: Topology, vocabulary: Vocabulary, dataset: Dataset, consumed: int
) -> Iterator[Microbatch]:
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
    )
