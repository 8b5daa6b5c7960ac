"""Checks of the flags for running unattended against training and checkpoints."""

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags


def check_update_policies(run: RunConfig, world_size: int) -> None:
    operation, checkpoint = run.operation, run.checkpoint
    if operation.nan_policy != "stop" and not run.training.check_for_nan_in_loss_and_grad:
        raise ConfigError(
            f"--nan-policy {operation.nan_policy} and --no-check-for-nan-in-loss-and-grad, which skips without limit, "
            "exclude each other: remove one of them."
        )
    if not operation.rolls_back:
        return
    policy = "--spike-policy" if operation.spike_policy == "rollback" else "--nan-policy"
    if checkpoint.save is None or checkpoint.save_interval is None:
        raise ConfigError(
            f"{policy} rollback needs checkpoints to return to: add --save and --save-interval, or use {policy} skip."
        )
    for flag in changed_flags(checkpoint, "save_optim", "save_rng"):
        raise ConfigError(
            f"{policy} rollback needs checkpoints with the whole state of the run: remove {flag}, or use {policy} skip."
        )
