"""Flags for checkpoints."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.intervals import IntervalSchedule
from megatron.config.ranges import require_at_least


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the state of the run is saved and loaded."""

    save: str | None = None
    """Directory for checkpoints: DIR/iter_0000100/ and DIR/latest_checkpointed_iteration.txt."""
    save_interval: str | None = None
    """Iterations between checkpoints (with --save: also one at the end and at a graceful stop). 500@0,2000@1000 saves
    at every 500th iteration up to 1000, then at every 2000th."""
    async_save: bool = False
    """Training waits only until the state is copied to host memory; a process beside each rank writes it, and at most
    one save is under way. The one at the end of a run is waited for."""
    async_save_timeout: int = 600
    """Seconds without progress after which a background writer is killed and its save reported as failed. One failure
    is a warning, two in a row end the run."""
    redundant_save: str | None = None
    """Second directory, best on another storage, to which every finished checkpoint is copied in the background; with
    --load equal to --save, both are searched."""
    save_retain_last: int | None = None
    """Delete checkpoints older than the newest this many, once these have been read back and found good."""
    save_retain_interval: int | None = None
    """Keep those at multiples of this many iterations for good, and delete others: all but the latest, or but those of
    --save-retain-last."""
    load: str | None = None
    """Directory to resume from; starts afresh when it holds no checkpoint yet."""
    load_hf: str | None = None
    """Directory of a Hugging Face Llama whose weights to start from where --load holds no checkpoint yet; each rank
    reads its own part."""
    pretrained_checkpoint: str | None = None
    """Directory of checkpoints of another run, whose latest weights to start from at iteration 0 where --load holds no
    checkpoint yet."""
    ckpt_step: int | None = None
    """Load this iteration instead of the latest."""
    checkpoint_fallback: bool = True
    """Where the latest checkpoint is damaged, say which file is and load the newest good one;
    --no-checkpoint-fallback fails instead. Nothing that is damaged is deleted."""
    exit_on_missing_checkpoint: bool = False
    """Fail when --load holds no checkpoint, instead of starting afresh."""
    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Accepted for Megatron-LM recipes, and in its sense: a checkpoint loads in any layout. (Its files are safetensors
    and a manifest, which Megatron-LM does not read, nor the other way round.)"""
    ckpt_fully_parallel_save: bool = True
    """States what is so: ranks write different parts."""
    dist_ckpt_optim_fully_reshardable: bool = True
    """States what is so: the optimizer's state loads in any layout."""
    verify_integrity: bool = True
    """States what is so: every file has a digest, which is compared before it is loaded."""
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
    use_checkpoint_args: bool = False
    """Take the architecture from the checkpoint that --load finds: its flags need not be given, and one that is given
    and differs is refused. Where there is no checkpoint yet (with --load-hf, too), the flags must give it."""

    @property
    def save_schedule(self) -> IntervalSchedule | None:
        """When to save, beside the end."""
        return None if self.save_interval is None else IntervalSchedule.parse("--save-interval", self.save_interval)

    @property
    def load_roots(self) -> tuple[str, ...]:
        """Where to look for a checkpoint, the first first; the redundant copies are of what this run saves."""
        if self.load is None:
            return ()
        return (self.load, self.redundant_save) if self.redundant_save and self.load == self.save else (self.load,)

    @property
    def deletes(self) -> bool:
        """Whether old checkpoints are deleted."""
        return self.save_retain_last is not None or self.save_retain_interval is not None

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        for flag, is_so in (
            ("--no-ckpt-fully-parallel-save", self.ckpt_fully_parallel_save),
            ("--no-dist-ckpt-optim-fully-reshardable", self.dist_ckpt_optim_fully_reshardable),
            ("--no-verify-integrity", self.verify_integrity),
        ):
            if not is_so:
                raise ConfigError(f"{flag} asks for another way to save and load, and there is one: remove it.")
        retained = {
            "--save-retain-last": self.save_retain_last,
            "--save-retain-interval": self.save_retain_interval,
        }
        require_at_least(1, {**retained, "--async-save-timeout": self.async_save_timeout})
        if self.save_interval is not None:
            IntervalSchedule.parse("--save-interval", self.save_interval)
        for flag, is_given in (
            ("--save-interval", self.save_interval is not None),
            ("--async-save", self.async_save),
            ("--redundant-save", self.redundant_save is not None),
            *((flag, value is not None) for flag, value in retained.items()),
        ):
            if is_given and self.save is None:
                raise ConfigError(f"{flag} needs --save with a directory.")
        if self.redundant_save is not None and self.redundant_save == self.save:
            raise ConfigError(f"--redundant-save {self.redundant_save} is --save itself: name another directory.")
        for flag, is_given in (
            ("--ckpt-step", self.ckpt_step is not None),
            ("--finetune", self.finetune),
            ("--use-checkpoint-args", self.use_checkpoint_args),
            ("--exit-on-missing-checkpoint", self.exit_on_missing_checkpoint),
            ("--no-checkpoint-fallback", not self.checkpoint_fallback),
        ):
            if is_given and self.load is None:
                raise ConfigError(f"{flag} needs --load with a directory.")
        for flag, is_given in (
            ("--load-hf", self.load_hf is not None),
            ("--exit-on-missing-checkpoint", self.exit_on_missing_checkpoint),
        ):
            if is_given and self.pretrained_checkpoint is not None:
                raise ConfigError(
                    f"--pretrained-checkpoint and {flag} differ on what a run without a checkpoint does: remove one."
                )
