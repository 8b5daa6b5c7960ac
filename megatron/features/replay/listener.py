"""Replays, at intervals and on suspicion: the same microbatch twice on one rank and once on a data-parallel neighbour
must give the same bits.

A replay changes nothing of training: its gradients are digested bucket by bucket instead of being reduced, counters of
routers and amaxes of FP8 begin anew with the next step, and random states are restored. It needs kernels that give the
same bits every time: CPUs, and GPUs under ``--deterministic-mode``.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor

from megatron.core.data_parallel.buffer import GradientView
from megatron.core.topology import RankGrid, Topology
from megatron.data.loader import Microbatch
from megatron.errors import ConfigError, SilentCorruptionError
from megatron.features.known_product.listener import KnownAnswer
from megatron.features.replay.flags import INTERVAL
from megatron.features.replicas.state import digest, key_of
from megatron.operation.failure import list_ranks
from megatron.operation.heartbeat import Heartbeat, Section
from megatron.training.checkpoints.state import random_tensors, restore_random
from megatron.training.context import RunContext, TrainModule
from megatron.training.loop.trainer import IterationResult, Listener, Trainer

Kind = Literal["transient", "persistent", "data"]
"""transient: one rank computed different bits from the same input; persistent: a rank and its neighbour did; data: all
agree, so the cause is the input or the model."""


@dataclass(frozen=True)
class RankReplay:
    """The digests of one rank's passes: two integers of the losses and all gradients, and how many are not finite."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    neighbour: tuple[int, ...] | None
    """The pass over the microbatch of the rank before it; None without a neighbour."""


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the replays of all ranks."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    """The ranks that may be wrong; none for "data"."""
    is_finite: bool = True
    """Whether all numbers of all passes were finite."""


def neighbour_distance(grid: RankGrid) -> int | None:
    """The distance along ``dp`` at which a rank computes the same bits from the same microbatch; None if there is none.

    Expert-parallel ranks exchange tokens, so such a group must move as a whole to the place of another one.
    """
    if grid.dp == 1:
        return None
    if grid.ep * grid.etp == 1:
        return 1
    stage = grid.group(0, ("tp", "cp", "dp"))
    groups = {rank: grid.group(rank, ("etp", "ep")) for rank in stage}
    for distance in range(1, grid.dp):
        moved = {rank: neighbour(grid, rank, distance) for rank in stage}
        if all(tuple(moved[one] for one in ranks) == groups[moved[rank]] for rank, ranks in groups.items()):
            return distance
    return None


def neighbour(grid: RankGrid, rank: int, distance: int) -> int:
    """The rank ``distance`` replicas further, which has the same part of the model."""
    ranks = grid.group(rank, ("dp",))
    return ranks[(ranks.index(rank) + distance) % len(ranks)]


def judge(grid: RankGrid, distance: int | None, replays: Sequence[RankReplay]) -> Verdict:
    """The verdict on the ``replays`` of all ranks.

    All ranks of a replica exchange activations and gradients, so an error of one shows on several of them, and all
    whose digests differ are named.
    """
    is_finite = all(replay.first[-1] == 0 for replay in replays)
    unsteady = tuple(rank for rank, replay in enumerate(replays) if replay.first != replay.second)
    if unsteady:
        return Verdict("transient", unsteady, is_finite)
    if distance is None:
        return Verdict("data", (), is_finite)
    differing = [
        (rank, other)
        for rank in range(len(replays))
        if replays[rank].first != replays[other := neighbour(grid, rank, distance)].neighbour
    ]
    if not differing:
        return Verdict("data", (), is_finite)
    # A wrong rank disagrees with the rank after it, which repeats its microbatch, and with the one before it:
    #
    #     rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0      rank 2 is wrong: the pairs (1, 2) and (2, 3) differ
    #
    # Among two replicas both pairs have both ranks.
    sources, targets = {rank for rank, _ in differing}, {other for _, other in differing}
    both = sources & targets
    return Verdict("persistent", tuple(sorted(both or sources | targets)), is_finite)


class Replay:
    """Runs microbatches again; all methods are collectives of all ranks."""

    def __init__(self, topology: Topology, heartbeat: Heartbeat | None = None) -> None:
        self._topology = topology
        self._heartbeat = heartbeat or Heartbeat()
        self.control = topology.control
        self.distance = neighbour_distance(topology.grid)
        """The replica that repeats the microbatches of a rank; None if there is none."""
        # Only the ranks that read microbatches use it, but all ranks must create process groups in one order.
        topology.open(("dp",))

    def run(
        self, module: TrainModule, microbatches: Sequence[Microbatch], number: int, expected_tokens: int
    ) -> Verdict:
        """The verdict on ``number`` microbatches, which are empty on ranks that read none; ``expected_tokens`` divide
        the loss."""
        with self._unchanged(module):
            # Two passes over the own microbatches, one over those of the neighbour before: [3] integers each.
            passes = [self._digest(module, microbatches, number, expected_tokens) for _ in range(2)]
            if self.distance is not None:
                theirs = [self._exchange(microbatch, self.distance) for microbatch in microbatches]
                passes.append(self._digest(module, theirs, number, expected_tokens))
        row = torch.cat(passes)  # [passes x 3]
        table = self._topology.world.all_gather(row).view(self._topology.world.size, len(passes), 3).tolist()
        replays = [
            RankReplay(tuple(first), tuple(second), tuple(rest[0]) if rest else None) for first, second, *rest in table
        ]
        return judge(self._topology.grid, self.distance, replays)

    @contextmanager
    def _unchanged(self, module: TrainModule) -> Iterator[None]:
        """Restore what a pass changes and the next step does not reset."""
        rank, device = self._topology.rank, self._topology.device
        states, recorder = random_tensors(rank, device), module.executor.recorder
        module.executor.recorder = None
        try:
            yield
        finally:
            module.executor.recorder = recorder
            restore_random(states, rank, device)

    def _digest(
        self, module: TrainModule, microbatches: Sequence[Mapping[str, Tensor]], number: int, expected_tokens: int
    ) -> Tensor:
        """The digest of the losses and gradients of this rank, and how many of them are not finite: ``[3]``."""
        total = torch.zeros(3, dtype=torch.int64, device=self._topology.device)

        def add(numbers: Tensor, *names: object) -> None:
            total[:2] += digest(numbers) * key_of(*names)
            total[2] += ~torch.isfinite(torch.linalg.vector_norm(numbers, float("inf")))

        def add_bucket(view: GradientView, whole: Tensor) -> None:
            for info, _, start in view.main_grads:
                add(whole[start : start + prod(info.local_shape)], info.name)

        scale = module.loss_scaler.scale / expected_tokens
        # The watchdog's limit applies to each pass over the microbatches, as in training.
        with self._heartbeat.section(Section.FORWARD_BACKWARD):
            for index in range(number):
                if module.fp8 is not None:
                    module.fp8.start_step()
                if module.experts is not None:
                    module.experts.start_step()
                with module.data_parallel.gradients_diverted(add_bucket):
                    sums = module.executor.train(iter(microbatches[index : index + 1]), 1, scale)
                add(sums, "loss", index)
        return total

    def _exchange(self, microbatch: Microbatch, distance: int) -> Mapping[str, Tensor]:
        """Send ``microbatch`` to the rank ``distance`` replicas further, and receive another one."""
        ranks, device = self._topology.data_parallel, self._topology.device
        # All tensors of the microbatch as one message of bytes, sorted by name.
        octets = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in sorted(microbatch.items())]
        sent = torch.cat(octets).to(device)
        target, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
        received = ranks.start_exchange(sent, target, torch.empty_like(sent), source).wait().cpu()
        parts = received.split([part.numel() for part in octets])
        return {
            name: part.clone().view(tensor.dtype).view(tensor.shape)
            for (name, tensor), part in zip(sorted(microbatch.items()), parts)
        }


def build_replay_check(context: RunContext, module: TrainModule, known_answer: KnownAnswer) -> "ReplayCheck | None":
    """The replays, which open a group: a collective. None if kernels or scales give other bits in a second pass; then
    raises :class:`ConfigError` if ``--replay-interval`` is given."""
    missing, interval = why_not_replayed(context, module), context.config.operation.replay_interval
    if missing is not None:
        if interval is not None:
            raise ConfigError(f"--replay-interval {interval} needs {missing}, or remove it.")
        return None
    if interval is None:
        interval = INTERVAL if context.topology.grid.dp > 1 else 0
    return ReplayCheck(Replay(context.topology, context.heartbeat), interval, known_answer)


def why_not_replayed(context: RunContext, module: TrainModule) -> str | None:
    """What is missing for two passes over a microbatch to give the same bits; None if they do."""
    if context.topology.device.type != "cpu" and not context.config.training.deterministic_mode:
        return "kernels that give the same bits in every run: add --deterministic-mode"
    is_engine = context.config.model.transformer_impl == "transformer_engine"
    if is_engine and module.fp8 is not None and module.fp8.is_delayed:
        return "scales that a replay does not change: use another --fp8-recipe than delayed"
    return None


@dataclass
class ReplayCheck(Listener):
    """Replays a microbatch every ``interval`` iterations (0: only on suspicion)."""

    replay: Replay
    interval: int
    known_answer: KnownAnswer
    # The microbatches of the iteration, on ranks that read any.
    _microbatches: list[Microbatch] = field(default_factory=list)

    def on_iteration_start(self, trainer: Trainer) -> None:
        self._microbatches.clear()
        trainer.data.train.kept = self._microbatches

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        # Skipped iterations read microbatches, too.
        trainer.data.train.kept = None
        if self.interval and trainer.state.progress.iteration % self.interval == 0:
            iteration = trainer.state.progress.iteration
            verdict = self._run(trainer, self._microbatches[-1:], 1, result.global_batch_size)
            self._raise_unless_data(verdict, f"after iteration {iteration}")

    def on_suspicion(self, trainer: Trainer, what: str) -> str:
        """Replay all microbatches of the iteration, of which ``what`` is suspicious."""
        consumed = trainer.state.progress.consumed_samples
        number = trainer.batches.num_microbatches(consumed)
        verdict = self._run(trainer, self._microbatches, number, trainer.batches.global_batch_size(consumed))
        self._raise_unless_data(verdict, f"after {what}")
        others = "" if self.replay.distance is None else " and on another rank"
        if not verdict.is_finite:
            return f"A replay gave the same bits twice{others}: the cause is the data or the model, not the hardware."
        return (
            f"A replay gave the same finite numbers twice{others}: if the iteration's were not finite, a transient "
            "error of the hardware is the cause, or an overflow of the sum over microbatches and ranks."
        )

    def _run(self, trainer: Trainer, microbatches: Sequence[Microbatch], number: int, batch_size: int) -> Verdict:
        expected_tokens = batch_size * trainer.context.config.seq_length
        return self.replay.run(trainer.module, microbatches, number, expected_tokens)

    def _raise_unless_data(self, verdict: Verdict, when: str) -> None:
        if verdict.kind == "data":
            return
        # It names the rank where several ranks of a replica show the same error.
        self.known_answer.test()
        self.known_answer.raise_on_all_ranks()
        control = self.replay.control
        hosts = control.all_gather_object(socket.gethostname())
        named = ", ".join(dict.fromkeys(hosts[rank] for rank in verdict.ranks))
        differing = list_ranks(verdict.ranks) + (" and another rank" if verdict.kind == "persistent" else "")
        raise SilentCorruptionError(
            f"A replay {when} found a {verdict.kind} error: {differing} computed different bits from the same "
            f"microbatch (hosts: {named}). Start the same command again: it continues from the last checkpoint. Leave "
            "the hosts out if they are named again, and continue from an older checkpoint if the loss looks wrong.",
            verdict.ranks,
        )
