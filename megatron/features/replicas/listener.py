"""Checks of the training state: replicas have equal bits, nothing changes between updates, numbers are finite.

One all-gather of a few integers per check gives all ranks the same table, so they reach the same verdict. If it is bad,
a second round over the control group names the tensor and the rank.
"""

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor, nn

from megatron.core.topology import Topology
from megatron.errors import NotFiniteError, SilentCorruptionError
from megatron.features.known_product.listener import KnownAnswer
from megatron.features.replicas.state import (
    HOLDERS,
    HolderAxes,
    OddRanks,
    StateDigests,
    TensorKey,
    TrainingState,
    disagreeing_groups,
    find_odd,
)
from megatron.flags import IntervalSchedule
from megatron.operation.failure import list_ranks
from megatron.training.context import RunContext
from megatron.training.loop.trainer import IterationResult, Listener, Trainer

# Tensors that a message names.
_MOST_NAMED = 3


@dataclass(frozen=True)
class RankReport:
    """What one rank adds to the second round of a check that has failed."""

    host: str
    digests: dict[HolderAxes, dict[TensorKey, tuple[int, ...]]]
    """The digests of the classes in which its replicas differ."""
    changed: tuple[TensorKey, ...]
    """Tensors that changed between two updates."""
    not_finite: tuple[str, ...]


def build_state_check(context: RunContext, known_answer: KnownAnswer) -> "StateCheck":
    """The check of the training state; without an interval it still checks that what is saved is finite."""
    checkpoint, interval = context.config.checkpoint, context.config.operation.check_replicas_interval
    is_saving = checkpoint.save is not None
    return StateCheck(context.topology, interval, checkpoint.save_schedule, is_saving, known_answer)


@dataclass
class StateCheck(Listener):
    """Checks the state every ``interval`` updates (0: never) and what is about to be saved.

    Checks at the interval come before the update, and so before the all-gather of updated weights, which would copy a
    wrong shard to all replicas. A save is checked before its update and again before it is written.
    """

    topology: Topology
    interval: int
    saves: IntervalSchedule | None
    is_saving: bool
    known_answer: KnownAnswer
    # The digests after the update of an iteration.
    _resting: tuple[int, StateDigests] | None = field(default=None, init=False)
    # The iteration whose state was checked for a save.
    _saved_at: int | None = field(default=None, init=False)

    def before_update(self, trainer: Trainer, gradient_factor: float) -> None:
        following = trainer.state.progress.iteration + 1
        if self.is_due(following):
            digests = self._digests(trainer, with_gradients=True)
            self._check(trainer, f"before the update of iteration {following}", digests)

    def on_suspicion(self, trainer: Trainer, what: str) -> None:
        """Compare the state, which the iteration has not changed."""
        if self.interval:
            self._check(trainer, f"after {what}", self._digests(trainer, with_gradients=False))

    def on_iteration(self, trainer: Trainer, result: IterationResult) -> None:
        iteration = trainer.state.progress.iteration
        if self._saves_at(iteration):
            self._check_save(trainer)
        self._resting = None
        if self.is_due(iteration + 1):
            self._resting = iteration, self._digests(trainer, with_gradients=False)

    def on_end(self, trainer: Trainer, reason: str) -> None:
        if self.is_saving and self._saved_at != trainer.state.progress.iteration:
            self._check_save(trainer)
        elif not self.is_saving:
            self.known_answer.raise_on_all_ranks()

    def is_due(self, iteration: int) -> bool:
        """Whether the state is checked before the update of ``iteration``."""
        return bool(self.interval) and (iteration % self.interval == 0 or self._saves_at(iteration))

    def _saves_at(self, iteration: int) -> bool:
        return self.is_saving and self.saves is not None and self.saves.is_due(iteration)

    def _check_save(self, trainer: Trainer) -> None:
        self._saved_at = trainer.state.progress.iteration
        self._resting = None
        digests = self._digests(trainer, with_gradients=False) if self.interval else None
        not_finite = not_finite_tensors(training_state(trainer))
        self._check(trainer, f"after iteration {self._saved_at}, before its checkpoint", digests, not_finite)

    def _digests(self, trainer: Trainer, with_gradients: bool) -> StateDigests:
        trainer.module.data_parallel.finish_param_all_gather()
        return StateDigests.of(training_state(trainer).tensors(with_gradients), self.topology)

    def _check(self, trainer: Trainer, when: str, digests: StateDigests | None, not_finite: Sequence[str] = ()) -> None:
        """Raise on all ranks if the ``digests`` of replicas differ, a tensor changed since the last update, or there
        is a tensor in ``not_finite``; a collective."""
        changed = None
        if digests is not None and self._resting is not None:
            iteration, before = self._resting
            changed = digests.changed(before) if iteration == trainer.state.progress.iteration else None
        table = self._gather(digests, changed, bool(not_finite))
        # [ranks, classes, 2], [ranks, 3]
        folds, flags = table[:, : 2 * len(HOLDERS)].view(-1, len(HOLDERS), 2), table[:, 2 * len(HOLDERS) :]
        disagreeing = disagreeing_groups(self.topology.grid, folds)
        if not disagreeing and not bool(flags.any()):
            return
        # All ranks have the same table, so all are here: the second round is a collective, too.
        report = RankReport(
            socket.gethostname(),
            {axes: digests.by_key(axes) for axes, ranks in disagreeing if digests and self.topology.rank in ranks},
            () if digests is None or changed is None else tuple(compress(digests.resting_keys, changed.tolist())),
            tuple(not_finite),
        )
        reports = self.topology.control.all_gather_object(report)
        self.known_answer.raise_on_all_ranks()
        raise_findings(when, reports, disagreeing)

    def _gather(self, digests: StateDigests | None, changed: Tensor | None, has_not_finite: bool) -> Tensor:
        """The digests and flags of all ranks: ``[ranks, 2 classes + 3]``."""
        device = self.topology.device
        folds = torch.zeros(2 * len(HOLDERS), dtype=torch.int64, device=device)
        if digests is not None:
            folds = digests.folds().flatten()
        # A failed known product is no finding here, but the second round raises it.
        flags = torch.tensor([has_not_finite, self.known_answer.has_failed], dtype=torch.int64).to(device)
        has_changed = flags.new_zeros(1) if changed is None else changed.any().to(torch.int64).view(1)
        row = torch.cat((folds, has_changed, flags))
        return self.topology.world.all_gather(row).view(self.topology.world.size, -1).cpu()


def training_state(trainer: Trainer) -> TrainingState:
    module, context = trainer.module, trainer.context
    on_cpu = context.topology.device.type == "cpu"
    return TrainingState(
        [chunk for chunk in module.executor.chunks if isinstance(chunk, nn.Module)],
        module.data_parallel,
        module.optimizer,
        module.fp8,
        module.experts,
        context.config.parallel.sharding_strategy,
        compares_tensor_parallel=on_cpu or context.config.training.deterministic_mode,
    )


def not_finite_tensors(state: TrainingState) -> list[str]:
    """The names of tensors with an infinity or NaN; waits for the device once."""
    labels, tensors = zip(*state.floating())
    # Those of the optimizer may be in host memory, the first ones are weights.
    largest = torch.stack([one.float().to(tensors[0].device) for one in torch._foreach_norm(tensors, float("inf"))])
    return [label for label, is_finite in zip(labels, torch.isfinite(largest).tolist()) if not is_finite]


def raise_findings(
    when: str, reports: Sequence[RankReport], disagreeing: Sequence[tuple[HolderAxes, tuple[int, ...]]]
) -> None:
    """Raise the error that ``reports``, by rank, show."""
    changed = {rank: report.changed for rank, report in enumerate(reports) if report.changed}
    differing = find_differing(reports, disagreeing, {key for keys in changed.values() for key in keys})
    if changed or disagreeing:
        findings = [
            f"{list_names(tensors)} changed since the last update on {with_host(reports, (rank,))}"
            for rank, tensors in changed.items()
        ]
        for odd, tensors in differing.items():
            names, places = list_names(tensors), with_host(reports, odd.ranks)
            if odd.others:
                findings.append(f"{names} on {places} differs from {list_ranks(odd.others)}")
            else:
                findings.append(f"{names} differs between {places}, any of which may be wrong")
        found = "; ".join(findings) or "replicas differed, but not when they were read again"
        ranks = sorted({*changed, *(rank for odd in differing for rank in odd.ranks)})
        raise SilentCorruptionError(
            f"Silent data corruption, found {when}: {found}. Start the same command again: it continues from the last "
            "checkpoint, whose state was checked before it was written. Leave the host out if it is named again.",
            ranks,
        )
    rank, spoilt = next((rank, report.not_finite) for rank, report in enumerate(reports) if report.not_finite)
    raise NotFiniteError(
        f"The training state is not finite {when}, which is not written: {list_names(spoilt)} on "
        f"{with_host(reports, (rank,))}. Start the same command again: it continues from the last checkpoint; if it "
        "happens again, lower --lr or check the data."
    )


def find_differing(
    reports: Sequence[RankReport],
    disagreeing: Sequence[tuple[HolderAxes, tuple[int, ...]]],
    explained: Collection[TensorKey] = (),
) -> dict[OddRanks, list[TensorKey]]:
    """The tensors that differ, by the ranks that have other bits; without the ``explained`` ones, which changed on a
    rank that is named already."""
    found: dict[OddRanks, list[TensorKey]] = {}
    for axes, ranks in disagreeing:
        for key in reports[ranks[0]].digests[axes]:
            if key in explained:
                continue
            odd = find_odd({rank: reports[rank].digests[axes].get(key) for rank in ranks})
            if odd is not None:
                found.setdefault(odd, []).append(key)
    return found


def list_names(tensors: Sequence[TensorKey | str]) -> str:
    """The first names and the number of the others."""
    named = list(dict.fromkeys(map(str, tensors)))
    more = f" and {len(named) - _MOST_NAMED} more tensors" if len(named) > _MOST_NAMED else ""
    return ", ".join(named[:_MOST_NAMED]) + more


def with_host(reports: Sequence[RankReport], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(reports[rank].host for rank in ranks))
    return f"{list_ranks(ranks)} ({'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts[:_MOST_NAMED])})"
