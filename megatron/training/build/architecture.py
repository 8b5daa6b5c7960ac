"""The architecture of a run: from its flags or, with ``--use-checkpoint-args``, from its checkpoint."""

from collections.abc import Callable
from dataclasses import asdict, replace

from megatron.config.checks import check_resolved_architecture
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.core.control import run_on_rank0
from megatron.errors import ConfigError
from megatron.training.checkpoints.comparison import check_architecture, given_architecture
from megatron.training.checkpoints.saved_run import check_may_begin, look_up_saved_run
from megatron.training.context import RunContext

FlagsOver = Callable[[ModelConfig], RunConfig]
"""Parses the command line again with other defaults of the model's flags."""


def resolve_architecture(context: RunContext, flags_over: FlagsOver) -> RunConfig:
    """The flags with a checked architecture; a collective.

    With ``--use-checkpoint-args`` the model's flags that are not given take the values of the checkpoint. Raises
    :class:`~megatron.errors.UserError` if a given one differs.
    """
    if not context.config.checkpoint.use_checkpoint_args:
        return context.config
    # Rank 0 reads one checkpoint for all ranks. If it turns out to be damaged, another one is loaded later: loading
    # compares the architecture again.
    return run_on_rank0(context.control, lambda: _resolve(context, flags_over))


def _resolve(context: RunContext, flags_over: FlagsOver) -> RunConfig:
    config, world_size, log_rank0 = context.config, context.control.size, context.log_rank0
    saved = look_up_saved_run(config.checkpoint)
    if saved is None:
        check_may_begin(config.checkpoint)
        try:
            check_resolved_architecture(config, world_size)
        except ConfigError as error:
            raise ConfigError(
                f"--load {config.checkpoint.load} has no checkpoint yet for --use-checkpoint-args, and {error}"
            ) from None
        log_rank0("architecture: from the command line, since there is no checkpoint yet")
        return config
    architecture = asdict(saved.state.architecture)
    defaults = ModelConfig.of(saved.state.architecture)
    if architecture["max_position_embeddings"] < config.seq_length:
        defaults = replace(defaults, max_position_embeddings=None)  # no weight depends on it
    config = flags_over(defaults)
    surplus = "what differs" if config.model.model is None else f"--model {config.model.model} and what differs"
    given, where = given_architecture(config.model), f"The checkpoint under {saved.root}"
    check_architecture(given, architecture, where, remedy=f"leave out {surplus}")
    check_resolved_architecture(config, world_size)
    log_rank0(f"architecture: from the checkpoint of iteration {saved.iteration} in {saved.root}")
    return config
