"""Which iteration read what: the order of samples over all ranks, and the iteration of a place in it."""

import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.core.control import ControlGroup
from megatron.data.corpus_digests import BlockComparison, SampleRange, Share, block_uses, check_indexes
from megatron.data.digests import BLOCK_BYTES
from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import cyclic_microbatches, single_pass_microbatches
from megatron.errors import DataError
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.loop.data import DataCheck, consumption_order, describe_iteration
from tests.data.corpora import write_corpus

SAMPLES, MICRO_BATCH, RANKS = 53, 3, 2


def config_of(dataloader_type: str) -> RunConfig:
    return RunConfig(
        data=DataConfig(dataloader_type=dataloader_type),  # type: ignore[arg-type]
        training=TrainingConfig(micro_batch_size=MICRO_BATCH),
    )


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
@pytest.mark.parametrize("consumed", [0, 12])
def test_the_order_is_the_one_in_which_the_loaders_of_all_ranks_read(dataloader_type: str, consumed: int) -> None:
    microbatches = single_pass_microbatches if dataloader_type == "single" else cyclic_microbatches
    rounds = 30 if dataloader_type == "cyclic" else 6  # several epochs
    loaders = [islice(microbatches(SAMPLES, consumed, MICRO_BATCH, rank, RANKS), rounds) for rank in range(RANKS)]
    read = [sample for turn in zip(*loaders, strict=True) for microbatch in turn for sample in microbatch]
    order = consumption_order(config_of(dataloader_type), SAMPLES, RANKS)
    assert order(consumed, consumed + len(read)).tolist() == read
    assert order(consumed + 5, consumed + 7).tolist() == read[5:7]


def test_the_iteration_of_a_sample_follows_the_batch_schedule() -> None:
    batches = BatchSchedule(((0, 4), (20, 8)), micro_batch_size=1, data_parallel_size=4)
    iteration, consumed, read = 0, 0, {}
    while iteration < 12:
        size = batches.global_batch_size(consumed)
        iteration += 1
        read.update(dict.fromkeys(range(consumed, consumed + size), iteration))
        consumed += size
    for position, wanted in read.items():
        assert describe_iteration(batches, 0, 0, 0, position) == f"iteration {wanted}"
        resumed = describe_iteration(batches, 6, 28, 0, position)
        assert resumed == (f"iteration {wanted}" if position >= 28 else "an iteration before 7")
        if position >= 12:  # where a data stage begins
            assert describe_iteration(batches, 6, 28, 12, position - 12) == resumed


def test_what_a_stopped_process_has_read_is_compared_by_the_one_that_resumes(tmp_path: Path) -> None:
    """The damaged block is read before the resumed process begins, and not again."""
    prefix = write_corpus(tmp_path / "corpus", 1, 4_000_000)
    dataset = GPTDataset(IndexedDataset(prefix), 0, None, SampleSettings(seq_length=500, seed=1, split="1"))
    uses = block_uses(dataset, np.arange(4))
    later = set(block_uses(dataset, np.arange(4, 7)).blocks.tolist())
    position, block = next(
        (position, block) for position, _, block in zip(*(a.tolist() for a in uses)) if block not in later
    )
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(block * BLOCK_BYTES)
        file.write(bytes(1000))
    comparison = BlockComparison(check_indexes([prefix], None, Share()), Share())
    wanted = SampleRange("train", dataset, 4, 7, np.arange)
    batches = BatchSchedule(((0, 1),), micro_batch_size=1, data_parallel_size=1)
    check = DataCheck(
        comparison, [wanted], 1e12, ControlGroup((0,), 0), lambda place: describe_iteration(batches, 4, 4, 0, place)
    )
    deadline = time.monotonic() + 60
    while not check.has_failed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(DataError, match=rf"\(block {block}\), .*; an iteration before 5 is the first to train on it"):
        check.raise_on_all_ranks()
    assert position < 4
    check.close()
