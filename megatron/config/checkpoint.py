"""Flags for checkpoints."""

from dataclasses import dataclass

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the state of the run is saved and loaded."""

    save: str | None = None
    """Directory for checkpoints: DIR/iter_0000100/ and DIR/latest_checkpointed_iteration.txt."""
    save_interval: int | None = None
    """Iterations between checkpoints (with --save: also one at the end and at a graceful stop)."""
    load: str | None = None
    """Directory to resume from; starts afresh when it holds no checkpoint yet."""
    ckpt_step: int | None = None
    """Load this iteration instead of the latest."""
    checkpoint_fallback: bool = True
    """Where the latest checkpoint is damaged, say which file is and load the newest good one;
    --no-checkpoint-fallback fails instead. Nothing that is damaged is deleted."""
    exit_on_missing_checkpoint: bool = False
    """Fail when --load holds no checkpoint, instead of starting afresh."""
    save_optim: bool = True
    """Save the optimizer's state; --no-save-optim saves weights only."""
    save_rng: bool = True
    """Save the random-number state."""
    load_optim: bool = True
    """Load the optimizer's state; --no-load-optim starts it afresh."""
    load_rng: bool = True
    """Load the random-number state."""
    finetune: bool = False
    """Load the weights only and start at iteration 0."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(1, {"--save-interval": self.save_interval})
        if self.save_interval is not None and self.save is None:
            raise ConfigError("--save-interval needs --save with a directory.")
        for flag, is_given in (
            ("--ckpt-step", self.ckpt_step is not None),
            ("--finetune", self.finetune),
            ("--exit-on-missing-checkpoint", self.exit_on_missing_checkpoint),
            ("--no-checkpoint-fallback", not self.checkpoint_fallback),
        ):
            if is_given and self.load is None:
                raise ConfigError(f"{flag} needs --load with a directory.")
