"""A real step of one process beside its dry run."""

import torch
import torch.distributed as dist

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig
from megatron.core.communication import CollectiveRecord, Communicator
from megatron.core.topology import Topology
from megatron.planner.launches import Traffic
from megatron.planner.memory import Kind, MemoryTracker
from megatron.planner.plan import Run
from megatron.planner.simulated_rank import build_rank, run_step
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.initialize import rank_grid

VOCABULARY = 1000
TINY = (
    "--model tiny --mock-data --vocab-size 1000 --seq-length 256 --micro-batch-size 1 --global-batch-size 16 "
    "--train-iters 10 --lr 1e-3 --device cpu"
)
RANKS = 4


def config_of(flags: str) -> RunConfig:
    config = parse_command_line(f"{TINY} {flags}".split())
    check_run(config, RANKS)
    return config


def run_of(flags: str) -> Run:
    return Run.of(config_of(flags), RANKS, Vocabulary(VOCABULARY, VOCABULARY - 1))


class ObservedTopology(Topology):
    """Real communicators that tell ``traffic`` of their collectives."""

    traffic: Traffic

    def _connect(self, *arguments: object, **options: object) -> Communicator:
        communicator = super()._connect(*arguments, **options)  # type: ignore[arg-type]
        communicator.observer = self.traffic.observer(communicator)
        return communicator


def real_step(flags: str, num_microbatches: int) -> tuple[int, dict[Kind, int], list[CollectiveRecord]]:
    """A step with numbers: the bytes at its peak, those between steps by kind, and its collectives."""
    config = config_of(flags)
    # Over gloo: the memory that ranks share is outside torch's, and its views would count as tensors.
    topology = ObservedTopology(
        rank_grid(config.parallel, RANKS), dist.get_rank(), torch.device("cpu"), shares_memory=False
    )
    topology.traffic = Traffic(dist.get_rank(), node_size=8)
    tracker = MemoryTracker()
    with tracker:
        module = build_rank(config, topology, Vocabulary(VOCABULARY, VOCABULARY - 1), tracker)
    module.data_parallel.initialize(config.training.seed)
    topology.traffic.clear()
    steady = tracker.now
    with tracker:
        run_step(config, topology, module, num_microbatches, tracker)
    return tracker.peak.total, dict(steady.by_kind), topology.traffic.records
