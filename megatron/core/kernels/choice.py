"""The choice of one of several implementations of an operation: what a run requests of its kernels, what a candidate
states about itself, and which candidate is chosen, with the reason."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from megatron.config.precision import Wanted
from megatron.core.device import Compiler, Machine, Unavailable, device_is_broken
from megatron.core.kernels.trials import BrokenDevice, Trials, TrialSizes, run_trial
from megatron.core.ops.attention import CAUSAL, AttentionMask
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.backends.transformer_engine import TransformerEngine


T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """The chosen implementation of an operation, and the reason."""

    operation: str
    implementation: str
    reason: str
    is_forced: bool = False
    """Whether a flag requires it."""
    is_stand_in: bool = False
    """Whether a better one is not available here."""


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """An implementation of an operation."""

    name: str
    make: Callable[[], T]
    """Returns the implementation, or raises :class:`Unavailable`. Quick: it runs nothing on the device."""
    merit: str
    """Why it is preferred where it is available."""
    is_automatic: bool = True
    """Whether it may be chosen without a flag that requires it."""
    obstacle: str | None = None
    """Why the run's device, dtypes or flags rule it out, whatever is installed; None if they do not. A plan refuses it
    as the run does."""
    trial: Callable[[T], None] | None = None
    """Compares it with the reference on the device, before it is chosen."""
    cost: str = ""
    """Its cost in this run, for the log; empty if there is none to report."""
    is_broken: Callable[[], bool] = device_is_broken
    """Whether this process cannot use its GPU any longer, after a trial that ended with an error."""
    simulated: Callable[[Compiler], T] | None = None
    """Returns what replaces it on tensors without memory: torch's operations that launch and allocate as much, if the
    given compiler makes one launch of a function. None: the implementation itself, which needs no package and no
    compiler."""

    def made(self, compiler: Compiler | None = None) -> T:
        """The implementation, or what replaces it if ``compiler`` simulates; raises :class:`Unavailable`."""
        if self.obstacle is not None:
            raise Unavailable(self.obstacle)
        return self.make() if compiler is None or self.simulated is None else self.simulated(compiler)

    def ready(self, operation: str, compiler: Compiler | None = None) -> T:
        """The implementation after its trial. Raises :class:`Unavailable`, or :class:`ConfigError` if the trial has
        left the process without a usable GPU."""
        try:
            made, trial = self.made(compiler), self.trial
            if trial is not None and compiler is None:
                run_trial(lambda: trial(made), self.is_broken)
        except BrokenDevice as error:
            raise ConfigError(
                f"The trial of --kernel {operation}={self.name} ended with an error after which this process cannot "
                f"use its GPU ({error}): start again with another implementation (--kernel {operation}=...)."
            ) from error
        return made

    def choice(self, operation: str, reason: str, is_forced: bool = False, is_stand_in: bool = False) -> Choice:
        reason = f"{reason}; {self.cost}" if self.cost else reason
        return Choice(operation, self.name, reason, is_forced, is_stand_in)


def choose(
    operation: str, candidates: Sequence[Candidate[T]], wanted: Wanted | None, compiler: Compiler | None = None
) -> tuple[T, Choice]:
    """The first available one of ``candidates``, or the one that is wanted.

    Raises :class:`ConfigError` if that one is not available, and names those that are. On a simulated machine, whose
    ``compiler`` is given, the first available one replaces a wanted one that only this layout cannot use: a search over
    layouts goes on.
    """
    if wanted is not None:
        candidate = next(candidate for candidate in candidates if candidate.name == wanted.implementation)
        try:
            made = candidate.ready(operation, compiler)
            return made, candidate.choice(operation, f"asked for by {wanted.flag}", is_forced=True)
        except Unavailable as error:
            if compiler is None or candidate.obstacle is not None:
                raise _refusal(candidates, wanted, error, compiler) from error
    # The log says why those before the chosen one are not available.
    obstacles = []
    for candidate in candidates:
        if not candidate.is_automatic:
            continue
        try:
            made = candidate.ready(operation, compiler)
        except Unavailable as error:
            obstacles.append(f"{candidate.name}: {error}")
            continue
        passed_over = f" (not {'; not '.join(obstacles)})" if obstacles else ""
        return made, candidate.choice(operation, candidate.merit + passed_over, is_stand_in=bool(obstacles))
    raise ConfigError(f"No implementation of {operation} is available: {'; '.join(obstacles)}.")


def _refusal(
    candidates: Sequence[Candidate[T]], wanted: Wanted, obstacle: Unavailable, compiler: Compiler | None
) -> ConfigError:
    """Why the implementation that is wanted cannot be used, and which can."""
    others = []
    for candidate in (one for one in candidates if one.name != wanted.implementation):
        # Only made, not tried: the trials of all others would cost the caller seconds to word an error.
        with suppress(Unavailable):
            candidate.made(compiler)
            others.append(candidate.name)
    return ConfigError(
        f"{wanted.flag} is not available: {obstacle}; available: {', '.join(others)}: use one of these, or remove it."
    )


def short_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def table(choices: Sequence[Choice]) -> list[str]:
    """A line for each choice, in columns."""
    columns = [
        max((len(getattr(choice, name)) for choice in choices), default=0) for name in ("operation", "implementation")
    ]
    return [
        f"  {choice.operation:{columns[0]}}  {choice.implementation:{columns[1]}}  {choice.reason}"
        for choice in choices
    ]


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a layer on one rank."""

    count: int
    hidden_size: int
    width: int
    """``f / etp``."""
    rows: int
    """Tokens that an expert receives from a microbatch on average."""

    @property
    def flops(self) -> float:
        """FLOPs of a GEMM of an expert's second matrix, the smaller one."""
        return 2.0 * self.rows * self.hidden_size * self.width


@dataclass(frozen=True)
class KernelRequest:
    """The machine, dtypes and sizes that kernels must support."""

    machine: Machine
    weight: torch.dtype
    """Dtype of weights and activations."""
    gradient: torch.dtype
    """Dtype of gradient buffers."""
    sizes: TrialSizes
    needs_log_sum_exp: bool = False
    """Whether attention must return the log-sum-exp (context parallelism, CPU offload)."""
    masks_attention: bool = False
    """Whether attention stays inside documents, whose lengths differ in every microbatch, or inside chunks."""
    mask: AttentionMask = CAUSAL
    """The mask of the layers that have a window, if some have one."""
    resets_positions: bool = False
    """Whether positions restart at documents, so that each sequence of a microbatch has its own rotations."""
    attention_backend: str = "auto"
    engine: "TransformerEngine | None" = None
    fp8: bool = False
    """Whether linear layers of this project compute in FP8."""
    has_delayed_scales: bool = False
    """Whether FP8 linear layers of this project quantise inputs with scales that are known before the inputs."""
    has_block_scales: bool = False
    """Whether FP8 linear layers of this project have a scale for each block."""
    experts: ExpertSizes | None = None
    """The experts of a layer on this rank; None: the model has no experts."""
    trials: Trials = field(default_factory=Trials)

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def on_gpu(self) -> bool:
        return self.machine.on_gpu

    def trial(self, trial: Callable[..., None], *arguments: Any) -> Callable[[Any], None] | None:
        """The ``trial`` of a kernel with further ``arguments``; None if this process cannot run it."""
        return (lambda kernel: trial(kernel, *arguments)) if self.machine.can_try else None

    @cached_property
    def compiler_obstacle(self) -> str | None:
        """Why ``torch.compile`` does not work on the device; None if it does. Tried once for all operations."""
        if self.machine.missing_for_inductor is not None:
            return f"torch.compile needs {self.machine.missing_for_inductor}"
        return self.trials.compiler(self.device) if self.machine.can_try else None
