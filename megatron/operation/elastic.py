"""A job on fewer nodes than planned (``--nnodes MIN:MAX``): how many of its ranks train.

The sizes of tensor, context and pipeline parallelism and of the experts do not change, nor does the global batch. Only
the data-parallel size does: it is the largest with which the run is valid. Further ranks wait as spares.
"""

from collections.abc import Callable

from megatron.config.checks import check_run
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

ELASTIC = "MEGATRON_ELASTIC"
"""Environment variable of the ranks: set if the number of nodes may change."""


def usable_world_size(config: RunConfig, world_size: int, check_batches: Callable[[int], None]) -> int:
    """The number of ranks that train, of ``world_size`` that have started; the others are spares.

    ``check_batches(data_parallel_size)`` raises :class:`ConfigError` for a size that does not divide every global
    batch of the run. Raises :class:`ConfigError` if no size is valid: the error of the largest.
    """
    training, replica = config.training, config.parallel.model_parallel_size
    if training.global_batch_size is None and training.step_batch_size_schedule is None:
        raise ConfigError(
            "--nnodes MIN:MAX needs a batch that does not depend on the number of ranks: add --global-batch-size."
        )
    if world_size < replica:
        raise ConfigError(
            f"{world_size} processes are fewer than --tensor-model-parallel-size x --pipeline-model-parallel-size x "
            f"--context-parallel-size = {replica}: raise MIN of --nnodes MIN:MAX."
        )
    first: ConfigError | None = None
    for data_parallel_size in range(world_size // replica, 0, -1):
        try:
            check_batches(data_parallel_size)
            check_run(config, data_parallel_size * replica)
        except ConfigError as error:
            first = first or error
        else:
            return data_parallel_size * replica
    assert first is not None
    raise first
