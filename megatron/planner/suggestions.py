"""Flags that would make a run fit: each is tried, from the cheapest on."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from megatron.config.activations import RecomputeMethod, RecomputeModule
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.planner.plan import Plan, Run, simulate_rank

Change = Callable[[RunConfig], RunConfig | None]
"""The flags with something changed; None where there is nothing to change."""

MOST = 3
"""Remedies that are told."""


@dataclass(frozen=True)
class Suggestion:
    """Flags to add or change, and what the stage that needs most then needs."""

    flags: str
    needed: int
    """Bytes, the allowance included."""
    stage: int


def find_suggestions(plan: Plan, asked: RunConfig) -> list[Suggestion]:
    """The cheapest changes of the flags that were ``asked`` for that make ``plan`` fit, each simulated; none if nothing
    that is known does."""
    found: list[Suggestion] = []
    for config in candidates(asked):
        flags = flags_between(asked, config)
        if any(one.flags in flags for one in found):
            # More than enough.
            continue
        suggestion = _try(plan, config, flags)
        if suggestion is not None:
            found.append(suggestion)
        if len(found) == MOST:
            break
    return found


def _try(plan: Plan, config: RunConfig, flags: str) -> Suggestion | None:
    """``config`` if it may run and every stage fits that did not, the tightest first, of those alike one."""
    num_gpus = plan.run.grid.world_size
    try:
        config.check(num_gpus)
        run = Run.of(config, num_gpus, plan.run.vocabulary)
        _ = run.num_microbatches
    except ConfigError:
        return None
    worst: tuple[int, int] = (0, 0)
    different: dict[Hashable, int] = {}
    for stage in _stages_to_try(plan, run):
        different.setdefault(run.signature(run.rank_of_stage(stage)), stage)
    for stage in different.values():
        simulated = simulate_rank(run, run.rank_of_stage(stage))
        if simulated.needed > plan.limit:
            return None
        worst = max(worst, (simulated.needed, stage))
    return Suggestion(flags, *worst)


def _stages_to_try(plan: Plan, run: Run) -> list[int]:
    """Those that do not fit as it is; of another pipeline the ends and the middle."""
    if run.grid.pp != plan.run.grid.pp:
        return sorted({0, run.grid.pp // 2, run.grid.pp - 1})
    ordered = sorted(plan.stages, key=lambda stage: stage.needed, reverse=True)
    return [stage.stage for stage in ordered if stage.needed > plan.limit]


def candidates(config: RunConfig) -> Iterator[RunConfig]:
    """Changed flags, from what costs nothing to what costs most: single changes, then all of these together with more
    and more recompute, then larger model-parallel groups on top."""
    together, singles = config, 0
    for change in FREE:
        alone = change(config)
        if alone is not None:
            singles += 1
            yield alone
            together = change(together) or together
    if singles > 1:
        yield together
    for modules in RECOMPUTED:
        for base in dict.fromkeys((config, together)):
            recomputing = _recompute_parts(base, modules)
            if recomputing is not None:
                yield recomputing
    for base in dict.fromkeys((config, together)):
        most = _most_layers(config)
        for count in sorted({most // 4, most // 2, most * 3 // 4, most} - {0}):
            yield _recompute_layers(base, "block", count)
    everything = _recompute_layers(together, "uniform", 1)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size = 2 * getattr(config.parallel, name)
        yield replace(everything, parallel=replace(everything.parallel, **{name: size}))


def flags_between(before: RunConfig, after: RunConfig) -> str:
    """What to add to the flags of ``before``, or to change in them, for ``after``."""
    words: list[str] = []
    for group in fields(before):
        old, new = getattr(before, group.name), getattr(after, group.name)
        words += [_spelling(field.name, getattr(new, field.name)) for field in fields(old) if _differs(field, old, new)]
    return " ".join(words)


def _differs(field: Field[Any], old: object, new: object) -> bool:
    return bool(getattr(old, field.name) != getattr(new, field.name))


def _spelling(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if value is None:
        return f"(without --{flag})"
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


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


def _smallest_microbatch(config: RunConfig) -> RunConfig | None:
    if config.micro_batch_size == 1:
        return None
    return replace(config, training=replace(config.training, micro_batch_size=1))


def _shard_gradients(config: RunConfig) -> RunConfig | None:
    if config.parallel.sharding_strategy not in ("no_shard", "optim"):
        return None
    return replace(config, parallel=replace(config.parallel, data_parallel_sharding_strategy="optim_grads"))


def _recompute_parts(config: RunConfig, modules: tuple[RecomputeModule, ...]) -> RunConfig | None:
    if config.activations.granularity == "full" or config.activations.modules >= set(modules):
        return None
    activations = replace(
        config.activations, recompute_activations=False, recompute_granularity="selective", recompute_modules=modules
    )
    return replace(config, activations=activations)


def _recompute_layers(config: RunConfig, method: RecomputeMethod, count: int) -> RunConfig:
    activations = replace(
        config.activations,
        recompute_activations=False,
        recompute_granularity="full",
        recompute_modules=None,
        recompute_method=method,
        recompute_num_layers=count,
    )
    return replace(config, activations=activations)


FREE: tuple[Change, ...] = (_shard_optimizer, _split_sequence, _smallest_microbatch, _shard_gradients)
"""What computes nothing twice; the last sends gradients with every microbatch."""
RECOMPUTED: tuple[tuple[RecomputeModule, ...], ...] = (
    ("layernorm",),
    ("mlp_act",),
    ("layernorm", "mlp_act"),
    ("core_attn", "layernorm", "mlp_act"),
    ("layernorm", "mlp"),
)
