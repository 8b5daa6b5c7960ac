"""Microbatches of tensors from datasets."""

import signal
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from megatron.data.gpt_dataset import Dataset, Sample
from megatron.data.loader import POLL, UNLIMITED, Patience, Starts, started
from megatron.errors import DataError, LoaderError
from megatron.operation.processes import die_with_parent

Microbatch = dict[str, torch.Tensor]

# The samples of one step, with 2 data-parallel ranks, microbatches of 2 samples and a global batch of 8:
#
#   rank 0   0 1   4 5
#   rank 1   2 3   6 7      a microbatch over all ranks is consecutive, so no layout changes what a step reads


def microbatch_sample_indices(
    start_sample: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> list[int]:
    """The samples of one rank in the microbatch that begins with ``start_sample`` over all ranks."""
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ValueError(f"data-parallel rank {data_parallel_rank} of {data_parallel_size}")
    first = start_sample + data_parallel_rank * micro_batch_size
    return list(range(first, first + micro_batch_size))


def single_pass_microbatches(
    num_samples: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, in order; an incomplete last one is dropped."""
    chunk = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, num_samples - chunk + 1, chunk):
        yield microbatch_sample_indices(start, micro_batch_size, data_parallel_rank, data_parallel_size)


def cyclic_microbatches(
    num_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    seed: int = 0,
) -> Iterator[list[int]]:
    """Sample indices of each microbatch of a rank, without end, shuffled in every epoch.

    Each rank permutes a contiguous range of samples with a generator seeded by ``seed`` + epoch; seed 0 gives
    Megatron-LM's order. The ranges, and so the order, depend on the data-parallel size.
    """
    chunk = micro_batch_size * data_parallel_size
    epoch_samples = num_samples - num_samples % chunk
    if not epoch_samples:
        raise DataError(
            f"The dataset has {num_samples} samples, fewer than the {chunk} of one microbatch on all "
            "data-parallel ranks: use a smaller --micro-batch-size or more data."
        )
    if consumed_samples % epoch_samples % chunk:
        raise DataError(
            f"--dataloader-type cyclic cannot resume at sample {consumed_samples} with microbatches of "
            f"{chunk} samples over all data-parallel ranks: keep the --micro-batch-size and the "
            "data-parallel size of the saved run."
        )
    bucket = epoch_samples // data_parallel_size
    epoch, consumed_in_epoch = divmod(consumed_samples, epoch_samples)
    start = consumed_in_epoch // data_parallel_size
    while True:
        # Bucket r, the samples [r * bucket, (r + 1) * bucket), is what rank r reads in every epoch.
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(bucket, generator=generator) + data_parallel_rank * bucket
        for first in range(start, bucket, micro_batch_size):
            yield order[first : first + micro_batch_size].tolist()
        epoch, start = epoch + 1, 0


def build_loader(
    dataset: Dataset,
    *,
    vocab_size: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    dataloader_type: Literal["single", "cyclic"] = "single",
    seed: int = 0,
    pin_memory: bool = False,
    positions: npt.NDArray[np.int64] | None = None,
    patience: Patience = UNLIMITED,
) -> Iterator[Microbatch]:
    """This rank's microbatches: ``tokens`` and ``labels`` [mbs, s] int64, ``loss_mask`` [mbs, s] float32.

    With ``positions`` they have only these positions of each sample, for context parallelism; ``document_starts``
    always describes the whole sample. With ``num_workers`` 0 this process reads, and ``patience`` has no effect.
    ``seed`` is for the cyclic order. Raises :class:`DataError` after the last sample.
    """
    place = (len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)

    def start(starts: Starts | None = None) -> Iterator[Any]:
        cyclic = dataloader_type == "cyclic"
        sampler = cyclic_microbatches(*place, seed) if cyclic else single_pass_microbatches(*place)
        loader: DataLoader[Any] = DataLoader(
            cast(Any, _CheckedSamples(dataset, vocab_size, positions)),
            batch_sampler=cast(Any, sampler),
            collate_fn=partial(_stack, starts=starts),
            num_workers=num_workers,
            worker_init_fn=partial(_prepare_worker, starts=starts),
            pin_memory=pin_memory,
            timeout=POLL if num_workers else 0,
            # Its own generator, so that torch's global generator is not used.
            generator=torch.Generator(),
        )
        return iter(loader)

    return _raise_when_exhausted(
        (lambda: started(start, num_workers, patience)) if num_workers else start, len(dataset)
    )


class _CheckedSamples:
    """Samples whose ids are in the vocabulary, with the tokens at ``positions``, or all.

    Errors are values: torch would wrap an error that is raised in a loader process in a traceback.
    """

    def __init__(self, dataset: Dataset, vocab_size: int, positions: npt.NDArray[np.int64] | None = None) -> None:
        self._dataset, self._vocab_size, self._positions = dataset, vocab_size, positions

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample | DataError:
        try:
            sample = self._dataset[index]
        except DataError as error:
            return error
        ids = sample["tokens"], sample["labels"]
        smallest, largest = min(int(part.min()) for part in ids), max(int(part.max()) for part in ids)
        if smallest < 0 or largest >= self._vocab_size:
            bad = smallest if smallest < 0 else largest
            return DataError(
                f"Sample {index} has token id {bad}, but the largest id of the tokenizer is {self._vocab_size - 1}: "
                "set --tokenizer-type and --tokenizer-model to the tokenizer of the corpus."
            )
        if self._positions is None:
            return sample
        return {name: array if name == "document_starts" else array[self._positions] for name, array in sample.items()}


def _raise_when_exhausted(start: Callable[[], Iterator[Any]], num_samples: int) -> Iterator[Microbatch]:
    batches = start()
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise LoaderError(f"A loader process ended ({error}): use fewer --num-workers if memory ran out.") from error
    finally:
        if isinstance(batches, Generator):
            batches.close()
    raise DataError(
        f"All {num_samples} samples of the dataset have been consumed: train for fewer iterations, or let "
        "the run ask for more samples when it builds its datasets."
    )


def _stack(samples: list[Sample | DataError], starts: Starts | None = None) -> Microbatch | DataError:
    """Samples [s] to a microbatch [mbs, s], or the first error among them."""
    if starts is not None:
        starts.record(has_microbatch=True)
    good: list[Sample] = []
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
        good.append(sample)
    return {key: torch.from_numpy(np.stack([sample[key] for sample in good])) for key in good[0]}  # [mbs, s]


def _prepare_worker(worker: int, starts: Starts | None = None) -> None:
    torch.set_num_threads(1)
    die_with_parent()
    # Ctrl-C and schedulers signal all processes of a run, but a graceful stop still needs microbatches. Loader
    # processes end when the loader is closed, or with the training process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if starts is not None:
        starts.record(has_microbatch=False)
