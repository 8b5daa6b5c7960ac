"""Training runs on real ranks in which one bit of one rank is flipped, and what the check of the state finds."""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal, cast

import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.training import OptimizerConfig
from megatron.core.precision import build_loss_scaler
from megatron.core.topology import Topology
from megatron.errors import SilentCorruptionError
from megatron.features.known_product.listener import KnownAnswer
from megatron.features.replicas.listener import StateCheck, training_state
from megatron.features.replicas.state import GRADIENT, HeldTensor
from megatron.training.checkpoints.saved_run import Progress
from megatron.training.context import TrainModule
from megatron.training.loop.trainer import IterationResult, Trainer
from tests.parallel.layout_run import Layout, Task, Trace, build, make_step, place_in

FP32 = Task(OptimizerConfig(weight_decay=0.1), precision=PrecisionConfig())
BF16 = replace(FP32, precision=PrecisionConfig(bf16=True))
INTERVAL = 3
"""Updates between two checks."""

Kind = Literal["weight", "gradient", "exp_avg", "exp_avg_sq", "main parameter"]
Moment = Literal["before the check", "a step earlier", "before the reduction"]
"""When the bit flips: between the update before the checked one and the check; before the update before that one; or in
a gradient that is not reduced yet, in the step of the check."""


@dataclass(frozen=True)
class Flip:
    """A bit of a random element of a tensor of one kind on one rank."""

    kind: Kind
    bit: int
    moment: Moment = "before the check"
    only_common: bool = False
    """Choose a tensor that tensor-parallel ranks have in common."""


@dataclass(frozen=True)
class Outcome:
    """What one rank knows about a flip."""

    rank: int
    """The rank whose bit was flipped."""
    target: str
    is_present: bool
    """Whether replicas had other bits at the check, or a tensor was not as after the last update."""
    named: tuple[int, ...] | None
    """The ranks that the check named; None if it found nothing."""
    message: str
    is_finite: bool
    """Whether the loss of the checked step was."""


class Run:
    """A run of this rank that steps and checks as the trainer does."""

    def __init__(self, task: Task, layout: Layout, interval: int = INTERVAL) -> None:
        self.task, self.layout, self.topology = task, layout, place_in(layout)
        executor, data_parallel, optimizer = build(task, layout, self.topology)
        optimizer.trace = Trace()
        self.module = TrainModule(
            executor,
            data_parallel,
            optimizer,
            build_loss_scaler(task.precision),
            self.topology,
            optimizer.fp8,
            optimizer.experts,
        )
        parallel = ParallelConfig(data_parallel_sharding_strategy=layout.strategy)
        stand_in = SimpleNamespace(
            module=self.module,
            context=SimpleNamespace(
                topology=self.topology, control=self.topology.control, config=RunConfig(parallel=parallel)
            ),
            state=SimpleNamespace(progress=Progress()),
        )
        self.trainer = cast(Trainer, stand_in)
        self.progress = stand_in.state.progress
        known = KnownAnswer(self.topology.control, [], 0.0)
        self.check = StateCheck(self.topology, interval, None, False, known)
        self.compares = False
        """Whether :attr:`differs` is updated just before each check."""
        self.differs = False
        """Whether replicas had other bits at a check, by comparing hashes of all."""

    def step(self, flips_gradient: Iterable[tuple[HeldTensor, int, int]] = ()) -> bool:
        """Train an iteration; the check raises. Returns whether the loss was finite."""

        def before_update(gradient_factor: float) -> None:
            for held, place, bit in flips_gradient:
                flip(held.tensor, place, bit)
            if self.compares and (self.progress.iteration + 1) % self.check.interval == 0:
                self.differs = self.differs or replicas_differ(self.topology, self.tensors(with_gradients=True))
            self.check.before_update(self.trainer, gradient_factor)

        iteration = self.progress.iteration
        outcome = make_step(self.module, self.task, self.layout, iteration, before_update=before_update)
        if outcome.is_fault_of_all:
            self.check.on_suspicion(self.trainer, "a fault")
        self.progress.iteration += 1
        self.check.on_iteration(self.trainer, cast(IterationResult, None))
        return not outcome.is_fault

    def tensors(self, with_gradients: bool = False) -> list[HeldTensor]:
        self.module.data_parallel.finish_param_all_gather()
        return list(training_state(self.trainer).tensors(with_gradients))


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip ``bit`` of element ``place``."""
    octets = tensor.view(torch.uint8)
    octets[place * tensor.itemsize + bit // 8] ^= 1 << bit % 8


def bits_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def replicas_differ(topology: Topology, tensors: Sequence[HeldTensor]) -> bool:
    """Whether any rank has other bits than the others that hold the same, by comparing hashes of all; a collective."""
    mine = {one.key: (one.holders, bits_of(one.tensor)) for one in tensors}
    everyone = topology.control.all_gather_object(mine)
    return any(
        everyone[other][key][1] != found
        for rank, held in enumerate(everyone)
        for key, (holders, found) in held.items()
        for other in topology.grid.group(rank, holders)
    )


def chosen(held: Sequence[HeldTensor], one: Flip, dice: random.Random) -> tuple[HeldTensor, int]:
    """The tensor and the element to flip."""
    candidates = [tensor for tensor in held if tensor.kind == one.kind and tensor.tensor.numel()]
    if one.only_common:
        candidates = [tensor for tensor in candidates if "tp" in tensor.holders]
    target = dice.choice(candidates)
    return target, dice.randrange(target.tensor.numel())


def flips_on_ranks(task: Task, layout: Layout, flips: Sequence[Flip], seed: int) -> list[Outcome]:
    """The outcome of each flip, all from the same trained state."""
    run = Run(task, layout)
    for _ in range(INTERVAL - 2):
        run.step()
    saved = [(held.tensor, held.tensor.clone()) for held in run.tensors()]
    start = run.progress.iteration, run.module.optimizer.num_steps
    outcomes = []
    for number, one in enumerate(flips):
        outcomes.append(_outcome(run, one, random.Random(f"{seed} {number}")))
        for tensor, copy in saved:
            tensor.copy_(copy)
        run.progress.iteration, run.module.optimizer.num_steps = start
    return outcomes


def _outcome(run: Run, one: Flip, dice: random.Random) -> Outcome:
    """Step twice, of which the second is checked, with the flip on one rank."""
    topology = run.topology
    victim = dice.randrange(topology.grid.world_size)
    held = run.tensors(with_gradients=True)
    target, place = chosen(held, one, dice)
    name = topology.control.all_gather_object(f"{target.key}[{place}]")[victim]
    mine = [(target, place, one.bit)] if topology.rank == victim else []
    is_gradient = one.kind == GRADIENT
    error: SilentCorruptionError | None = None
    is_finite, has_changed, run.compares, run.differs = False, False, True, False
    try:
        if one.moment == "a step earlier" and not is_gradient:
            _apply(mine)
        run.step(mine if one.moment == "a step earlier" and is_gradient else ())
        resting = {held.key: bits_of(held.tensor) for held in run.tensors() if held.rests}
        in_step: list[tuple[HeldTensor, int, int]] = []
        if one.moment == "before the check":
            if is_gradient:
                in_step = mine
            else:
                _apply(mine)
                now = {held.key: bits_of(held.tensor) for held in run.tensors() if held.rests}
                has_changed = any(topology.control.all_gather_object(now != resting))
        elif one.moment == "before the reduction":
            _flip_before_reduction(run, mine)
        is_finite = run.step(in_step)
    except SilentCorruptionError as raised:
        error = raised
    # Also where the loss was not finite, so that no update was to be checked.
    is_present = has_changed or run.differs or replicas_differ(topology, run.tensors())
    run.compares = False
    return Outcome(victim, name, is_present, None if error is None else error.ranks, str(error or ""), is_finite)


def _apply(flips: Sequence[tuple[HeldTensor, int, int]]) -> None:
    for held, place, bit in flips:
        flip(held.tensor, place, bit)


def _flip_before_reduction(run: Run, flips: Sequence[tuple[HeldTensor, int, int]]) -> None:
    """Flip a bit of the gradient of this rank alone in the next step, after its backward pass."""
    original = run.module.data_parallel.finish_grad_sync

    def finish() -> None:
        _apply(flips)
        run.module.data_parallel.finish_grad_sync = original  # type: ignore[method-assign]
        original()

    run.module.data_parallel.finish_grad_sync = finish  # type: ignore[method-assign]


def clean_run(task: Task, layout: Layout, steps: int, interval: int) -> int:
    """Checks without an alarm in ``steps`` iterations; every alarm raises."""
    run = Run(task, layout, interval)
    for _ in range(steps):
        assert run.step()
    return steps // interval


def every_bit(kinds: Iterable[Kind], bits: Iterable[int], moments: Iterable[Moment], common: bool) -> Iterator[Flip]:
    """The product."""
    bits, moments = tuple(bits), tuple(moments)
    for kind in kinds:
        for moment in moments:
            if kind == "gradient" or moment != "before the reduction":
                for bit in bits:
                    yield Flip(kind, bit, moment, common)
