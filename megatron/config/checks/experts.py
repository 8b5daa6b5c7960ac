"""Checks of mixture of experts against the model and the parallel layout."""

from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.run import RunConfig


def check_expert_layout(run: "RunConfig", world_size: int) -> None:
    size = run.parallel.expert_model_parallel_size
    if size > 1 and not run.model.num_experts:
        raise ConfigError(f"--expert-model-parallel-size {size} needs experts: add --num-experts, or remove the flag.")
