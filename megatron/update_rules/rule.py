"""The interface between update rules and the optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import megatron.update_rules

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    MatrixUpdates = Callable[
        [Mapping[str, Tensor], Callable[["ParameterFacts", Tensor], Tensor]], Iterator[tuple[str, Tensor]]
    ]
    """A function of this rank's shards by name, and of a function of a matrix, whose results it yields as shards."""

Kind = TypeVar("Kind")

SLICE = 1 << 24
"""Elements that an elementwise rule updates at once, which bounds the memory of copies in another dtype: 64 MiB each in
fp32."""


class ParameterFacts(Protocol):
    """The facts that a rule reads of a parameter: a part of ``ParameterInfo`` of the core, which explains them."""

    @property
    def name(self) -> str: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def local_shape(self) -> tuple[int, ...]: ...
    @property
    def section_rows(self) -> list[int]: ...
    @property
    def weight_decay(self) -> bool: ...
    @property
    def is_vocabulary(self) -> bool: ...
    @property
    def fan_in_mult(self) -> float: ...
    @property
    def fan_out_mult(self) -> float: ...


class Ranks(Protocol):
    """The collectives that a rule may call: a part of ``Communicator`` of the core."""

    rank: int
    size: int

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """The sum over the ranks, in place."""

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """The tensors of all ranks, concatenated along dim 0."""


@dataclass
class Shard:
    """The elements of one parameter that this rank updates; all tensors are 1-D and of one size."""

    info: ParameterFacts
    weight: "Tensor"
    """The master weights."""
    gradient: "Tensor"
    """Possibly narrower than the weights."""
    state: "dict[str, Tensor]"

    def slices(self) -> "Iterator[Shard]":
        """The shard in slices of at most :data:`SLICE` elements."""
        tensors = (tensor.split(SLICE) for tensor in (self.weight, self.gradient, *self.state.values()))
        for weight, gradient, *state in zip(*tensors):
            yield Shard(self.info, weight, gradient, dict(zip(self.state, state)))


def batches(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """The slices of ``shards``, in batches of at most :data:`SLICE` elements: a batch is one launch."""
    batch: list[Shard] = []
    size = 0
    for part in (part for shard in shards for part in shard.slices()):
        if batch and size + part.weight.numel() > SLICE:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.weight.numel()
    if batch:
        yield batch


@dataclass
class Group:
    """Shards that are updated with the same learning rate and weight decay."""

    shards: list[Shard]
    weight_decay: float
    learning_rate: float = 0.0


@dataclass(frozen=True)
class UpdateContext:
    """Functions and ranks that an update may use in addition to the shards."""

    adam: "Callable[[Sequence[dict[str, Any]], tuple[float, float], float], Optimizer]"
    """AdamW on parameter groups, with its betas and its epsilon."""
    tensor_parallel: Ranks
    whole_matrices: "Callable[[Callable[[ParameterFacts], bool]], MatrixUpdates]"
    """Updates of whole matrices of those dense parameters for which a function is true. Collective: every rank exhausts
    their iterator, also without shards."""


class Flags:
    """Base of the flags of one rule: a frozen dataclass whose fields have a default and a docstring each."""

    def check(self, optimizer: str) -> None:
        """Raise :class:`ConfigError` for an invalid value; ``optimizer`` is the rule in use."""


class UpdateRule(ABC):
    """A rule with the values of its flags. The names of its state tensors are their names in checkpoints."""

    name: ClassVar[str]
    """Value of ``--optimizer``."""
    flags: ClassVar[type[Flags]] = Flags
    is_elementwise: ClassVar[bool] = True
    """False for a rule that needs whole matrices: it updates no experts, since those of a layer are two stacks of
    matrices, and no shards in host memory."""

    @classmethod
    def of(cls, config: Any) -> Self:
        return cls(*([take_flags(config, cls.flags)] if cls.flags is not Flags else []))

    def rule_for(self, info: ParameterFacts) -> "UpdateRule":
        return self

    def mup_obstacle(self) -> str | None:
        """Why the rule does not support muP, and what to use instead; None for a rule with a
        :meth:`learning_rate_factor`."""
        if type(self).learning_rate_factor is not UpdateRule.learning_rate_factor:
            return None
        return "how its updates grow with the width is not known: use adam, or remove --use-mup."

    def learning_rate_factor(self, info: ParameterFacts) -> float:
        """Factor of the learning rate of a parameter with which updates keep their size over widths (muP). It must be 1
        for a parameter whose fan-in and fan-out are those of the base model, as without ``--use-mup``."""
        return 1.0

    @abstractmethod
    def state(self, weight: "Tensor") -> "dict[str, Tensor]":
        """The initial state tensors for ``weight``, each of its size."""

    def bind(self, groups: Sequence[Group], context: UpdateContext) -> Callable[[int], None]:
        """The update of all shards of ``groups``, a function of the number of the update (from 1).

        All ranks bind the same rules in the same order, also without shards.
        """

        def update(step: int) -> None:
            for group in groups:
                for part in (part for shard in group.shards for part in shard.slices()):
                    wide = replace(part, gradient=part.gradient.to(part.weight.dtype))
                    self.update(wide, group.learning_rate, group.weight_decay, step)

        return update

    def update(self, shard: Shard, learning_rate: float, weight_decay: float, step: int) -> None:
        """Update one slice of a shard in place, whose gradients have the dtype of the weights; an elementwise rule
        defines it instead of :meth:`bind`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither update nor bind")


def take_flags(config: Any, kind: type[Kind]) -> Kind:
    """The fields of the dataclass ``kind`` from a ``config`` that has them all."""
    return kind(**{one.name: getattr(config, one.name) for one in fields(kind)})  # type: ignore[arg-type]


def update_rules() -> dict[str, type[UpdateRule]]:
    """Every rule by name, in the order of their files; rules that are defined elsewhere follow."""
    for module in iter_modules(megatron.update_rules.__path__, f"{megatron.update_rules.__name__}."):
        import_module(module.name)
    return {rule.name: rule for rule in UpdateRule.__subclasses__()}


def rule_flags() -> list[type[Flags]]:
    return [rule.flags for rule in update_rules().values() if rule.flags is not Flags]


def build_rule(config: Any) -> UpdateRule:
    """The rule of ``--optimizer``, with its flags in ``config``."""
    return update_rules()[config.optimizer].of(config)
