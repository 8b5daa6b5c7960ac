"""Whose architecture a run has: that of its flags or, with ``--use-checkpoint-args``, that of its checkpoint."""

from collections.abc import Callable
from dataclasses import asdict, replace

from megatron.checkpoint.conversion import saved_architecture
from megatron.config.errors import ConfigError
from megatron.config.model import LlamaConfig, ModelConfig
from megatron.config.run import RunConfig
from megatron.core.communication import Communicator
from megatron.training.description import Say
from megatron.training.launch import on_first_rank
from megatron.training.state import SavedRun, check_architecture, look_up_saved_run

FlagsOver = Callable[[ModelConfig], RunConfig]
"""Reads the command line once more, over other defaults of the model's flags."""


def settle_architecture(config: RunConfig, flags_over: FlagsOver, world: Communicator, say: Say) -> RunConfig:
    """``config`` with an architecture that is known and checked; all ranks call it.

    With ``--use-checkpoint-args`` the model's flags that are not given take the values of the checkpoint. Raises
    :class:`~megatron.config.errors.UserError` where one that is given differs.
    """
    if not config.checkpoint.use_checkpoint_args:
        return config
    # One rank looks, so that all take the same and the file system is asked once. Another checkpoint may be loaded in
    # the end, because this one turns out damaged: loading compares its architecture again.
    return on_first_rank(world, lambda: _settle(config, flags_over, world.size, say))


def _settle(config: RunConfig, flags_over: FlagsOver, world_size: int, say: Say) -> RunConfig:
    saved = look_up_saved_run(config.checkpoint)
    if saved is None:
        _check_flags_alone(config, world_size)
        say("architecture: that of the flags, since there is no checkpoint yet")
        return config
    architecture = saved_architecture(saved.state)
    config = flags_over(_as_defaults(architecture, config.seq_length))
    _check_given_flags(config.model, architecture, saved)
    config.check_architecture(world_size)
    say(f"architecture: that of the checkpoint of iteration {saved.iteration} under {saved.root}")
    return config


def _check_flags_alone(config: RunConfig, world_size: int) -> None:
    try:
        config.check_architecture(world_size)
    except ConfigError as error:
        raise ConfigError(
            f"--load {config.checkpoint.load} holds no checkpoint yet for --use-checkpoint-args, and {error}"
        ) from None


def _as_defaults(architecture: LlamaConfig, seq_length: int) -> ModelConfig:
    """The flags of ``architecture``, but for a longest sequence that the run exceeds, which no weight depends on."""
    flags = ModelConfig.of(architecture)
    return flags if architecture.max_position_embeddings >= seq_length else replace(flags, max_position_embeddings=None)


def _check_given_flags(model: ModelConfig, architecture: LlamaConfig, saved: SavedRun) -> None:
    there = asdict(architecture)
    # What a preset leaves open (None) follows from other flags, and is compared when the checkpoint is loaded.
    given = {name: value for name, value in asdict(model).items() if name in there and value is not None}
    surplus = "what differs" if model.model is None else f"--model {model.model} and what differs"
    check_architecture(given, there, f"The checkpoint under {saved.root}", remedy=f"leave out {surplus}")
