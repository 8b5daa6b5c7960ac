"""Torch's SGD with momentum, whose weight decay is added to the gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.flags import values_of
from megatron.ranges import require_fraction
from megatron.update_rules.rule import Flags, Group, UpdateContext, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SgdFlags(Flags):
    """Flags of ``--optimizer sgd``."""

    sgd_momentum: float = 0.9
    """Momentum of --optimizer sgd."""

    def check(self, optimizer: str) -> None:
        require_fraction(values_of(self, "sgd_momentum"))


class Sgd(UpdateRule):
    name = "sgd"
    flags = SgdFlags

    def __init__(self, flags: SgdFlags) -> None:
        self._momentum = flags.sgd_momentum

    def state(self, weight: "Tensor") -> "dict[str, Tensor]":
        return {"momentum_buffer": weight.new_zeros(weight.shape)} if self._momentum else {}

    def bind(self, groups: Sequence[Group], context: UpdateContext) -> Callable[[int], None]:
        from torch.optim.sgd import sgd

        def update(step: int) -> None:
            for group in groups:
                sgd(
                    [shard.weight for shard in group.shards],
                    [shard.gradient for shard in group.shards],
                    [shard.state.get("momentum_buffer") for shard in group.shards],
                    fused=True,
                    weight_decay=group.weight_decay,
                    momentum=self._momentum,
                    lr=group.learning_rate,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                )

        return update
