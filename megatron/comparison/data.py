"""The data of two sides: tokenizer, corpora, order of the samples, and the first token that differs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.checkpoint.finding import read_run_state
from megatron.comparison.finding import Comparison, Difference
from megatron.comparison.side import Side
from megatron.config.run import RunConfig
from megatron.data.data_record import tokenizer_digest, training_differences
from megatron.data.dataset_builder import build_datasets
from megatron.data.gpt_dataset import Dataset
from megatron.data.tokenizers import describe_tokenizer
from megatron.errors import UserError
from megatron.training.batch_schedule import BatchSchedule, build_batches
from megatron.training.build.vocabulary import planned_vocabulary

_ITERATIONS, _BEFORE, _NEIGHBOURS = 20, 3, 8
_MOST_SAMPLES = 1 << 14

Found = tuple[Difference, dict[str, Any]]
"""A difference, and the tokens around it for the page."""


@dataclass(frozen=True)
class Samples:
    """The training samples of a run, in the order in which they are read."""

    dataset: Dataset
    batches: BatchSchedule

    def iteration(self, number: int) -> range:
        """The samples of an iteration, counted from 1."""
        consumed = self.batches.total_samples(number - 1) if number > 1 else 0
        return range(consumed, consumed + self.batches.global_batch_size(consumed))

    def has(self, number: int) -> bool:
        """Whether the run reaches the iteration."""
        return self.iteration(number).stop <= len(self.dataset)


def compare_data(a: Side, b: Side, around: int | None = None) -> Comparison:
    """What differs in the data, up to the first sample; ``around`` is an iteration to look at, too."""
    if a.config is None or b.config is None:
        return Comparison("data", "The data of a side without flags of this code are not known.", is_complete=False)
    found: list[Difference] = []
    try:
        digests = [tokenizer_digest(side.config.tokenizer) for side in (a, b) if side.config is not None]
        if digests[0] != digests[1]:
            one, other = (str(digest)[:16] for digest in digests)
            found.append(Difference("data", "tokenizer", one, other, "digests of its files"))
        sides = [open_samples(side.config, side.world_size) for side in (a, b) if side.config is not None]
    except (UserError, OSError) as error:
        text = f"Records alone, because the samples cannot be read: {error}"
        return Comparison("data", text, (*found, *_of_records(a, b)), is_complete=False)
    iterations = chosen_iterations(sides, around)
    first = first_difference(sides[0], sides[1], iterations)
    figures: dict[str, Any] | None = None
    if first is not None:
        difference, figures = first
        found.append(difference)
    return Comparison("data", f"The samples of {len(iterations)} iterations.", tuple(found), figures=figures)


def chosen_iterations(sides: list[Samples], around: int | None) -> list[int]:
    """The iterations to compare, in order: those up to ``around`` and the first ones that both runs reach, as far as
    their samples are not too many."""
    before = range(around - _BEFORE, around + 1) if around else ()
    chosen: set[int] = set()
    total = 0
    for number in dict.fromkeys([*before, *range(1, _ITERATIONS + 1)]):
        if number < 1 or not all(side.has(number) for side in sides):
            continue
        total += len(sides[0].iteration(number))
        if total > _MOST_SAMPLES and chosen:
            break
        chosen.add(number)
    return sorted(chosen)


def _of_records(a: Side, b: Side) -> Iterator[Difference]:
    """What differs between the records of the data in the newest checkpoints."""
    records = []
    for side in (a, b):
        if side.kind in ("run", "checkpoint") and side.checkpoints:
            iteration = max(side.checkpoints)
            stages = read_run_state(side.checkpoints[iteration].parent, iteration).data_stages
            records += [stages[-1].data] if stages else []
    if len(records) == 2:
        for sentence in training_differences(*records):
            yield Difference("data", "record", "", "", sentence)


def open_samples(config: RunConfig, world_size: int | None) -> Samples:
    """The samples of the training split. Raises :class:`UserError` where they cannot be read."""
    if config.data.loader is not None:
        raise UserError(f"{config.data.loader} replaces corpora, whose samples only experiments show.")
    vocabulary = planned_vocabulary(config)
    replicas = config.parallel.data_parallel_size(world_size or config.parallel.model_parallel_size)
    batches = build_batches(config, replicas)
    wanted = config.training.train_samples or batches.total_samples(config.training.train_iters or 1)
    tokenizer = config.tokenizer
    dataset, _, _ = build_datasets(
        config.data,
        sample_counts=(wanted, 0, 0),
        inspect=False,
        vocab_size=vocabulary.size,
        eod=vocabulary.end_of_document,
        seed=config.training.seed,
        tokenizer_description=describe_tokenizer(tokenizer) if tokenizer.tokenizer_type else None,
    )
    assert dataset is not None
    return Samples(dataset, batches)


def first_difference(a: Samples, b: Samples, iterations: list[int]) -> Found | None:
    """The first token that differs in these iterations."""
    for number in iterations:
        left, right = a.iteration(number), b.iteration(number)
        if left != right:
            text = [f"samples {one.start} to {one.stop - 1}" for one in (left, right)]
            return Difference("data", "samples", text[0], text[1], f"iteration {number}"), {}
        for place, index in enumerate(left):
            if found := difference_of(a.dataset[index], b.dataset[index], number, place):
                return found
    return None


def difference_of(a: Mapping[str, Any], b: Mapping[str, Any], iteration: int, first: int = 0) -> Found | None:
    """The first token that differs in samples ``[length]`` or ``[samples, length]``, from the sample ``first`` of an
    iteration on."""
    for name in ("tokens", "labels", "loss_mask", "document_starts"):
        if name not in a or name not in b:
            continue
        one, other = (np.atleast_2d(np.asarray(side[name])) for side in (a, b))
        if one.shape != other.shape:
            sizes = [f"{samples} of {length} tokens" for samples, length in (one.shape, other.shape)]
            return Difference("data", name, sizes[0], sizes[1], f"iteration {iteration}, samples"), {}
        places = np.argwhere(one != other)
        if len(places):
            sample, at = places[0].tolist()
            remark = f"iteration {iteration}, sample {first + sample}, position {at}; {len(places)} in all"
            near = slice(max(at - _NEIGHBOURS, 0), at + _NEIGHBOURS + 1)
            shown = {"first": near.start, "a": one[sample, near].tolist(), "b": other[sample, near].tolist()}
            values = f"{one[sample, at]:g}", f"{other[sample, at]:g}"
            return Difference("data", name, *values, remark), {"tokens": shown}
    return None
