"""Flags that would make a run fit: each is tried, from the cheapest on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron.config.errors import ConfigError
from megatron.config.run import RunConfig
from megatron.planner.plan import Plan, Run, rehearse
from megatron.training.data import Vocabulary

Change = Callable[[RunConfig], RunConfig | None]
"""The flags with something changed; None where there is nothing to change."""

MOST = 3
"""Remedies that are told."""


@dataclass(frozen=True)
class Remedy:
    """Flags to add or change, and what the stage that needs most then needs."""

    flags: str
    needed: int
    """Bytes, the allowance included."""
    stage: int


def find_remedies(plan: Plan) -> list[Remedy]:
    """The cheapest changes that make ``plan`` fit, each rehearsed; none if nothing that is known does."""
    found: list[Remedy] = []
    for flags, config in candidates(plan.run.config):
        remedy = _try(plan, flags, config)
        if remedy is not None:
            found.append(remedy)
        if len(found) == MOST:
            break
    return found


def _try(plan: Plan, flags: str, config: RunConfig) -> Remedy | None:
    """``config`` if it may run and every stage fits that did not, the tightest first."""
    num_gpus = plan.run.grid.world_size
    try:
        config.check(num_gpus)
        run = Run.of(config, num_gpus, Vocabulary(plan.run.vocabulary.size, plan.run.vocabulary.end_of_document))
        _ = run.num_microbatches
    except ConfigError:
        return None
    worst: tuple[int, int] = (0, 0)
    for stage in _stages_to_try(plan, run):
        rehearsed = rehearse(run, run.rank_of_stage(stage))
        if rehearsed.needed > plan.limit:
            return None
        worst = max(worst, (rehearsed.needed, stage))
    return Remedy(flags, *worst)


def _stages_to_try(plan: Plan, run: Run) -> list[int]:
    """Those that do not fit as it is; of another pipeline the ends and the middle."""
    if run.grid.pp != plan.run.grid.pp:
        return sorted({0, run.grid.pp // 2, run.grid.pp - 1})
    ordered = sorted(plan.stages, key=lambda stage: stage.needed, reverse=True)
    return [stage.stage for stage in ordered if stage.needed > plan.limit]


def candidates(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes with the flags that make them, from those that cost nothing to those that cost most."""
    together: RunConfig | None = config
    names: list[str] = []
    for flags, change in CHEAP:
        alone = change(config)
        if alone is None:
            continue
        yield flags, alone
        together = change(together) or together
        names.append(flags)
        if len(names) > 1:
            yield " ".join(names), together
    for count in range(1, _most_layers(config)):
        # Whole layers instead of parts of all.
        yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}", (
            _recompute_layers(together, count)
        )
    uniform = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    everything = _recompute_uniformly(together)
    without = [name for name in names if "recompute" not in name]
    yield " ".join([*without, uniform]), everything
    for flags, change in COSTLY:
        larger = change(everything)
        if larger is not None:
            yield " ".join([*without, uniform, flags.format(**_sizes(larger))]), larger


def _sizes(config: RunConfig) -> dict[str, int]:
    parallel = config.parallel
    return {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
    }


def _most_layers(config: RunConfig) -> int:
    """Layers of the largest chunk."""
    model = config.model.resolve(1, config.parallel.tensor_model_parallel_size, config.seq_length)
    stages = config.pipeline.virtual_stages(model.num_layers, config.parallel.pipeline_model_parallel_size)
    return max(len(stage.layers) for stage in stages)


def _shard_optimizer(config: RunConfig) -> RunConfig | None:
    if config.parallel.sharding_strategy != "no_shard":
        return None
    parallel = replace(config.parallel, data_parallel_sharding_strategy=None, use_distributed_optimizer=True)
    return replace(config, parallel=parallel)


def _split_sequence(config: RunConfig) -> RunConfig | None:
    if config.parallel.sequence_parallel or config.parallel.tensor_model_parallel_size == 1:
        return None
    return replace(config, parallel=replace(config.parallel, sequence_parallel=True))


def _halve_microbatch(config: RunConfig) -> RunConfig | None:
    if config.micro_batch_size == 1:
        return None
    batch = config.training.global_batch_size
    return replace(config, training=replace(config.training, micro_batch_size=1, global_batch_size=batch))


def _recompute_cheap_parts(config: RunConfig) -> RunConfig | None:
    if config.activations.granularity is not None:
        return None
    activations = replace(
        config.activations, recompute_granularity="selective", recompute_modules=("layernorm", "mlp_act")
    )
    return replace(config, activations=activations)


def _recompute_mlp(config: RunConfig) -> RunConfig | None:
    if config.activations.granularity == "full" or "mlp" in config.activations.modules:
        return None
    activations = replace(
        config.activations,
        recompute_activations=False,
        recompute_granularity="selective",
        recompute_modules=("layernorm", "mlp"),
    )
    return replace(config, activations=activations)


def _shard_gradients(config: RunConfig) -> RunConfig | None:
    if config.parallel.sharding_strategy not in ("no_shard", "optim"):
        return None
    parallel = replace(
        config.parallel, use_distributed_optimizer=False, data_parallel_sharding_strategy="optim_grads"
    )
    return replace(config, parallel=parallel)


def _recompute_layers(config: RunConfig, count: int) -> RunConfig:
    activations = replace(
        config.activations,
        recompute_activations=False,
        recompute_granularity="full",
        recompute_modules=None,
        recompute_method="block",
        recompute_num_layers=count,
    )
    return replace(config, activations=activations)


def _recompute_uniformly(config: RunConfig) -> RunConfig:
    config = _recompute_layers(config, 1)
    return replace(config, activations=replace(config.activations, recompute_method="uniform"))


def _twice(name: str) -> Change:
    def double(config: RunConfig) -> RunConfig | None:
        size = getattr(config.parallel, name)
        return replace(config, parallel=replace(config.parallel, **{name: 2 * size}))

    return double


CHEAP: tuple[tuple[str, Change], ...] = (
    ("--use-distributed-optimizer", _shard_optimizer),
    ("--sequence-parallel", _split_sequence),
    ("--recompute-granularity selective --recompute-modules layernorm mlp_act", _recompute_cheap_parts),
    ("--micro-batch-size 1", _halve_microbatch),
    ("--recompute-granularity selective --recompute-modules layernorm mlp", _recompute_mlp),
    ("--data-parallel-sharding-strategy optim_grads", _shard_gradients),
)
COSTLY: tuple[tuple[str, Change], ...] = (
    ("--tensor-model-parallel-size {tp}", _twice("tensor_model_parallel_size")),
    ("--pipeline-model-parallel-size {pp}", _twice("pipeline_model_parallel_size")),
    ("--context-parallel-size {cp}", _twice("context_parallel_size")),
)
