"""The data of a run: the number of samples of each split, and loaders that start at the run's progress."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from megatron.checkpoint.schema import DataStage
from megatron.config.data import DataConfig
from megatron.config.inference import EvaluateConfig
from megatron.config.run import RunConfig
from megatron.config.training import ValidationConfig
from megatron.core.context_parallel import ContextSplit
from megatron.core.control import run_on_all_ranks
from megatron.data.corpus_digests import BlockComparison, SampleRange, Share, check_indexes
from megatron.data.data_module import (
    BuildLoader,
    DataContext,
    SampleStream,
    SavedLoader,
    load_function,
    open_stream,
)
from megatron.data.dataset_builder import RunFacts, Sources, build_datasets, build_validation_sets, read_sources
from megatron.data.evaluation_data import EvaluationText, WholePasses, Windows, names_of, read_text
from megatron.data.gpt_dataset import Dataset, epochs_of
from megatron.data.loader import LOADER_STATE, Microbatch, Patience, build_loader
from megatron.data.packed_dataset import describe_packing
from megatron.data.text_inputs import InputFormat
from megatron.data.text_stream import build_text_stream
from megatron.data.tokenizers import describe_tokenizer, shared_tokenizer
from megatron.errors import ConfigError, DataError
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.build.plan import RunPlan, evaluates
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.context import RunContext
from megatron.training.loop.data import (
    Data,
    DataCheck,
    EvaluationSet,
    Lookahead,
    consumption_order,
    describe_iteration,
    name_those_without_digests,
)

Counts = tuple[int, int | None, int | None]
"""Samples of the train, validation and test split; None: all samples once."""


@dataclass(frozen=True)
class OwnData:
    """The loader of a user's data, which replaces corpora."""

    build: BuildLoader
    name: str
    """For messages: the flag and its value."""
    saved: SavedLoader | None = None
    """The states of the checkpoint that the run continues from."""

    def open(
        self, context: RunContext, vocabulary: Vocabulary, plan: RunPlan, split: Literal["train", "validation"]
    ) -> SampleStream:
        """This rank's samples of a split."""
        config, topology, is_train = context.config, context.topology, split == "train"
        place = DataContext(
            config,
            None if config.tokenizer.tokenizer_type is None else shared_tokenizer(config.tokenizer),
            vocabulary.size,
            vocabulary.end_of_document,
            split,
            topology.data_parallel.rank,
            topology.grid.dp,
            plan.progress.consumed_samples - plan.stage.first_sample if is_train else 0,
            plan.batches.global_batch_size,
        )
        return open_stream(self.build, self.name, place, self.saved if is_train else None)


def find_own_data(data: DataConfig, build_loader: BuildLoader | None) -> OwnData | None:
    """The loader of ``RunParts.build_loader`` or of the flags, if any; executes the file of ``--data-module``."""
    if build_loader is not None:
        return OwnData(build_loader, "RunParts.build_loader")
    if data.data_module is not None:
        return OwnData(load_function(data.data_module), f"--data-module {data.data_module}")
    return OwnData(build_text_stream, "--train-text-path") if data.train_text_path else None


def build_data(context: RunContext, vocabulary: Vocabulary, plan: RunPlan, own: OwnData | None = None) -> Data:
    """Datasets (rank 0 builds cached orders first) and loaders that start at the progress of ``plan``.

    ``own`` data replace the training corpora, and without validation corpora those, too.
    """
    config, topology, control = context.config, context.topology, context.topology.control
    progress, stage, batches = plan.progress, plan.stage, plan.batches
    sources = run_on_all_ranks(control, lambda: read_sources(config.data))
    counts = sample_counts(config, plan, sources)
    num_train = counts[0]
    if own is not None:
        counts = (0, *counts[1:])
    # Before datasets read the indexes, each rank compares its share of them with their digests.
    used = [index for index, count in enumerate(counts) if count != 0 and sources.has(index)]
    prefixes, share = sources.prefixes(used), Share(control.rank, control.size)
    threads = config.data.num_dataset_builder_threads
    digests = run_on_all_ranks(control, lambda: check_indexes(prefixes, config.data.index_cache_path, share, threads))
    name_those_without_digests(digests, context.log_rank0)
    train, evaluated = run_on_all_ranks(
        control, lambda: _build_splits(config, vocabulary, counts, inspect=control.rank == 0), first=True
    )
    for dataset in (train, *(one.dataset for one in evaluated)):
        for line in describe_packing(dataset):
            context.log_rank0(line)
    # Samples of the stage that earlier processes have read; those of the run begin the first stage.
    consumed = progress.consumed_samples - stage.first_sample
    per_evaluation = _samples_per_evaluation(config, batches)
    starts = {"validation": _evaluations(config, stage, progress.iteration) * per_evaluation, "test": 0}
    # The ranges of samples that this process reads, whose blocks are compared in the background.
    read: list[tuple[str, Dataset, int, int]] = [] if train is None else [("train", train, consumed, counts[0])]
    whole: list[SampleRange] = []
    if config.validation.full_validation:
        whole = [SampleRange(one.split, one.dataset, 0, len(one.dataset), np.arange) for one in evaluated]
        if config.validation.eval_iters != ValidationConfig().eval_iters:
            context.log_rank0("--eval-iters has no effect with --full-validation")
    else:
        stops = {"validation": counts[1] or 0, "test": counts[2] or 0}
        read += [(split, dataset, starts[split], stops[split]) for split, _, dataset in evaluated]
    ranges = [
        SampleRange(split, dataset, start, stop, consumption_order(config, len(dataset), topology.grid.dp))
        for split, dataset, start, stop in read
    ]
    sets = [_evaluation_set(context, vocabulary, per_evaluation, one, starts[one.split]) for one in evaluated]
    samples: Dataset | None = train
    if own is not None and num_train:
        samples = run_on_all_ranks(control, lambda: own.open(context, vocabulary, plan, "train"))
        if consumed and own.saved is None:
            context.log_rank0(
                f"the loader of {own.name} has no state: it begins at context.consumed_samples {consumed}"
            )
    if own is not None and evaluates(config) and not sources.has(1):
        sets.append(_own_validation(context, vocabulary, plan, own, per_evaluation))
    return Data(
        train=Lookahead(
            iter(()) if samples is None else build_run_loader(context, vocabulary, samples, consumed),
            samples.state() if isinstance(samples, SampleStream) else None,
        ),
        evaluated=sets,
        train_epochs={} if train is None else epochs_of(train),
        check=DataCheck(
            BlockComparison(digests, share),
            ranges + whole,
            config.data.data_verification_rate * 1e6,
            control,
            partial(describe_iteration, batches, progress.iteration, progress.consumed_samples, stage.first_sample),
        ),
    )


class _Evaluated(NamedTuple):
    split: Literal["validation", "test"]
    name: str | None
    dataset: Dataset


def _build_splits(
    config: RunConfig, vocabulary: Vocabulary, counts: Counts, inspect: bool
) -> tuple[Dataset | None, list[_Evaluated]]:
    validation = config.validation
    facts: RunFacts = {
        "vocab_size": vocabulary.size,
        "eod": vocabulary.end_of_document,
        "seed": config.training.seed,
        "tokenizer_description": describe_tokenizer(config.tokenizer) if config.tokenizer.tokenizer_type else None,
        "inspect": inspect,
    }
    evaluated: list[_Evaluated] = []
    if validation.multiple_validation_sets and counts[1] != 0:
        sets = build_validation_sets(config.data, count=counts[1], **facts)
        names = validation.validation_set_names or tuple(map(str, range(len(sets))))
        if len(names) != len(sets):
            raise ConfigError(
                f"--validation-set-names has {len(names)} names, but there are {len(sets)} validation sets: give a "
                "name for each."
            )
        evaluated = [_Evaluated("validation", name, one) for name, one in zip(names, sets, strict=True)]
        counts = (counts[0], 0, counts[2])
    train, valid, test = build_datasets(config.data, sample_counts=counts, **facts)
    evaluated += [_Evaluated("validation", None, valid)] if valid is not None else []
    evaluated += [_Evaluated("test", None, test)] if test is not None else []
    return train, evaluated


def _evaluation_set(
    context: RunContext, vocabulary: Vocabulary, num_samples: int, one: _Evaluated, consumed: int
) -> EvaluationSet:
    """The next ``num_samples`` samples at every evaluation, or all with ``--full-validation``."""
    unit = context.config.micro_batch_size * context.topology.grid.dp
    if not context.config.validation.full_validation:
        loader = build_run_loader(context, vocabulary, one.dataset, consumed)
        return EvaluationSet(one.split, loader, num_samples // unit, one.name)
    if not len(one.dataset):
        which = "" if one.name is None else f" {one.name}"
        raise DataError(
            f"The {one.split} set{which} has fewer tokens than one sample: give it more data, or use a shorter "
            "--seq-length."
        )
    passes = WholePasses(one.dataset, unit)
    loader = build_run_loader(context, vocabulary, passes, 0)
    return EvaluationSet(one.split, loader, passes.samples_per_pass // unit, one.name, continues=False)


def _own_validation(
    context: RunContext, vocabulary: Vocabulary, plan: RunPlan, own: OwnData, num_samples: int
) -> EvaluationSet:
    """The first ``num_samples`` of the user's validation samples, at every evaluation."""
    count = num_samples // (context.config.micro_batch_size * context.topology.grid.dp)

    def read(stream: SampleStream) -> Iterator[Microbatch]:
        while True:
            for microbatch in islice(build_run_loader(context, vocabulary, stream, 0), count):
                microbatch.pop(LOADER_STATE, None)
                yield microbatch
            stream = own.open(context, vocabulary, plan, "validation")

    first = run_on_all_ranks(context.control, lambda: own.open(context, vocabulary, plan, "validation"))
    return EvaluationSet("validation", read(first), count, continues=False)


def sample_counts(config: RunConfig, plan: RunPlan, sources: Sources) -> Counts:
    """Samples that the run reads of each split from the beginning of the stage, as in Megatron-LM; None: all."""
    stage, progress, batches = plan.stage, plan.progress, plan.batches
    per_evaluation = _samples_per_evaluation(config, batches)
    evaluations = _evaluations(config, stage, plan.train_iters) + 1
    valid: int | None = evaluations * per_evaluation
    test: int | None = per_evaluation
    if config.validation.full_validation:
        valid = test = None
    if not sources.has(2):
        test = 0
    if config.validation.skip_train:
        if not sources.has(1) and not sources.has(2) and config.data.loader is None:
            raise ConfigError(
                "--skip-train has nothing to evaluate: set --valid-data-path or --test-data-path, or raise the second "
                "or third weight of --split."
            )
        return 0, valid if sources.has(1) else 0, test
    remaining = plan.train_iters - progress.iteration
    end = config.training.train_samples or batches.total_samples(max(remaining, 0), progress.consumed_samples)
    train = max(end - stage.first_sample, 0)
    if not evaluates(config):
        return train, 0, 0
    if config.data.loader is not None and not sources.has(1):
        return train, 0, test
    if not sources.has(1) and sources.split is None:
        raise ConfigError(
            "Evaluation needs validation data: set --valid-data-path to their corpora, or remove --eval-interval."
        )
    if not sources.has(1):
        raise ConfigError(
            f"Evaluation needs a validation split, but it is empty in --split {sources.split!r}: raise its second "
            "weight, or remove --eval-interval."
        )
    return train, valid, test


def _evaluations(config: RunConfig, stage: DataStage, iteration: int) -> int:
    """Evaluations from the beginning of ``stage`` up to ``iteration``."""
    interval = config.validation.eval_interval
    return iteration // interval - stage.first_iteration // interval if interval else 0


def _samples_per_evaluation(config: RunConfig, batches: BatchSchedule) -> int:
    return config.validation.eval_iters * (config.validation.eval_global_batch_size or batches.final_batch_size)


def build_run_loader(
    context: RunContext, vocabulary: Vocabulary, dataset: Dataset, consumed: int
) -> Iterator[Microbatch]:
    """This rank's microbatches of ``dataset``, after ``consumed`` samples of all ranks."""
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
        dataloader_type="single" if isinstance(dataset, WholePasses | SampleStream) else config.data.dataloader_type,
        pin_memory=topology.device.type != "cpu",
        positions=split.positions(config.seq_length).numpy() if split.size > 1 else None,
        num_future=config.model.mtp_num_layers,
        patience=Patience(config.dataloader_timeout, lambda: context.signals.received),
    )


@dataclass
class TextData:
    """Reads the texts of ``--input`` on every rank, and makes a set of each."""

    config: EvaluateConfig
    texts: list[EvaluationText] | None = None
    """The texts, once they are read."""

    def build(self, context: RunContext, vocabulary: Vocabulary, plan: RunPlan, own: OwnData | None) -> Data:
        """The sets, and no training data."""
        run, control, config = context.config, context.control, self.config
        form = InputFormat(keys=(config.json_key,), separation=config.text_documents)
        cache = run.data.index_cache_path
        self.texts = run_on_all_ranks(
            control, lambda: [read_text(name, run.tokenizer, form, cache) for name in config.input]
        )
        nothing = BlockComparison({}, Share(control.rank, control.size))
        return Data(
            train=Lookahead(iter(())),
            evaluated=[
                self._set(context, vocabulary, name, text)
                for name, text in zip(names_of(config.input), self.texts, strict=True)
            ],
            train_epochs={},
            check=DataCheck(nothing, [], 0.0, control, str),
        )

    def _set(self, context: RunContext, vocabulary: Vocabulary, name: str, text: EvaluationText) -> EvaluationSet:
        run = context.config
        windows = Windows(
            text.stream,
            run.seq_length,
            self.config.stride or run.seq_length,
            vocabulary.end_of_document,
            masked_token=vocabulary.end_of_document if run.data.eod_mask_loss else None,
            marks_documents=run.data.marks_documents,
        )
        unit = run.micro_batch_size * context.topology.grid.dp
        samples = WholePasses(windows, unit)
        microbatches = build_run_loader(context, vocabulary, samples, 0)
        count = samples.samples_per_pass // unit
        if context.topology.rank == 0:
            microbatches = _with_bar(microbatches, name, count, unit)
        return EvaluationSet("validation", microbatches, count, name, continues=False, num_bytes=text.num_bytes)


def _with_bar(microbatches: Iterator[Microbatch], name: str, count: int, unit: int) -> Iterator[Microbatch]:
    """Microbatches with a progress bar on a terminal, which counts the windows of all ranks."""
    with tqdm(total=count * unit, desc=name, unit="window", disable=None, leave=False) as bar:
        for number, microbatch in enumerate(microbatches, start=1):
            if number <= count:
                bar.update(unit)
            if number == count:
                bar.close()
            yield microbatch
