"""The flag for the comparison of replicas."""

from dataclasses import dataclass

from megatron.flags import require_at_least, values_of


@dataclass(frozen=True)
class ReplicaFlags:
    """Replicas."""

    check_replicas_interval: int = 100
    """Compare the bits of weights, gradients and optimizer state over the ranks that hold the same, and with the bits
    after the last update, every this many iterations, and whenever a checkpoint is saved; 0 disables this."""

    def check(self) -> None:
        require_at_least(0, values_of(self, "check_replicas_interval"))
