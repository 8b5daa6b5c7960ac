"""The load of the experts with which a plan still fits."""

from megatron.config.dry_run import ALLOWANCE
from megatron.planner.plan import Plan, StagePlan, simulate_rank


def largest_fitting_load(plan: Plan) -> float | None:
    """The largest load of the experts with which every stage of ``plan`` fits, at most the largest possible one.

    None if the load does not matter (no experts, or all on each rank), and if the plan does not fit.
    """
    run = plan.run
    if run.architecture.num_experts is None or run.grid.ep == 1 or not plan.fits:
        return None
    assumed = run.config.dry_run.dry_run_expert_load
    load = run.architecture.largest_expert_load(run.grid.ep)
    different = {stage.simulated_rank: stage for stage in plan.stages}.values()
    for stage in sorted(different, key=lambda stage: stage.needed, reverse=True):
        if load <= assumed or _most_needed(stage, load / assumed) <= plan.limit:
            continue
        needed = simulate_rank(run.with_expert_load(load), stage.simulated_rank, stage.simulated_microbatches).needed
        if needed > plan.limit:
            # At each moment memory is linear in the load. So the peak is convex, and a straight line is not below it.
            load = assumed + (load - assumed) * (plan.limit - stage.needed) / (needed - stage.needed)
    return load


def _most_needed(stage: StagePlan, factor: float) -> float:
    """A bound of the memory with ``factor`` times the load: as if all memory grew but what is there between steps."""
    return ALLOWANCE + stage.steady.total + factor * (stage.peak.total - stage.steady.total)
