"""Torch's SGD with momentum, whose weight decay is added to the gradient."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.flags import require_fraction, values_of
from megatron.update_rules.rule import Flags, ParameterFacts, Shard, UpdateRule

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

    def mup_obstacle(self) -> None:
        return None

    def learning_rate_factor(self, info: ParameterFacts) -> float:
        """Gradients of a hidden matrix have the size that its updates need (arXiv 2203.03466, tables 3 and 8)."""
        return info.fan_out_mult / info.fan_in_mult

    def state(self, weight: "Tensor") -> "dict[str, Tensor]":
        return {"momentum_buffer": weight.new_zeros(weight.shape)} if self._momentum else {}

    def update(self, shard: Shard, learning_rate: float, weight_decay: float, step: int) -> None:
        from torch.optim.sgd import sgd

        sgd(
            [shard.weight],
            [shard.gradient],
            [shard.state.get("momentum_buffer")],
            fused=True,
            weight_decay=weight_decay,
            momentum=self._momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
