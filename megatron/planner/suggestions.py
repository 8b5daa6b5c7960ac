"""Suggested flags with which a run fits: candidates are simulated, the cheapest first."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.config.activations import RecomputeMethod, RecomputeModule
from megatron.config.checks import check_run
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import flag_of, words_of
from megatron.planner.plan import Plan, Run, simulate_rank

Change = Callable[[RunConfig], RunConfig | None]
"""Returns changed flags; None if there is nothing to change."""

MOST = 3
"""Number of suggestions."""


@dataclass(frozen=True)
class Suggestion:
    flags: str
    """Flags to add or change."""
    needed: int
    """Memory of the tightest stage in bytes, with the allowance."""
    stage: int


def find_suggestions(plan: Plan, asked: RunConfig) -> list[Suggestion]:
    """The cheapest changes of the flags ``asked`` with which ``plan`` fits."""
    found: list[Suggestion] = []
    for config in candidates(asked):
        flags = flags_between(asked, config)
        if any(one.flags in flags for one in found):
            continue  # a part of these flags is enough
        suggestion = _try(plan, config, flags)
        if suggestion is not None:
            found.append(suggestion)
        if len(found) == MOST:
            break
    return found


def _try(plan: Plan, config: RunConfig, flags: str) -> Suggestion | None:
    """A suggestion if ``config`` is valid and every stage that overflowed now fits (tightest first; one per signature).
    Of a pipeline with another number of stages, the first, the middle and the last stage are simulated."""
    num_gpus = plan.run.grid.world_size
    try:
        check_run(config, num_gpus)
        run = Run.of(config, num_gpus, plan.run.vocabulary)
        _ = run.num_microbatches
    except ConfigError:
        return None
    if run.grid.pp != plan.run.grid.pp:
        stages = sorted({0, run.grid.pp // 2, run.grid.pp - 1})
    else:
        ordered = sorted(plan.stages, key=lambda stage: stage.needed, reverse=True)
        stages = [stage.stage for stage in ordered if stage.needed > plan.limit]
    different: dict[Hashable, int] = {}
    for stage in stages:
        different.setdefault(run.signature(run.rank_of_stage(stage)), stage)
    worst: tuple[int, int] = (0, 0)
    for stage in different.values():
        simulated = simulate_rank(run, run.rank_of_stage(stage))
        if simulated.needed > plan.limit:
            return None
        worst = max(worst, (simulated.needed, stage))
    return Suggestion(flags, *worst)


def candidates(config: RunConfig) -> Iterator[RunConfig]:
    """Changed flags, the cheapest first: single changes that cost no computation, all of them together, then these with
    more and more recompute, then with larger model-parallel groups."""
    together, singles = config, 0
    for change in FREE:
        alone = change(config)
        if alone is not None:
            singles += 1
            yield alone
            together = change(together) or together
    if singles > 1:
        yield together
    bases = dict.fromkeys((config, together))
    for modules in _recomputed_modules(config):
        for base in bases:
            if base.activations.granularity != "full" and not base.activations.modules >= set(modules):
                yield _recompute(base, recompute_granularity="selective", recompute_modules=modules)
    for base in bases:
        most = _most_layers(config)
        for count in sorted({most // 4, most // 2, most * 3 // 4, most} - {0}):
            yield _recompute_layers(base, "block", count)
    everything = _recompute_layers(together, "uniform", 1)
    parallel = everything.parallel
    if config.model.num_experts:
        yield _parallel(everything, expert_model_parallel_size=2 * parallel.expert_model_parallel_size)
    # Experts are divided as before, and without --sequence-parallel activations would hardly be smaller.
    kept = {"expert_tensor_parallel_size": parallel.expert_tensor_size} if config.model.num_experts else {}
    tensor_size = 2 * parallel.tensor_model_parallel_size
    yield _parallel(everything, tensor_model_parallel_size=tensor_size, sequence_parallel=True, **kept)
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        yield _parallel(everything, **{name: 2 * getattr(parallel, name)})


def flags_between(before: RunConfig, after: RunConfig) -> str:
    """The flags to add to ``before``, or to change in it, for ``after``."""
    words: list[str] = []
    for group in fields(before):
        old, new = getattr(before, group.name), getattr(after, group.name)
        for field in fields(old):
            value = getattr(new, field.name)
            if getattr(old, field.name) != value:
                words += [f"(without {flag_of(field.name)})"] if value is None else words_of(field.name, value)
    return " ".join(words)


def _recomputed_modules(config: RunConfig) -> Iterator[tuple[RecomputeModule, ...]]:
    """:data:`RECOMPUTED` in the layers that the model has."""
    model = config.model.resolve(1, config.parallel.tensor_model_parallel_size, config.seq_length)
    is_moe = model.moe_layers()
    in_moe: dict[RecomputeModule, RecomputeModule] = {"mlp_act": "moe_act", "mlp": "moe"}
    for modules in RECOMPUTED:
        dense = () if all(is_moe) else modules
        experts = tuple(in_moe.get(module, module) for module in modules) if any(is_moe) else ()
        yield tuple(dict.fromkeys((*dense, *experts)))


def _most_layers(config: RunConfig) -> int:
    """Layers of the largest chunk."""
    model = config.model.resolve(1, config.parallel.tensor_model_parallel_size, config.seq_length)
    stages = config.pipeline.virtual_stages(model.num_layers, config.parallel.pipeline_model_parallel_size)
    return max(len(stage.layers) for stage in stages)


def _parallel(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, **changes))


def _shard_optimizer(config: RunConfig) -> RunConfig | None:
    if config.parallel.sharding_strategy != "no_shard":
        return None
    return _parallel(config, data_parallel_sharding_strategy=None, use_distributed_optimizer=True)


def _split_sequence(config: RunConfig) -> RunConfig | None:
    if config.parallel.sequence_parallel or config.parallel.tensor_model_parallel_size == 1:
        return None
    return _parallel(config, sequence_parallel=True)


def _smallest_microbatch(config: RunConfig) -> RunConfig | None:
    if config.micro_batch_size == 1:
        return None
    return replace(config, training=replace(config.training, micro_batch_size=1))


def _shard_gradients(config: RunConfig) -> RunConfig | None:
    if config.parallel.sharding_strategy not in ("no_shard", "optim"):
        return None
    return _parallel(config, data_parallel_sharding_strategy="optim_grads")


def _recompute(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, activations=replace(config.activations, recompute_activations=False, **changes))


def _recompute_layers(config: RunConfig, method: RecomputeMethod, count: int) -> RunConfig:
    return _recompute(
        config,
        recompute_granularity="full",
        recompute_modules=None,
        recompute_method=method,
        recompute_num_layers=count,
    )


FREE: tuple[Change, ...] = (_shard_optimizer, _split_sequence, _smallest_microbatch, _shard_gradients)
"""Changes without recompute; the last one reduces gradients in every microbatch."""
RECOMPUTED: tuple[tuple[RecomputeModule, ...], ...] = (
    ("layernorm",),
    ("mlp_act",),
    ("layernorm", "mlp_act"),
    ("core_attn", "layernorm", "mlp_act"),
    ("layernorm", "mlp"),
)
