"""Checks of the features beside the training step against flags of other groups."""

from megatron.config.run import RunConfig
from megatron.flags import changed_flags


def check_spikes(run: RunConfig, world_size: int) -> None:
    checkpoint = run.checkpoint
    run.operation.check_spikes_in_run(
        stops_at_nan=run.training.check_for_nan_in_loss_and_grad,
        has_saves=checkpoint.save is not None and checkpoint.save_interval is not None,
        saves_in_part=changed_flags(checkpoint, "save_optim", "save_rng"),
    )


def check_faults(run: RunConfig, world_size: int) -> None:
    checkpoint, operation = run.checkpoint, run.operation
    operation.check_faults_in_run(
        world_size, operation.run_dir, checkpoint.save, checkpoint.async_save, run.data.num_workers
    )
