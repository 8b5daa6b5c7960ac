"""Flags for checkpoints."""

from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.flags import IntervalSchedule, changed_flags, require_at_least, require_flag, values_of
from megatron.urls import check_place, refuse_urls, same_place


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: where, when and what to save and load."""

    save: str | None = None
    """Directory DIR for checkpoints: DIR/iter_0000100/ and DIR/latest_checkpointed_iteration.txt."""
    save_interval: str | None = None
    """Iterations between checkpoints. 500@0,2000@1000 saves at every 500th iteration up to 1000, then at every 2000th.
    --save also saves at the end of the run and at a graceful stop."""
    async_save: bool = False
    """Save in the background: training waits until the state is copied to host memory, and a writer process of each
    rank writes the files. At most one save runs at a time, and the run waits for its last one."""
    async_save_timeout: int = 600
    """Seconds without progress after which a background writer is killed and its save fails."""
    max_failed_saves: int = 3
    """Number of consecutive failed saves to tolerate (for example a full disk or a dead background writer). Each prints
    a warning, and the next save interval tries again; one more failed save ends the run. The last save of the run is
    tried three times and must succeed."""
    redundant_save: tuple[str, ...] = ()
    """Directories and URLs (s3://bucket/run), preferably on other storage, to which every finished checkpoint is copied
    in the background. With --load equal to --save, the run loads the newest checkpoint of all of them."""
    save_retain_last: int | None = None
    """Keep this many of the newest checkpoints and delete older ones, after the kept ones have been verified."""
    save_retain_interval: int | None = None
    """Keep only checkpoints at multiples of this many iterations, the latest one and the last --save-retain-last."""
    load: str | None = None
    """Directory or URL (s3://bucket/run) with the checkpoints to resume from. It is an error if it has none, unless the
    run saves there (--save, --redundant-save): then the run starts at iteration 0, and the same command resumes it."""
    load_hf: str | None = None
    """Directory of a Hugging Face model (docs/checkpoints.md) to start from if --load has no checkpoint yet; each rank
    reads only its shards. Architecture and tokenizer come from the directory too: their flags are optional, and an
    error if they differ."""
    load_hf_text_only: bool = False
    """Accept a multimodal model in --load-hf, and load only its text model."""
    pretrained_checkpoint: str | None = None
    """Directory or URL with the checkpoints of another run: start at iteration 0 from its latest weights if --load has
    no checkpoint yet."""
    ckpt_step: int | None = None
    """Load this iteration instead of the latest."""
    checkpoint_fallback: bool = True
    """If the latest checkpoint is damaged, print the damaged file and load the newest undamaged checkpoint;
    --no-checkpoint-fallback fails instead. Damaged checkpoints are never deleted."""
    exit_on_missing_checkpoint: bool = False
    """Fail if --load has no checkpoint, also if the run saves there."""
    save_optim: bool = True
    """Save the optimizer state; --no-save-optim saves only weights."""
    save_rng: bool = True
    """Save the random-number state."""
    load_optim: bool = True
    """Load the optimizer state; --no-load-optim initializes it."""
    load_rng: bool = True
    """Load the random-number state."""
    finetune: bool = False
    """Load only the weights of --load and start at iteration 0."""
    use_checkpoint_args: bool = False
    """Read the architecture from the checkpoint of --load. An architecture flag is optional, and an error if it differs
    from the checkpoint. The first start of a run that saves to --load needs the architecture flags or --load-hf."""

    @property
    def save_schedule(self) -> IntervalSchedule | None:
        """Iterations to save at, in addition to the end of the run."""
        return None if self.save_interval is None else IntervalSchedule.parse("--save-interval", self.save_interval)

    @property
    def load_roots(self) -> tuple[str, ...]:
        """Directories and URLs to search for a checkpoint, in order of preference."""
        if self.load is None:
            return ()
        resumes = self.save is not None and same_place(self.load, self.save)
        return (self.load, *self.redundant_save) if resumes else (self.load,)

    @property
    def saves_to_load(self) -> bool:
        """Whether the run saves to --load, where its first start finds no checkpoint."""
        places = self.redundant_save if self.save is None else (self.save, *self.redundant_save)
        return self.load is not None and any(same_place(self.load, place) for place in places)

    @property
    def deletes(self) -> bool:
        """Whether old checkpoints are deleted."""
        return self.save_retain_last is not None or self.save_retain_interval is not None

    def _check_paths(self) -> None:
        if self.save is not None:
            # A checkpoint is committed by renaming its directory.
            refuse_urls(values_of(self, "save"), "use a directory, and set --redundant-save to the URL")
        refuse_urls(values_of(self, "load_hf"), "copy the model to a local directory, whose files can be mapped")
        for flag, place in values_of(self, "load", "pretrained_checkpoint").items():
            if place is not None:
                check_place(flag, place)
        for number, place in enumerate(self.redundant_save):
            check_place("--redundant-save", place)
            if place == self.save:
                raise ConfigError(f"--redundant-save {place} is the directory of --save: use another one.")
            if place.rstrip("/") in [other.rstrip("/") for other in self.redundant_save[:number]]:
                raise ConfigError(f"--redundant-save {place} is given twice: remove one of them.")

    def check(self) -> None:
        require_at_least(1, values_of(self, "save_retain_last", "save_retain_interval", "async_save_timeout"))
        require_at_least(0, values_of(self, "max_failed_saves"))
        if self.save_interval is not None:
            IntervalSchedule.parse("--save-interval", self.save_interval)
        saves = ("save_interval", "async_save", "redundant_save", "save_retain_last", "save_retain_interval")
        require_flag("--save with a directory", self.save is not None, changed_flags(self, *saves))
        self._check_paths()
        loads = ("ckpt_step", "finetune", "use_checkpoint_args", "exit_on_missing_checkpoint", "checkpoint_fallback")
        require_flag("--load with a directory", self.load is not None, changed_flags(self, *loads))
        text_only = changed_flags(self, "load_hf_text_only")
        require_flag("--load-hf with a directory", self.load_hf is not None, text_only)
        for flag in changed_flags(self, "load_hf", "exit_on_missing_checkpoint"):
            if self.pretrained_checkpoint is not None:
                raise ConfigError(f"--pretrained-checkpoint and {flag} exclude each other: remove one of them.")
