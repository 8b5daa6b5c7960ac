"""What a rank needs for its part of a sequence."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.parallel import CONTEXT_PARALLEL_TYPES, ContextParallelType, ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.core.context_parallel import ContextSplit
from megatron.core.data_parallel.buffered import wrap_data_parallel
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.models.parallelize import build_executor, build_model
from megatron.core.ops.documents import Documents
from megatron.core.optimizer import Optimizer
from megatron.core.precision import LossScaler, NumberFormats
from megatron.core.topology import RankGrid, Topology
from megatron.metrics.timers import Timers
from megatron.schedules.catalog import build_schedule
from megatron.training.context import TrainModule
from megatron.training.loop.step import train_step
from tests.parallel.layout_run import CPU, Layout, context
from tests.rank_pool import RankPool
from tests.storage_watch import PeakWatch

VOCABULARY = 256
WIDE = TransformerConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=4,
    kv_channels=16, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, max_position_embeddings=1,
)  # fmt: skip


def step(kind: ContextParallelType, length: int, in_documents: bool) -> tuple[int, float]:
    """Most bytes of all that a training step on one sequence makes at once; and its loss."""
    size = dist.get_world_size()
    topology = Topology(RankGrid(cp=size), dist.get_rank(), CPU)
    sizes = (2, size // 2) if kind == "a2a+p2p" and size > 1 else ()
    layout = Layout(cp=size, cp_comm_type=(kind,), cp_sizes=sizes)
    model = build_model(WIDE, context(topology, layout, torch.float32), seed=1)
    documents = partial(Documents, masks_attention=True, resets_positions=False, device=CPU)
    schedule = partial(build_schedule, "1f1b", 1)
    executor = build_executor(model, topology, schedule, length, 1, documents=documents if in_documents else None)
    data_parallel = wrap_data_parallel(model, NumberFormats.uniform(torch.float32), topology, ParallelConfig())
    optimizer = Optimizer(OptimizerConfig(), data_parallel, topology)
    text = torch.randint(0, VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(0))
    places = ContextSplit(topology.context_parallel.rank, size).positions(length)
    batch = {
        "tokens": text[:, places],
        "labels": text[:, places + 1],
        "loss_mask": torch.ones(1, len(places)),
        "document_starts": text[:, :-1] == 0,
    }
    with PeakWatch() as watch:
        outcome = train_step(
            TrainModule(executor, data_parallel, optimizer, LossScaler(), topology),
            iter([batch]),
            Hyperparameters(learning_rate=1e-3),
            num_microbatches=1,
            expected_tokens=length,
            timers=Timers(0),
        )
    return watch.peak, outcome.loss


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("kind", CONTEXT_PARALLEL_TYPES)
def test_activations_of_a_rank_fall_with_the_number_of_ranks(
    four_ranks: RankPool, kind: ContextParallelType, length: int
) -> None:
    """To one rank's divided by their number; all-gather has keys, values and their gradients of one layer whole for a
    moment, in two orders, and all-to-all keeps what it has exchanged beside what it has not."""
    ((alone, loss),) = four_ranks.run(step, kind, length, False, world_size=1)
    whole_layer = 4 * 2 * length * WIDE.key_value_size * 4 if kind == "allgather" else 0
    for ranks in (4,) if kind == "a2a+p2p" else (2, 4):
        for peak, same_loss in four_ranks.run(step, kind, length, False, world_size=ranks):
            assert peak - whole_layer < (1.3 if kind.startswith("a2a") else 1.1) * alone / ranks
            assert same_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("in_documents", [False, True])
def test_memory_does_not_grow_with_the_square_of_the_sequence(four_ranks: RankPool, in_documents: bool) -> None:
    """A dense mask of the longer one alone would take 16 MiB."""
    short, long = (four_ranks.run(step, "p2p", length, in_documents, world_size=1)[0][0] for length in (1024, 4096))
    assert long < 4.2 * short
