"""Whose architecture a run has: that of its flags or, with ``--use-checkpoint-args``, that of its checkpoint."""

from collections.abc import Callable
from dataclasses import asdict, replace

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.core.run_on_ranks import run_on_rank0
from megatron.errors import ConfigError
from megatron.training.checkpoints.comparison import check_architecture
from megatron.training.checkpoints.saved_run import SavedRun, look_up_saved_run
from megatron.training.context import RunContext

FlagsOver = Callable[[ModelConfig], RunConfig]
"""Reads the command line once more, over other defaults of the model's flags."""


def resolve_architecture(context: RunContext, flags_over: FlagsOver) -> RunConfig:
    """``config`` with an architecture that is known and checked; all ranks call it.

    With ``--use-checkpoint-args`` the model's flags that are not given take the values of the checkpoint. Raises
    :class:`~megatron.errors.UserError` where one that is given differs.
    """
    if not context.config.checkpoint.use_checkpoint_args:
        return context.config
    # One rank looks, so that all take the same and the file system is asked once. Another checkpoint may be loaded in
    # the end, because this one turns out damaged: loading compares its architecture again.
    return run_on_rank0(context.world, lambda: _resolve(context, flags_over))


def _resolve(context: RunContext, flags_over: FlagsOver) -> RunConfig:
    config, world_size, log_rank0 = context.config, context.world.size, context.log_rank0
    saved = look_up_saved_run(config.checkpoint)
    if saved is None:
        _check_flags_alone(config, world_size)
        log_rank0("architecture: from the command line, since there is no checkpoint yet")
        return config
    architecture = saved.state.architecture
    config = flags_over(_as_defaults(architecture, config.seq_length))
    _check_given_flags(config.model, architecture, saved)
    config.check_architecture(world_size)
    log_rank0(f"architecture: from the checkpoint of iteration {saved.iteration} in {saved.root}")
    return config


def _check_flags_alone(config: RunConfig, world_size: int) -> None:
    try:
        config.check_architecture(world_size)
    except ConfigError as error:
        raise ConfigError(
            f"--load {config.checkpoint.load} has no checkpoint yet for --use-checkpoint-args, and {error}"
        ) from None


def _as_defaults(architecture: TransformerConfig, seq_length: int) -> ModelConfig:
    """The flags of ``architecture``, but for a longest sequence that the run exceeds, which no weight depends on."""
    flags = ModelConfig.of(architecture)
    return flags if architecture.max_position_embeddings >= seq_length else replace(flags, max_position_embeddings=None)


def _check_given_flags(model: ModelConfig, architecture: TransformerConfig, saved: SavedRun) -> None:
    there = asdict(architecture)
    # What a preset leaves open (None) follows from other flags, and is compared when the checkpoint is loaded.
    given = {name: value for name, value in asdict(model).items() if name in there and value is not None}
    surplus = "what differs" if model.model is None else f"--model {model.model} and what differs"
    check_architecture(given, there, f"The checkpoint under {saved.root}", remedy=f"leave out {surplus}")
