"""Checks that cross flag groups, by topic, and the order in which a run has them."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial

from megatron.config.checks import (
    layout,
    operation,
    precision,
    run_all,
)
from megatron.config.checks import (
    model as attention,
)
from megatron.config.checks import (
    model as experts,
)
from megatron.config.checks import (
    model as mup,
)
from megatron.config.checks import (
    operation as faults,
)
from megatron.config.checks import (
    precision as backends,
)
from megatron.config.checks import (
    training as length,
)
from megatron.config.run import RunConfig


def check_run(run: RunConfig, world_size: int) -> None:
    """Raise :class:`ConfigError` for every invalid flag or combination in a run of ``world_size`` processes.

    With ``--use-checkpoint-args`` the architecture is not known yet: call :func:`check_resolved_architecture` later.
    """
    stages = [[getattr(run, group.name).check for group in fields(run)]]
    stages.append([partial(check, run, world_size) for check in CROSS_GROUP_CHECKS])
    if not run.checkpoint.use_checkpoint_args:
        stages.append([partial(check, run, world_size) for check in ARCHITECTURE_CHECKS])
    run_all(stages)


def check_resolved_architecture(run: RunConfig, world_size: int) -> None:
    """Raise :class:`ConfigError` for every model size that is missing or incompatible with the layout."""
    run_all([[partial(check, run, world_size) for check in ARCHITECTURE_CHECKS]])


CROSS_GROUP_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    length.check_required,
    length.check_data_source,
    length.check_loader_timeout,
    layout.check_tensor_parallel_overlap,
    backends.check_transformer_engine_overlap,
    layout.check_data_parallel,
    precision.check_formats,
    backends.check_transformer_engine,
    length.check_length,
    length.check_profile,
    length.check_data_stage,
    length.check_validation_sets,
    length.check_evaluation_batch,
    length.check_evaluation_of_average,
    operation.check_update_policies,
    backends.check_kernels,
    length.check_dry_run,
    faults.check_faults,
)
ARCHITECTURE_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    layout.check_tensor_parallel,
    attention.check_attention,
    mup.check_mup,
    experts.check_experts,
    experts.check_expert_layout,
    layout.check_context_parallel,
    layout.check_pipeline,
    layout.check_activations,
    experts.check_recomputed_modules,
    layout.check_fully_sharded,
    experts.check_expert_precision,
    experts.check_expert_optimizer,
    precision.check_fp8,
    backends.check_transformer_engine_buffers,
)
